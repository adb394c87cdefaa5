"""How many columns of a row a program has that reads the parts of several ranks where they are.

Few rows have many programs, because one alone has too few reads under way for the network between
GPUs; many rows about one program for each processor of a large GPU. Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.common.tile_table import choose

_LEAST_COLUMNS, _MOST_COLUMNS = 512, 2048
_ENOUGH_PROGRAMS = 128


@dataclass(frozen=True)
class RankTile:
    """block_n columns of a row a program."""

    block_n: int
    warps: int


def rank_tile(kernel: str, arch: str, rows: int, width: int, size: int, warps: int) -> RankTile:
    """The table's tile for rows of ``width`` columns, of which ``size`` ranks have parts, else one
    that is good anywhere, with these warps."""
    block_n = _LEAST_COLUMNS
    while block_n < _MOST_COLUMNS and -(-width // block_n) * rows > _ENOUGH_PROGRAMS:
        block_n *= 2
    shape = f"rows {rows}, {width} of {size} ranks"
    return choose(kernel, arch, shape, RankTile(block_n, warps))
