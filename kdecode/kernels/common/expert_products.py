"""How experts in MXFP4 are multiplied on a GPU: exactly, or by scaled tensor-core products.

Owns what `EngineConfig.expert_products` means for a step, and its words. "exact": codes become bf16
in registers, or are multiplied in fp32. "scaled": the tensor cores take codes and scales as they
are, and each input as two E4M3 numbers with a scale for 32 columns (`triton_scaled.py`). Nothing
here needs Triton.
"""

from __future__ import annotations

from kdecode.config import MXFP4_GROUP, ExpertProducts, ModelConfig
from kdecode.kernels.common.expert_squares import PAIR_ROWS

# What has the instruction, of the architectures that plans are compiled for.
SCALED_ARCHS = ("sm_100", "sm_103")
# Two rounds of a kernel's loop: of a single one Triton 3.7.1 fails to compile the product.
LEAST_COLUMNS = 2 * MXFP4_GROUP


def is_scaled(products: ExpertProducts, is_coded: bool, rows: int) -> bool:
    """Whether a step of so many rows multiplies so. is_coded: the experts are in MXFP4."""
    return products == "scaled" and is_coded and rows > PAIR_ROWS


def refuse_products(config: ModelConfig, arch: str) -> list[str]:
    """Why a model has no scaled products on an architecture; [] where it has."""
    advice, reasons = "set expert_products to 'exact'", []
    if arch not in SCALED_ARCHS:
        reasons.append(
            f"expert_products is 'scaled', of which {' and '.join(SCALED_ARCHS)} have the "
            f"instruction, and not {arch or 'the device'}: {advice}."
        )
    if "moe" not in config.mlp_kinds or config.moe.expert_format != "mxfp4":
        reasons.append(
            f"expert_products is 'scaled' and the model has no experts in MXFP4: {advice}."
        )
        return reasons
    inner = min(config.moe.expert_width, config.moe.latent_width or config.hidden_size)
    if inner < LEAST_COLUMNS:
        reasons.append(
            f"expert_products is 'scaled' and the experts have products of {inner} columns; the "
            f"kernels take {LEAST_COLUMNS} at least: {advice}."
        )
    return reasons


def products_note(rows: int | None) -> str:
    """What a plan of so many rows says of it."""
    if rows is not None and rows <= PAIR_ROWS:
        return f"products of experts are exact up to {PAIR_ROWS} rows, and scaled above"
    return "products of experts are scaled: codes as they are, inputs as two E4M3 numbers"
