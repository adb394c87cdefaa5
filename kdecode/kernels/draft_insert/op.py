"""draft_insert: the cache rows of committed tokens in one layer of a draft.

    latent attention    [RMSNorm(latent; kv_norm), rotate(k_pe)]     of bf16(kv_a context)
    grouped queries     [rotate(RMSNorm(k; k_norm)), v]              of bf16(k and v projections)

in bf16, at the token's position. The context goes through no norm of the layer's own.

Phases: tiles of the projection | rows. Covers no stage of the target.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="draft_insert",
    covers=(),
    reads=("context", "row_position", "row_pages", "row_rotation"),
    writes=(),
    mutates=("caches.pages",),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
