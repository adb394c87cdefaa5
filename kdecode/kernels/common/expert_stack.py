"""The experts of a layer as four tensors: what a kernel reads that is given an expert's number.

Owns the proof that the experts of a layer lie in one block, one after the other, so that a base
pointer and a stride are enough; nothing is copied. Experts are duck-typed: anything with
``gate_up`` and ``down``, matrices in "rows" or "mxfp4_rows".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP
from kdecode.kernels.common.matrix import ROW_FORMATS, Matrix, MatrixFormat, empty_huge


@dataclass(frozen=True)
class ExpertStack:
    """Of E experts of width F: gate rows, then up rows, and the way back.

    "rows": ``gate_up`` bf16 [E, 2F, side], ``down`` bf16 [E, side, F]. "mxfp4_rows": the same in
    codes, uint8 [E, 2F, side/2] and [E, side, F/2], with scales uint8 [E, 2F, side/32] and
    [E, side, F/32].
    """

    format: MatrixFormat
    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None
    down_scales: Tensor | None

    @staticmethod
    def empty(form: MatrixFormat, count: int, width: int, side: int) -> ExpertStack:
        """Memory of so many experts, not initialised. form: "rows" or "mxfp4_rows"."""
        shapes = (count, 2 * width, side), (count, side, width)
        if form == "rows":
            gate_up, down = (empty_huge(shape, torch.bfloat16) for shape in shapes)
            return ExpertStack(form, gate_up, down, None, None)
        gate_up, down, gate_up_scales, down_scales = (
            empty_huge((*shape[:2], shape[2] // divisor), torch.uint8)
            for divisor in (2, MXFP4_GROUP)
            for shape in shapes
        )
        return ExpertStack(form, gate_up, down, gate_up_scales, down_scales)

    @staticmethod
    def of(experts: Sequence[Any]) -> ExpertStack:
        """Views of the experts' own memory; ValueError if they are not in one block in order."""
        gate_up = [expert.gate_up for expert in experts]
        down = [expert.down for expert in experts]
        formats = {matrix.format for matrix in (*gate_up, *down)}
        if len(formats) != 1 or not formats <= set(ROW_FORMATS):
            raise ValueError(
                f"A stack's experts are all in one of {', '.join(ROW_FORMATS)}; these are in "
                f"{', '.join(sorted(formats))}."
            )
        return ExpertStack(
            format=gate_up[0].format,
            gate_up=_stacked([matrix.data for matrix in gate_up]),
            down=_stacked([matrix.data for matrix in down]),
            gate_up_scales=_stacked_scales(gate_up),
            down_scales=_stacked_scales(down),
        )

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    def matrices(self) -> Iterator[tuple[Matrix, Matrix]]:
        """Gate_up and down of each expert, as views of the blocks."""
        for expert in range(self.num_experts):
            yield (
                self._matrix(self.gate_up, self.gate_up_scales, expert),
                self._matrix(self.down, self.down_scales, expert),
            )

    def _matrix(self, block: Tensor, scales: Tensor | None, expert: int) -> Matrix:
        data = block[expert]
        rows, cols = data.shape
        if scales is None:
            return Matrix(self.format, rows, cols, data)
        return Matrix(self.format, rows, 2 * cols, data, scales[expert])


def _stacked_scales(matrices: Sequence[Matrix]) -> Tensor | None:
    scales = [matrix.scales for matrix in matrices if matrix.scales is not None]
    if len(scales) not in (0, len(matrices)):
        raise ValueError(f"{len(scales)} of {len(matrices)} experts have scales.")
    return _stacked(scales) if scales else None


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """One view [E, ...] of tensors that follow each other in memory."""
    first, size = parts[0], parts[0].numel()
    shape = (len(parts), *first.shape)
    if first.device.type == "meta":
        # Tensors without data have no place in memory: an outline repeats one expert.
        return torch.empty(shape, dtype=first.dtype, device="meta")
    storage = first.untyped_storage().data_ptr()
    for number, part in enumerate(parts):
        is_next = (
            part.untyped_storage().data_ptr() == storage
            and part.storage_offset() == first.storage_offset() + number * size
        )
        if not is_next or part.shape != first.shape or not part.is_contiguous():
            raise ValueError(
                f"The experts of a layer lie in one block, one after the other; expert {number} "
                "does not follow the one before it."
            )
    return first.as_strided(shape, (size, *first.stride()), first.storage_offset())
