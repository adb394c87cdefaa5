"""How the context of latent attention is cut into splits by the kernels of a CUDA plan.

`mla_attend` attends to splits and `mla_value` adds them up; `triton_mla.py` has what both compute
on the device. Nothing here needs Triton.
"""

from __future__ import annotations

# Tokens of the shortest split: one round of the online softmax.
ROUND_TOKENS = 64
# (rows of the plan up to which, splits)
_MAX_SPLITS = ((2, 128), (8, 64), (32, 32))
_FEWEST = 16


def max_splits(rows: int) -> int:
    """Splits that a context has at most, in a plan of so many rows; a power of two.

    One row alone has to keep all of a GPU's processors busy; of many rows each has its own, and
    what splits cost, writing and adding up their sums, goes down with their number.
    """
    return next((splits for most, splits in _MAX_SPLITS if rows <= most), _FEWEST)
