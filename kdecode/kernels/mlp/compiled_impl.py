"""mlp for a compiler: the activation in torch's operators."""

from __future__ import annotations

from kdecode.kernels.common.activation import torch_gated
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.product import make_linear
from kdecode.kernels.mlp.op import MlpWeights
from kdecode.kernels.mlp.torch_impl import Mlp


def refuse(problem: Problem) -> list[str]:
    if problem.ranks.is_alone:
        return []
    return ["A compiled step has no exchanges between ranks."]


def prepare(problem: Problem, weights: MlpWeights, buffers: Buffers) -> Prepared:
    return Mlp(
        gate_up=make_linear(weights.gate_up, buffers.products),
        activation=torch_gated(problem.config.activation, weights.gate_up.format),
        down=make_linear(weights.down, buffers.products),
        output=weights.output,
        buffers=buffers,
    )
