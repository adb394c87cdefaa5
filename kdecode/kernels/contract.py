"""What an op is: the contract between the decode plan and every implementation.

An implementation module (torch, native CPU, Triton, ...) exports three things:

* ``refuse(problem) -> list[str]``: every reason, in full sentences, why it cannot run; else ``[]``.
* ``prepare(problem, weights, buffers) -> Prepared``: binds weights, caches and buffers, once.
* ``Prepared.run() -> None``: one launch; reads and writes the buffers it was bound to.

Nothing is chosen in ``run``. Weights are the packed matrices of `model/layout.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kdecode.config import ExpertProducts, ModelConfig
from kdecode.parallel.context import WHOLE, ContextShare
from kdecode.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Tolerance:
    """Bounds against the oracle: ``atol + rtol * |gold|`` an element, and the RMS-error ratio."""

    rtol: float
    atol: float
    rms_ratio: float


@dataclass(frozen=True)
class OpContract:
    """An op's name, the stages it covers, and how closely it has to match their references."""

    name: str
    covers: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    mutates: tuple[str, ...]
    tolerance: Tolerance


@dataclass(frozen=True)
class Problem:
    """One use of an op inside a plan.

    rows: rows of the step, None for an implementation that takes any number (the standard path).
    layer: 0-based layer, None before and after the stack. rotation_scale: of a draft, whose
    attention is rotated: what its scores carry beside the usual scale; None for a target.
    is_causal_block: of a draft whether a row of a block sees the rows up to itself, and not all of
    them. window: of a draft how many tokens before its block a request sees; None for all of them.
    """

    config: ModelConfig
    layer: int | None
    rows: int | None
    rows_per_request: int
    device: str
    cache_dtype: str  # "bf16" or "fp8"
    page_tokens: int
    max_context_tokens: int
    isa: str  # "avx512", "avx2", "portable"; "" when the native library is not used
    rotation_scale: float | None = None
    is_causal_block: bool = False
    window: int | None = None
    # "sm_90", ...: of a CUDA plan, whose tile sizes depend on it; "" elsewhere.
    arch: str = ""
    # Of several, ``config`` is what each of them has (`model.rank_share.share_of`).
    ranks: Ranks = ALONE
    # The positions whose cache rows are here; ``page_tokens`` are all that a page covers.
    context: ContextShare = WHOLE
    # Of a CUDA plan: how experts in MXFP4 are multiplied.
    expert_products: ExpertProducts = "exact"


class Exchange(Protocol):
    """How the ranks of a model give each other their parts of a step's values.

    Every rank calls the same functions in the same order, and gets the same bits.
    """

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's [T, W] fp32, added in the order of the ranks, rounded to bf16."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's [T, w] side by side, rank 0's first: [T, size * w] of the same dtype."""
        ...

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        """parts [size, T, w]: what this rank has for each of them -> what each has for this one."""
        ...

    def rewind(self) -> None:
        """The next exchange is the first of a step. Steps of equal exchanges take equal ways from
        there on, so that a recording of one can be replayed where any other has just ended."""
        ...


@dataclass(frozen=True)
class PartBlock:
    """What the ranks of a CUDA plan exchange at a time, on one of them.

    part: uint8, where this rank's steps leave what it gives. sources: int64 [size], where this GPU
    can read the blocks of all ranks once they are whole, in the order of the ranks. run: one
    launch, behind which they are. None where the ranks signal each other: whoever completes a part
    then tells the others, and whoever reads the sources waits first, by peers, the words of a
    `common.peer_table.PeerTable`, int64.
    """

    part: torch.Tensor
    sources: torch.Tensor
    run: Callable[[], None] | None
    peers: torch.Tensor | None = None


class DeviceExchange(Protocol):
    """How the ranks of a CUDA plan give each other their parts. Every rank asks for the same blocks
    in the same order, and runs the same exchanges. transport: "nccl", or "symmetric", whose blocks
    have peers."""

    @property
    def size(self) -> int: ...

    @property
    def transport(self) -> str: ...

    def block(self, name: str, num_bytes: int) -> PartBlock:
        """Blocks of one name share their memory: no two of them are used at a time."""
        ...


class PlanMemory:
    """What the static plans of one engine share, because no two of them run at a time.

    Buffers and scratch of one name lie in one block: build the plan of most rows first, whose
    blocks the others use the beginning of. `once` keeps native views of weights. device: where the
    blocks are; "meta" for a plan that is only compiled.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._blocks: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, int], tuple[object, Any]] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose contents another plan may change between two runs; never read before
        it was written, so it is not initialised."""
        size = math.prod(shape) * dtype.itemsize
        block = self._blocks.get(name)
        if block is None or block.numel() < size:
            block = self._blocks[name] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return block[:size].view(dtype).view(*shape)

    def once(self, name: str, owner: object, make: Callable[[], Any]) -> Any:
        """What ``make`` returned the first time that it was asked for of this owner."""
        key = name, id(owner)
        if key not in self._views:
            # With the owner, whose id would else be free for another object.
            self._views[key] = owner, make()
        return self._views[key][1]


class Buffers(dict[str, torch.Tensor]):
    """Named tensors of one plan. Static plans allocate them once; the standard path replaces them.

    ``batch`` is the `cache.batch.StepBatch` being run; ``caches`` the `cache.Caches` it works on;
    ``limits`` the `decode.step_check.StepLimits` of any batch; ``pool`` the threads of native
    steps. The standard path also has ``step``, the step's `common.step.StepTensors`, ``products``,
    the `linear.product.ProductSettings` of its products, and ``effects``, the
    `common.step.RowEffects` of its verified rows by (slot, layer). A static plan of verify steps
    has those of all its rows, by layer, and every static plan ``memory``, which it shares with the
    other plans of its engine. ``staging`` is the `decode.staging.Staging` through which the host
    writes the inputs of a plan on a device; None where it writes the buffers themselves.
    ``operators`` are the `common.opaque.OpaqueOperators` of a plan that a compiler gets.
    Of several ranks, ``exchange`` is the `Exchange` of the standard path and ``shared`` that of
    native steps; None for one rank. ``blocks`` are the `PartBlock`s of a CUDA plan of several.
    """

    memory: PlanMemory
    batch: Any
    caches: Any
    limits: Any
    pool: Any
    step: Any
    products: Any
    effects: Any
    staging: Any = None
    operators: Any = None
    exchange: Exchange | None = None
    shared: Any = None
    blocks: Mapping[str, PartBlock]

    def __init__(
        self, *tensors: Mapping[str, torch.Tensor], memory: PlanMemory | None = None, **named: Any
    ) -> None:
        super().__init__(*tensors, **named)
        self.memory = memory or PlanMemory()
        self.blocks = {}

    def scratch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        """Memory for intermediate values of one step, shared by all steps that ask for the name.

        Its contents mean nothing before or after a step. Raises ValueError if the name is in use
        with another shape or dtype.
        """
        key = f"scratch.{name}"
        if key not in self:
            self[key] = self.memory.take(key, shape, dtype)
        tensor = self[key]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"Scratch {name} is {tensor.dtype} {tuple(tensor.shape)}; "
                f"a step asks for {dtype} {shape}."
            )
        return tensor

    def counters(self, count: int) -> torch.Tensor:
        """int32 zeros of one step's own: programs of a CUDA launch count their arrivals in them.

        The last to arrive sets its counter back to zero, so that the next run finds it so.
        """
        return torch.zeros(count, dtype=torch.int32, device=self.memory.device)


class Prepared(Protocol):
    """An implementation bound to its weights and buffers."""

    def run(self) -> None:
        """One launch."""
        ...


class Implementation(Protocol):
    """The three exports of an implementation module."""

    def refuse(self, problem: Problem) -> list[str]: ...

    def prepare(self, problem: Problem, weights: Any, buffers: Buffers) -> Prepared: ...
