"""CUDA graphs of ranks with pretended GPUs (`pretended_gpus.py`): tapes of what was launched.

A tape has what a graph has: launches, operators and exchanges with the tensors that they had when
they were recorded. A replay does them again, whatever Python would do by then, and what would wait
for the device raises while one is recorded. Unlike a GPU it also runs what it records.
Imported by other processes by name, and by nothing that pytest rewrites.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pretended_gpus
import torch
from pretend_device import PretendTensor, pretend_cuda
from pretended_gpus import PretendedNccl, become_gpu
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from triton_interpreter import round_in_the_interpreter

from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode import auto, inspect_device, runner, served_steps
from kdecode.decode.streams import SideStreams
from kdecode.engine import ranked_probe
from kdecode.kernels.common.triton_launch import Launch
from kdecode.parallel import nccl
from kdecode.parallel.group import Group
from kdecode.parallel.ranks import Ranks

# What asks a GPU for a value.
_WAITS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.nonzero)


class Tape(TorchFunctionMode):
    """What is launched within it. given: blocks of the exchanges so far, in memory, by address.

    runs: whether launches and exchanges of tapes are carried out, and not only counted.
    """

    runs: ClassVar[bool] = True
    recording: ClassVar[Tape | None] = None
    given: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] | None = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WAITS and isinstance(args[0], PretendTensor):
            raise RuntimeError(f"{func.__name__}: not permitted when stream is capturing")
        out = func(*args, **kwargs)
        is_made = any(isinstance(leaf, PretendTensor) for leaf in tree_leaves(out))
        if is_made or func is Tensor.__setitem__:
            note(partial(_again, func, args, kwargs, out))
        return out

    def record(self, run: Callable[[], None]) -> None:
        Tape.recording = self
        try:
            with self:
                run()
        finally:
            Tape.recording = None

    def replay(self) -> None:
        if self.calls is None:
            raise RuntimeError("This graph was reset.")
        for call in self.calls if Tape.runs else ():
            call()
        Clock.now += len(self.calls) * Clock.microseconds

    def reset(self) -> None:
        self.calls = None


def note(call: Callable[[], object]) -> None:
    """Of a tape that is being recorded."""
    if Tape.recording is not None and Tape.recording.calls is not None:
        Tape.recording.calls.append(call)


def _again(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], out: Any) -> None:
    new = func(*args, **kwargs)
    for was, now in zip(tree_leaves(out), tree_leaves(new), strict=True):
        # A view, or what was changed in place, is where it was.
        if isinstance(was, PretendTensor) and was.inner.data_ptr() != now.inner.data_ptr():
            was.inner.copy_(now.inner)


def _is_counted() -> bool:
    return Tape.recording is not None and not Tape.runs


def _launch(launch: Launch) -> None:
    if not _is_counted():
        _run(launch)
    note(partial(_run, launch))


def _run(launch: Launch) -> None:
    if getattr(launch.kernel, "fn", launch.kernel).__name__ == "give":
        Tape.given.append(int(launch.arguments["part"].data_ptr()))
    pretended_gpus._run_on_the_host(launch)


class NotedNccl(PretendedNccl):
    """Whose collectives can be recorded."""

    def _allgather_base(self, taken: Tensor, given: Tensor) -> Any:
        return self._noted(partial(super()._allgather_base, taken, given))

    def alltoall_base(self, taken: Tensor, given: Tensor, *sizes: list[int]) -> Any:
        return self._noted(partial(super().alltoall_base, taken, given, *sizes))

    def _noted(self, begin: Callable[[], Any]) -> Any:
        note(lambda: begin().block_current_stream())
        return SimpleNamespace(block_current_stream=lambda: None) if _is_counted() else begin()


def _connect(store: Store, ranks: Ranks, device: str, timeout_s: float) -> NotedNccl:
    return NotedNccl(store, ranks, timeout_s)


class TapePool:
    """`GraphPool` of such a device."""

    made: ClassVar[list[TapePool]] = []

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.sides = SideStreams()
        TapePool.made.append(self)

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, run: Callable[[], None]) -> Tape:
        tape = Tape()
        tape.record(run)
        self.tapes.append(tape)
        return tape

    def close(self) -> None:
        for tape in self.tapes:
            tape.reset()


class Clock:
    """A device's own, on which only replays take time: so long for each thing on a tape."""

    now: ClassVar[float] = 0.0
    microseconds: ClassVar[float] = 1.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Clock.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Everything is done at once."""

    def elapsed_time(self, end: Clock) -> float:
        return (end.at - self.at) / 1000


# What a process with a pretended GPU has beside `pretended_gpus.PATCHES`, whose graphs are tapes.
GRAPH_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (runner, "GraphPool", TapePool),
    (served_steps, "ROW_BUCKETS", (1, 2)),
    (auto, "has_triton", lambda device: device != "cpu"),
    (nccl, "connect", _connect),
    (Launch, "run", _launch),
)


def _recorded(pool: TapePool, run: Callable[[], None]) -> Tape:
    return pool.record(run)


# And where `bench layer` times its plans, which run once by themselves.
TIMING_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (Tape, "runs", False),
    (inspect_device, "GraphPool", TapePool),
    (inspect_device, "_record", _recorded),
    (inspect_device, "_num_nodes", lambda tape: len(tape.calls)),
    (inspect_device, "_COLD_BYTES", 64),
    (torch.cuda, "Event", Clock),
    (torch.cuda, "synchronize", lambda *device: None),
)


def become_recording(transport: str, patches: tuple[tuple[Any, str, Any], ...]) -> None:
    """This process, which has no other life, has a pretended GPU with such graphs from now on."""
    is_symmetric = transport == "symmetric"
    become_gpu(is_symmetric=is_symmetric)
    if not is_symmetric:
        round_in_the_interpreter()
    for owner, name, value in patches:
        assert hasattr(owner, name), f"{owner} has no {name} to pretend"
        setattr(owner, name, value)


def follow_timed(
    group: Group, config: ModelConfig, engine: EngineConfig, rows: int, runs: int
) -> None:
    """A follower of `ranked_probe`, whose clock is the slower the later its rank is."""
    become_recording(engine.gpu_exchange, (*GRAPH_PATCHES, *TIMING_PATCHES))
    Clock.microseconds = 1.0 + group.ranks.rank
    with pretend_cuda():
        ranked_probe.follow(group, config, engine, rows, runs)
