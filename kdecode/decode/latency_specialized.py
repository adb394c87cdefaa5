"""The `latency_specialized` backend: few fused, shape-specialised steps for small decode batches.

The one entrance to its plans, whatever the device: `latency_cpu` and `latency_cuda` have the steps.
Opt-in and fail-closed: `refuse` lists every reason why a deployment cannot run it. Rounding points
are those of the ops that the plans are made of.
"""

from __future__ import annotations

from types import ModuleType

from kdecode.cache.caches import Caches
from kdecode.decode import latency_cpu, latency_cuda
from kdecode.decode.deployment import BackendRefusedError, Deployment
from kdecode.decode.latency_cpu import exchange_bytes
from kdecode.decode.plan import DecodePlan
from kdecode.kernels.common.native import MAX_ROWS
from kdecode.kernels.contract import PlanMemory
from kdecode.model.layout import PackedModel

__all__ = [
    "ROW_BUCKETS",
    "BackendRefusedError",
    "Deployment",
    "build",
    "check",
    "describe",
    "exchange_bytes",
    "refuse",
]

# Rows of the plans that can be prepared: one plan each.
ROW_BUCKETS = tuple(range(1, MAX_ROWS + 1))


def refuse(deployment: Deployment, rows_per_request: int = 1) -> list[str]:
    """Every reason, each once, why this deployment cannot run the backend; [] if it can.

    rows_per_request: above 1 for its verify steps.
    """
    config, reasons = deployment.config, []
    attention_widths = {config.kda.width, config.mla.num_heads * config.mla.v_dim}
    if len(attention_widths) > 1 and "mla" in config.layer_kinds:
        reasons.append(
            f"KDA and MLA heads must have the same total width; they have {config.kda.width} and "
            f"{config.mla.num_heads * config.mla.v_dim} channels."
        )
    reasons += _steps_of(deployment).refuse(deployment, ROW_BUCKETS[-1], rows_per_request)
    return list(dict.fromkeys(reasons))


def check(deployment: Deployment, rows_per_request: int = 1) -> None:
    """Raises BackendRefusedError with every reason, if there is one."""
    reasons = refuse(deployment, rows_per_request)
    if reasons:
        raise BackendRefusedError(reasons)


def build(
    deployment: Deployment,
    packed: PackedModel,
    caches: Caches,
    rows: int,
    rows_per_request: int = 1,
    memory: PlanMemory | None = None,
) -> DecodePlan:
    """The plan of one row bucket. Raises BackendRefusedError with every reason.

    rows_per_request: above 1 of verify steps, which leave the KDA slots to `DecodePlan.commit`.
    memory: that the plans of one engine share; None for a plan on its own.
    """
    described = describe(deployment, packed, rows, rows_per_request)
    plan: DecodePlan = _steps_of(deployment).build(deployment, described, packed, caches, memory)
    return plan


def describe(
    deployment: Deployment, packed: PackedModel, rows: int, rows_per_request: int = 1
) -> DecodePlan:
    """The plan of one row bucket without what it runs on; ``packed`` may be an outline.

    Raises BackendRefusedError with every reason.
    """
    check(deployment, rows_per_request)
    if rows_per_request < 1 or rows % rows_per_request:
        raise ValueError(f"{rows} rows are not a number of requests of {rows_per_request} each.")
    plan: DecodePlan = _steps_of(deployment).describe(deployment, packed, rows, rows_per_request)
    return plan


def _steps_of(deployment: Deployment) -> ModuleType:
    """The device's module: ``refuse``, ``describe`` and ``build``."""
    return latency_cuda if deployment.is_cuda else latency_cpu
