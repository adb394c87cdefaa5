"""Triton's interpreter made to round as a GPU does, in every process that runs kernels in it."""

from __future__ import annotations

from typing import Any

import numpy as np


def round_in_the_interpreter() -> None:
    """fp32 becomes the nearest bf16: the interpreter cuts digits off where a GPU rounds."""
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != float32 or target != bfloat16:
            return convert(values, source, target, mode)
        bits = np.ascontiguousarray(values).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)

    interpreter._convert_float = rounded
