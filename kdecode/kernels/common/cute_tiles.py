"""How a skinny product is divided among programs, warps and lanes by the kernels in CuTe DSL.

y = x W^T for up to 8 rows of x. Owns the sizes of a launch, and which numbers a lane loads: plain
arithmetic that takes whole numbers, tensors of them, and the values of a kernel while it is being
compiled, so that a kernel and what imitates it on the host share it. Needs no CuTe DSL.

One instruction (mma m16n8k16) multiplies 16 rows of W by 8 rows of x over 16 input columns, so that
up to 8 rows cost as much as one, and a row has the same bits whichever rows are beside it. A sum
does not mind which input column comes first as long as W and x agree. So a lane loads 16 bytes of W
where they lie, and x likewise: eight columns of one row, of which the first four are its columns of
one instruction and the others those of the next. Nothing goes through shared memory or to another
lane before the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdecode.kernels.common.tile_table import choose

# What each architecture is to CuTe DSL's compiler; the kernels are compiled and tested for these.
ARCHS: Mapping[str, str] = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_103": "sm_103a"}
# Rows of W, rows of x and input columns of one instruction.
MMA_SHAPE = (16, 8, 16)
MMA_M, MMA_N, MMA_K = MMA_SHAPE
MAX_ROWS = MMA_N
LANES = 32
# bf16 numbers of a 16-byte load, and input columns that the four lanes of a row load by one each.
VECTOR, CHUNK = 8, 32
STEPS = CHUNK // MMA_K

# Of the numbers that a lane holds of a tile of W, first the vector of row `lane_row`, then that of
# the row 8 below it: where those of an instruction's operand are. Modes as the instruction has
# them: a pair of columns, the row 8 below, the pair 8 columns on.
WEIGHT_MODES, WEIGHT_STRIDES = (2, 2, 2), (1, VECTOR, 2)
# The same of x: a pair of columns, the pair 8 columns on.
INPUT_MODES, INPUT_STRIDES = (2, 2), (1, 2)
# From one instruction's numbers to the next one's.
STEP_STRIDE = VECTOR // STEPS
# What it adds to: a pair of rows of x, the row of W 8 below.
SUM_MODES = (2, 2)

# Two programs for each processor of the GPUs with most of them, about.
_ENOUGH_PROGRAMS = 296
_MOST_WARPS, _MOST_SPLIT = 16, 8
# Chunks of a 16-column tile that a warp holds at a time: 8 registers a lane each.
_MOST_HELD = 12
_MOST_SHARED_BYTES = 227 << 10
_SHORT_COLUMNS = 2048


def lane_row(lane: Any) -> Any:
    """The row of a tile that a lane loads: of W also the one 8 below, of x its only one."""
    return lane // (CHUNK // VECTOR)


def lane_column(lane: Any) -> Any:
    """The first of the eight input columns of a chunk that a lane loads."""
    return lane % (CHUNK // VECTOR) * VECTOR


def sum_place(lane: Any, pair: Any, half: Any) -> tuple[Any, Any]:
    """(row of W in its tile, row of x) of a lane's sum in modes (pair, half) of `SUM_MODES`."""
    return lane_row(lane) + half * (MMA_M // 2), lane % 4 * 2 + pair


@dataclass(frozen=True)
class CuteTile:
    """tiles: of 16 output columns, of one program. chunks: of 32 input columns, held at a time.

    split: programs that share a block of output columns, a cluster, each with its part of the input
    columns. warps: of a program, which share its part in turn.
    """

    tiles: int
    chunks: int
    split: int
    warps: int


@dataclass(frozen=True)
class ProductSizes:
    """A product [rows, inner] x [inner, columns] and its tile; inner is a multiple of `VECTOR`.

    Every warp of a cluster has one part of the input columns: `part_columns` of them from its
    number times that on, as far as there are so many, `block_columns` at a time.
    """

    columns: int
    inner: int
    tile: CuteTile

    def __post_init__(self) -> None:
        tile = self.tile
        if not (
            all(size & (size - 1) == 0 for size in (tile.split, tile.warps))
            and 1 <= tile.split <= _MOST_SPLIT
            and 1 <= tile.warps <= _MOST_WARPS
            and min(tile.tiles, tile.chunks) >= 1
            and tile.tiles * tile.chunks <= _MOST_HELD
            and self.shared_bytes <= _MOST_SHARED_BYTES
        ):
            raise ValueError(
                f"{tile}: split is a power of two up to {_MOST_SPLIT}, warps one up to "
                f"{_MOST_WARPS}, tiles times chunks at most {_MOST_HELD}, and the sums of all "
                f"warps at most {_MOST_SHARED_BYTES:,} bytes."
            )
        if self.inner % VECTOR or self.inner < VECTOR or self.columns < 1:
            raise ValueError(
                f"A matrix of {self.columns} x {self.inner}; rows have a multiple of {VECTOR} "
                "input columns, which are loaded 16 bytes at a time."
            )

    @property
    def block_n(self) -> int:
        """Output columns of a program."""
        return self.tile.tiles * MMA_M

    @property
    def blocks(self) -> int:
        return _divide_up(self.columns, self.block_n)

    @property
    def threads(self) -> int:
        return self.tile.warps * LANES

    @property
    def parts(self) -> int:
        return self.tile.split * self.tile.warps

    @property
    def part_columns(self) -> int:
        return _divide_up(_divide_up(self.inner, CHUNK), self.parts) * CHUNK

    @property
    def block_columns(self) -> int:
        return self.tile.chunks * CHUNK

    @property
    def rounds(self) -> int:
        return _divide_up(self.part_columns, self.block_columns)

    @property
    def outputs_a_thread(self) -> int:
        """Of the program that adds the parts; the last may have none."""
        return _divide_up(self.block_n * MAX_ROWS, self.threads)

    @property
    def shared_bytes(self) -> int:
        """The sums of every part: [parts, rows, columns of a block] fp32."""
        return self.parts * MAX_ROWS * self.block_n * 4


def product_sizes(kernel: str, arch: str, columns: int, inner: int) -> ProductSizes:
    """With the table's tile, else one that is good anywhere. No tile depends on the rows."""
    default = default_tile(columns, inner)
    tile = choose(f"cute_{kernel}", arch, f"{columns} x {inner}", default)
    return ProductSizes(columns, inner, tile)


def default_tile(columns: int, inner: int) -> CuteTile:
    """Short rows are held whole, before the launch before this one is over. Of long ones a program
    has two tiles, which share what it reads of x, and programs share a block where it takes that
    for every processor to have two of them."""
    chunks = _divide_up(inner, CHUNK)
    tiles = 1 if inner <= _SHORT_COLUMNS else 2
    blocks, split, warps = _divide_up(columns, tiles * MMA_M), 1, 1
    while blocks * split < _ENOUGH_PROGRAMS and split < _MOST_SPLIT and chunks >= 2 * split:
        split *= 2
    while warps < 8 and chunks > 8 * warps * split:
        warps *= 2
    part = _divide_up(chunks, split * warps)
    return CuteTile(tiles, _divide_up(part, _divide_up(part, 8 // tiles)), split, warps)


def _divide_up(size: int, block: int) -> int:
    return -(-size // block)
