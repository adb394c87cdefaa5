"""Types of the native module's core. The steps' argument classes are left to `__getattr__`."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

class TileFormat(Enum):
    bf16 = 0
    mxfp4 = 1
    packed12 = 2
    int4 = 3
    int8 = 4

class Tiles:
    def __init__(
        self,
        data: int,
        scales: int,
        rows: int,
        cols: int,
        format: TileFormat,
        corrections: int = 0,
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def format(self) -> TileFormat: ...

class TileList:
    def __init__(self, tiles: Sequence[Tiles]) -> None: ...
    def __len__(self) -> int: ...

class Pool:
    def __init__(self, num_threads: int, can_oversubscribe: bool = False) -> None: ...
    @property
    def num_threads(self) -> int: ...

class Program:
    def __init__(self, pool: Pool, isa: str) -> None: ...
    def add(self, name: str, args: object) -> None: ...
    def __len__(self) -> int: ...
    def run(self, first: int, last: int) -> None: ...

class ExchangeFailure:
    class Reason(Enum):
        silent = 1
        late = 2
        reported = 3

    @property
    def reason(self) -> Reason: ...
    @property
    def waiter(self) -> int: ...
    @property
    def awaited(self) -> int: ...
    @property
    def number(self) -> int: ...

class SharedExchange:
    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        part_bytes: int,
        can_spin: bool,
        silence_s: float,
        patience_s: float,
    ) -> None: ...
    @staticmethod
    def segment_bytes(size: int, part_bytes: int) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def part_bytes(self) -> int: ...
    @property
    def silence_s(self) -> float: ...
    @property
    def patience_s(self) -> float: ...
    @property
    def number(self) -> int: ...
    @property
    def failure(self) -> ExchangeFailure | None: ...
    def heartbeat(self, rank: int) -> int: ...
    def fail(self, awaited: int) -> None: ...

def available_cores() -> int: ...
def detect_isa() -> str: ...
def supported_isas() -> list[str]: ...
def step_names() -> list[str]: ...
def time_stream(pool: Pool, memory: int, num_bytes: int, repeats: int) -> list[float]: ...
def pack12(source: Tiles, out: int, max_corrections: int) -> list[int] | None: ...
def differing_tiles(isa: str, w: Tiles, other: Tiles) -> int: ...
def pool_self_test(pool: Pool, jobs: int, phases: int, splits: int, items: int) -> int: ...
def tile_dot(isa: str, w: Tiles, num_rows: int, x: int, y: int) -> None: ...
def time_tile_dot(
    pool: Pool, isa: str, w: Tiles, num_rows: int, x: int, y: int, repeats: int
) -> list[float]: ...
def linear(
    isa: str,
    x: int,
    row_index: int,
    out: int,
    is_out_fp32: bool,
    matrices: Sequence[Tiles],
    counts: Sequence[int],
) -> None: ...
def unpack(isa: str, matrix: Tiles, out: int) -> None: ...
def gated(
    isa: str,
    product: int,
    out: int,
    rows: int,
    width: int,
    is_interleaved: bool,
    is_situ: bool,
    beta: float,
    linear_beta: float,
) -> None: ...
def convolve(
    isa: str,
    raw: int,
    raw_stride: int,
    window: int,
    taps: int,
    out: int,
    tokens: int,
    channels: int,
) -> None: ...
def delta_rule_chunks(
    isa: str,
    qkv: int,
    decay: int,
    beta: int,
    state: int,
    out: int,
    tokens: int,
    heads: int,
    head_dim: int,
) -> None: ...
def prompt_attention(isa: str, args: Any) -> None: ...
def mix_rows(
    isa: str,
    sources: int,
    weight: int,
    out: int,
    num_snapshots: int,
    rows: int,
    width: int,
    eps: float,
) -> None: ...

CONV_TAPS: int
MAX_SNAPSHOTS: int
MAX_PROMPT_WIDTH: int

def __getattr__(name: str) -> Any: ...
