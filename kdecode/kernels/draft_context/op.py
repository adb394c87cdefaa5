"""draft_context: what was tapped from the target, as one row that every layer of a draft caches.

    normed  = RMSNorm(tap_j; tap_norms_j)         where the layout has norms; else the taps
    context = RMSNorm(bf16(context_proj normed); context_norm)      fp32 statistics, rounded once

Phases: norms of the taps | tiles of context_proj | norm (rows). Covers no stage of the target.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="draft_context",
    covers=(),
    reads=("taps",),
    writes=("context",),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
