"""residual: adds a block's output to the prefix, in bf16(prefix + delta); pushes snapshots.

A snapshot layer pushes the prefix as it came in and starts a new one from its attention output. For
a mixture with shared experts the delta is ``mlp_delta = bf16(routed + shared)``. The prefix lies
behind the snapshots in ``residual_stack``, so a push copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class ResidualUse:
    """What is added: the buffers ``delta`` and, if named, ``shared``. num_snapshots: before it."""

    delta: str
    num_snapshots: int
    is_push: bool = False
    shared: str | None = None


CONTRACT = OpContract(
    name="residual",
    covers=("attn_residual",),
    reads=("prefix", "attn_delta"),
    writes=("prefix", "snapshots"),
    mutates=("prefix",),
    tolerance=Tolerance(rtol=0.0, atol=0.0, rms_ratio=0.0),
)
