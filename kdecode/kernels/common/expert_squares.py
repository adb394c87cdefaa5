"""What expert_down leaves of its sums for the norm in moe_join: sums of squares, a block of columns
each.

`expert_squares` [blocks, R] fp32. Blocks are what the narrowest programs of expert_down have, so
that none waits for another; moe_join adds up a row's. Nothing here needs Triton.
"""

from __future__ import annotations

from kdecode.config import ModelConfig

# Up to so many rows every (row, slot) pair is multiplied by itself: few of them share an expert.
PAIR_ROWS = 4
# Columns of a program of pairs, and of one of an expert's rows.
PAIR_COLUMNS, GROUPED_COLUMNS = 8, 64
# One or two rows are normalised by every program of moe_join, which has them whole in registers.
_LEAST_ROWS = 3


def square_columns(config: ModelConfig, rows: int) -> int:
    """Columns of a block, of which the last may have fewer; 0 where nobody reads the sums."""
    moe = config.moe
    if rows < _LEAST_ROWS or moe.latent_width is None or not moe.has_latent_norm:
        return 0
    return PAIR_COLUMNS if rows <= PAIR_ROWS else GROUPED_COLUMNS


def num_squares(config: ModelConfig, rows: int) -> int:
    """Blocks of a row; 0 where nobody reads the sums."""
    columns = square_columns(config, rows)
    return -(-(config.moe.latent_width or 0) // columns) if columns else 0
