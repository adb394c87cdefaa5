"""mla_query: the absorbed query of every head, and the cache row of every row of the step.

    mla_query = [bf16(W_UK^T q_nope), q_pe]          q: mla_q, or the columns of mla_proj without
                                                     q LoRA; a head's query against cache rows
    cache row = [RMSNorm(c; kv_norm), k_pe]          bf16, or E4M3 of it over the layer's scale

E4M3 is rounded to nearest even and saturates at 448. A row goes to the page that row_pages has for
its position, and is not written where there is none (-1). No other cache row changes. Of a draft
q_pe and k_pe are turned by row_rotation, and rounded to bf16 once.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="mla_query",
    covers=("mla_query", "mla_insert"),
    reads=("mla_proj", "mla_q", "row_position", "row_pages", "row_rotation"),
    writes=("mla_query",),
    mutates=("caches.pages",),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
