"""mla_front: an MLA layer from the residual mix to the gated values of its heads.

    attn_mix = MIX(prefix, snapshots)             residual mix; a copy of prefix without one
    attn_in  = RMSNorm(attn_mix; input_norm)      fp32 statistics and weight, rounded once
    mla_proj = bf16(in_proj attn_in)              columns query, latent c, k_pe, gate
    q        = bf16(q_b RMSNorm(query; q_norm))   the query columns themselves without q LoRA
    mla_query = [bf16(W_UK^T q_nope), q_pe]       a head's query against cache rows, not rotated
    cache row = [RMSNorm(c; kv_norm), k_pe]       bf16, or E4M3 of it over the layer's scale
    mla_latent = bf16(sum_j p_j c_j)              p = softmax(qk_dim^-1/2 mla_query row_j), fp32
    attn_out = bf16((W_UV mla_latent) sigmoid(gate))      without a gate: bf16(W_UV mla_latent)

A row of an fp8 cache counts as bf16(code * scale). A row's context is the row_position tokens
before it and itself; nothing behind that is read, so pages may hold anything there. All rows are
inserted before any is attended to: rows of one request may follow each other.

In a plan of a draft (``Problem.rotation_scale``) q_pe and k_pe are turned by row_rotation, pairs of
neighbours, rounded once; scores carry that scale as well; and a row's context is the first
row_context tokens, which may be behind its own.

The context is cut into splits of a length that is a constant of the plan, and a split into rounds
of an online softmax; splits are added up in their order. So the result depends neither on the
number of threads nor on the other rows. Rows of one request that follow each other read each split
once for all of them.

Of ranks that share the positions of a context (``Problem.context``) each has the heads of its own
and some of the cache rows: a row is inserted where it belongs, every rank gets the queries of all
heads, attends to the rows that it has, and gives the other ranks what it found for their heads:
weighted sums, and of their weights the largest score and the sum. Whoever has a head adds these up
in the order of the ranks, as it would splits. mla_query and mla_latent are of its own heads.

Phases: mix and norm (rows are split) | tiles of in_proj | query and latent norm, insert (rows) |
q_b and W_UK (heads) | attention (splits, for some heads of a request's rows) | sum of splits, W_UV,
gate (heads). Ranks that share a context exchange queries before the attention and sums behind it.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="mla_front",
    covers=(
        "attn_mix",
        "attn_norm",
        "mla_in_proj",
        "mla_query",
        "mla_insert",
        "mla_attend",
        "mla_value",
    ),
    reads=("prefix", "snapshots", "row_position", "row_pages"),
    writes=("attn_mix", "attn_in", "mla_proj", "mla_query", "mla_latent", "attn_out"),
    mutates=("caches.pages",),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
