"""mlp: y = bf16(down bf16(act(bf16(gate x), bf16(up x)))): a dense layer, or the shared experts."""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class MlpWeights:
    gate_up: Matrix
    down: Matrix
    output: str


CONTRACT = OpContract(
    name="mlp",
    covers=("dense_mlp",),
    reads=("mlp_in",),
    writes=("mlp_delta",),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=1e-2, rms_ratio=8e-3),
)
