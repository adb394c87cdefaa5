"""THE list of (op, implementation, module). Modules are imported only when a plan is built."""

from __future__ import annotations

import importlib
from typing import cast

from kdecode.kernels.contract import Implementation, OpContract

# The fused ops of the latency-specialised path.
_NATIVE = (
    "embed",
    "kda_front",
    "kda_commit",
    "mla_front",
    "attn_out",
    "dense_mlp",
    "moe_front",
    "moe_tail",
    "head",
    # Of a draft, outside its stack of layers.
    "draft_context",
    "draft_insert",
    "markov",
)

# The ops of the standard path.
_TORCH = (
    "embed",
    "attn_res",
    "rms_norm",
    "projection",
    "kda_conv",
    "kda_gate",
    "kda_recurrence",
    "kda_out_norm",
    "mla_attention",
    "residual",
    "mlp",
    "route",
    "experts",
    "latent_up",
)

# The ops of a CUDA plan, and those of the standard path that have kernels there.
_TRITON = (
    "embed_norm",
    "projection",
    "attn_join",
    "mix_norm",
    "moe_join",
    "dense_up",
    "dense_join",
    "mla_query_up",
    "mla_query",
    "mla_attend",
    "mla_value",
    "mla_attention",
    "kda_core",
    "kda_commit",
    "kda_conv",
    "kda_gate",
    "kda_recurrence",
    "kda_out_norm",
    "moe_gate",
    "expert_up",
    "expert_down",
    "prefetch",
    "route",
    "experts",
    # Of a draft, outside its stack of layers.
    "draft_context",
    "draft_insert",
    "draft_choice",
    "draft_confidence",
    # Of a draft's layers that the target has none of.
    "gqa_query",
    "gqa_attend",
    # Of several ranks.
    "embed_part",
    "rank_join",
    "rank_whole",
)

# Of these, the ones that a CUDA plan can have in CuTe DSL instead.
_CUTE = ("projection", "attn_join")

# Ops of the standard path that have another form for `torch.compile`.
_COMPILED = ("attn_res", "kda_recurrence", "mla_attention", "mlp", "experts")

TABLE: dict[tuple[str, str], str] = {
    **{(op, "cpu"): f"kdecode.kernels.{op}.cpu" for op in _NATIVE},
    **{(op, "torch"): f"kdecode.kernels.{op}.torch_impl" for op in _TORCH},
    **{(op, "triton"): f"kdecode.kernels.{op}.triton_impl" for op in _TRITON},
    ("exchange", "device"): "kdecode.kernels.exchange.device",
    ("projection_part", "triton"): "kdecode.kernels.projection.triton_impl",
    ("shared_up", "triton"): "kdecode.kernels.dense_up.triton_impl",
    ("shared_down", "triton"): "kdecode.kernels.projection.triton_impl",
    **{(op, "cute"): f"kdecode.kernels.{op}.cute_impl" for op in _CUTE},
    **{(op, "compiled"): f"kdecode.kernels.{op}.compiled_impl" for op in _COMPILED},
}


def implementation(op: str, impl: str) -> Implementation:
    """The implementation module of an op; KeyError names what is not in the table."""
    if (op, impl) not in TABLE:
        raise KeyError(f"op {op} has no implementation {impl}")
    return cast(Implementation, importlib.import_module(TABLE[op, impl]))


def contract(op: str) -> OpContract:
    """The contract of an op."""
    module = importlib.import_module(f"kdecode.kernels.{op}.op")
    return cast(OpContract, module.CONTRACT)
