"""Which kernels the steps of a CUDA plan have, where there are several for one contract.

Triton's or CuTe DSL's (`EngineConfig.gpu_kernels`), and of MXFP4 experts exact or scaled products
(`EngineConfig.expert_products`). Owns the choice, made once for a plan, and its words. A deployment
that could have nothing of what was asked for is refused; a step that has no kernel of that form has
the other, and the plan says why. Nothing of CuTe DSL is imported unless it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from kdecode.decode.deployment import Deployment
from kdecode.kernels import table
from kdecode.kernels.common.cute_tiles import ARCHS
from kdecode.kernels.common.expert_products import products_note, refuse_products
from kdecode.kernels.contract import Problem

_DISTRIBUTION = "nvidia-cutlass-dsl"
_ADVICE = "set gpu_kernels to 'triton'"


@dataclass(frozen=True)
class Choice:
    """implementations: of each step, by its name in the table. notes: which ops are Triton's
    although CuTe DSL was asked for and has them, and why, each once; and which products scaled."""

    implementations: tuple[str, ...]
    notes: tuple[str, ...]


def refuse(deployment: Deployment) -> list[str]:
    """Every reason why the kernels that were asked for are of no use here."""
    reasons = []
    if deployment.expert_products == "scaled":
        reasons += refuse_products(deployment.config, deployment.arch)
    if deployment.gpu_kernels != "cute":
        return reasons
    if not _is_installed():
        reasons.append(
            f"gpu_kernels is 'cute' and {_DISTRIBUTION} is not installed here; install the extra "
            f"(pip install 'kdecode[gpu]'), or {_ADVICE}."
        )
    if deployment.arch not in ARCHS:
        reasons.append(
            f"gpu_kernels is 'cute', whose kernels are compiled for {', '.join(ARCHS)}; "
            f"{deployment.device} is {deployment.arch or 'not known'}: {_ADVICE}."
        )
    return reasons


def choose(deployment: Deployment, ops: Sequence[str], problems: Sequence[Problem]) -> Choice:
    """For a deployment that is not refused. problems: of each op's step."""
    chosen: list[str] = []
    notes: dict[str, None] = {}
    for op, problem in zip(ops, problems, strict=True):
        is_asked = deployment.gpu_kernels == "cute" and (op, "cute") in table.TABLE
        reasons = table.implementation(op, "cute").refuse(problem) if is_asked else []
        plain = "triton" if (op, "triton") in table.TABLE else "device"
        chosen.append("cute" if is_asked and not reasons else plain)
        notes |= dict.fromkeys(f"{op} is Triton's: {reason}" for reason in reasons)
    if deployment.expert_products == "scaled":
        notes |= dict.fromkeys([products_note(problems[0].rows)])
    return Choice(tuple(chosen), tuple(notes))


def _is_installed() -> bool:
    # By its distribution: another one has a module called cutlass, too.
    try:
        metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return False
    return True
