"""What the specialised plans of a deployment have in common, and the refusal that has every reason.

Owns the settings from which the plans of one engine are described and built, whatever the device.
Does not know steps or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kdecode.config import (
    ExpertProducts,
    GpuExchange,
    GpuKernels,
    ModelConfig,
    SharedExperts,
    WeightPrefetch,
)
from kdecode.kernels.common.native import Pool
from kdecode.kernels.contract import Problem
from kdecode.parallel.context import WHOLE, ContextShare
from kdecode.parallel.ranks import ALONE, Ranks


class BackendRefusedError(ValueError):
    """The deployment cannot run the backend that was asked for; the message has every reason.

    others: what keeps any backend from running it.
    """

    def __init__(self, reasons: Sequence[str], others: Sequence[str] = ()) -> None:
        self.reasons = (*reasons, *others)
        advice = "Set decode_backend to auto, or change what is named above."
        if others:
            lines = "\n".join(f"  - {reason}" for reason in others)
            advice = f"Nor can any backend:\n{lines}\nChange what is named above."
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        super().__init__(
            f"decode_backend latency_specialized cannot run this deployment:\n{lines}\n{advice}"
        )


@dataclass(frozen=True)
class Deployment:
    """What a deployment's plans have in common.

    isa: instruction set of the native kernels. threads: their pool, owned by the caller; None for
    a deployment that is judged or described, and not run, and on CUDA. rotation_scale,
    is_causal_block, window: of the stack of a draft; see `Problem`. arch: of a CUDA device,
    "sm_90". tensors: the torch device of a CUDA plan's tensors where it is not ``device``: "cpu"
    for Triton's interpreter, "meta" for a plan whose kernels are compiled and not run. ranks: of
    several, ``config`` is one rank's share, and ``shared`` what its steps exchange values through;
    None for one that does not run. gpu_exchange: how those of a plan that only is described would
    do it between GPUs. context: of which positions the cache rows are here, as the caches have it.
    gpu_kernels: whose kernels a CUDA plan has, where there are several. shared_experts,
    weight_prefetch: what it has beside its own stream (`side_steps`). expert_products: how experts
    in MXFP4 are multiplied there.
    """

    config: ModelConfig
    device: str
    isa: str
    threads: Pool | None
    cache_dtype: str
    page_tokens: int
    max_context_tokens: int
    rotation_scale: float | None = None
    is_causal_block: bool = False
    window: int | None = None
    arch: str = ""
    tensors: str | None = None
    ranks: Ranks = ALONE
    shared: Any = None
    context: ContextShare = WHOLE
    gpu_exchange: GpuExchange = "auto"
    gpu_kernels: GpuKernels = "triton"
    shared_experts: SharedExperts = "inside"
    weight_prefetch: WeightPrefetch = "off"
    expert_products: ExpertProducts = "exact"

    def problem(self, layer: int | None, rows: int, rows_per_request: int = 1) -> Problem:
        return Problem(
            config=self.config,
            layer=layer,
            rows=rows,
            rows_per_request=rows_per_request,
            device=self.place,
            cache_dtype=self.cache_dtype,
            page_tokens=self.page_tokens,
            max_context_tokens=self.max_context_tokens,
            isa=self.isa,
            rotation_scale=self.rotation_scale,
            is_causal_block=self.is_causal_block,
            window=self.window,
            arch=self.arch,
            ranks=self.ranks,
            context=self.context,
            expert_products=self.expert_products,
        )

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def signals_peers(self) -> bool:
        """Whether the ranks of a CUDA plan read each other's memory: then kernels signal and wait,
        and no step is an exchange."""
        if self.shared is None:
            return self.gpu_exchange != "nccl"
        return bool(self.shared.transport == "symmetric")

    @property
    def place(self) -> str:
        """The torch device of the plans' tensors."""
        return self.tensors or self.device

    @property
    def pool(self) -> Pool:
        if self.threads is None:
            raise ValueError("A plan that runs needs the deployment's threads.")
        return self.threads

    @property
    def max_pages(self) -> int:
        return -(-self.max_context_tokens // self.page_tokens)
