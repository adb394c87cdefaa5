"""Packed weight matrices: what every linear kernel reads.

A `Matrix` is W [rows, cols] in one of three formats (see ARCHITECTURE.md, "Packed weights", and
``native.h`` for the byte order). Packing is exact: `to_rows` gives back the same bf16 bits, and for
MXFP4 the same codes and scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

MatrixFormat = Literal["rows", "tiles", "mxfp4_tiles"]

TILE_ROWS = 16


@dataclass(frozen=True)
class Matrix:
    """W [rows, cols].

    format "rows": ``data`` bf16 [rows, cols]. "tiles": ``data`` bf16 [ceil(rows/16), cols/2, 16, 2],
    missing rows zero. "mxfp4_tiles": ``data`` uint8 [ceil(rows/16), cols/32, 256], ``scales`` uint8
    [ceil(rows/16), cols/32, 16]; missing rows have code 0 and scale 127.
    """

    format: MatrixFormat
    rows: int
    cols: int
    data: Tensor
    scales: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        scale_bytes = 0 if self.scales is None else self.scales.numel()
        return self.data.numel() * self.data.element_size() + scale_bytes
