"""Machine code of a launch for any architecture, without a driver: what it takes of a GPU.

Owns how a `Launch`, whose tensors may be on the meta device, becomes what Triton's compiler takes
(with the specialisations that a real launch has), the compiling in several processes, and the
reading of registers, stack and shared memory out of the machine code. Results are kept in a folder
by the hash of all that went in. Nothing here runs a kernel, and it needs a process in which Triton
was imported without TRITON_INTERPRET.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kdecode.kernels.common.triton_launch import Launch

# Bytes of shared memory that one program may have, by architecture: the keys are those that plans
# are compiled for.
SHARED_LIMITS: Mapping[str, int] = {"sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10}
# A real launch finds pointers and numbers that are multiples of this; what is loaded is wider then.
_ALIGNMENT = 16
_POINTERS: Mapping[torch.dtype, str] = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# Of the kept results; a change of what they mean is another number.
_FORMAT = 2


class CompileError(RuntimeError):
    """A kernel that cannot be compiled, with its name, architecture and the compiler's words."""


@dataclass(frozen=True)
class CompileJob:
    """All that the machine code of a launch depends on: equal jobs are one compilation.

    signature: the type of each parameter, "constexpr" of the constants. aligned: whether a
    parameter is a multiple of 16; of those that a launch looks at.
    """

    module: str
    kernel: str
    arch: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[tuple[str, bool], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.module.removeprefix('kdecode.kernels.')}.{self.kernel}"


@dataclass(frozen=True)
class Resources:
    """What one program takes. stack_bytes: of local memory a thread, where spilled registers go."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_job(launch: Launch, arch: str) -> CompileJob:
    """What a launch is to the compiler.

    Raises CompileError where Triton's kernels are interpreted, ValueError for an architecture that
    is not in `SHARED_LIMITS` and for arguments that no kernel takes.
    """
    if arch not in SHARED_LIMITS:
        raise ValueError(f"arch is {arch!r}; it must be one of {', '.join(SHARED_LIMITS)}.")
    kernel = launch.kernel
    if not isinstance(kernel, JITFunction):
        raise CompileError(
            f"{kernel!r} cannot be compiled: Triton was imported with TRITON_INTERPRET set."
        )
    signature: dict[str, str] = {}
    aligned: dict[str, bool] = {}
    constants = dict(launch.constants)
    for parameter in kernel.params:
        name = parameter.name
        if name in launch.arguments and not parameter.is_constexpr:
            value = launch.arguments[name]
            kind = _type(name, value)
            can_specialize = not parameter.do_not_specialize
            if can_specialize and isinstance(value, int) and value == 1:
                kind, constants[name] = "constexpr", 1
            signature[name] = kind
            if can_specialize and not isinstance(value, float):
                looks = kind != "constexpr" and not parameter.do_not_specialize_on_alignment
                aligned[name] = looks and _is_aligned(value)
        elif name in constants or name in launch.arguments:
            constants.setdefault(name, launch.arguments.get(name))
            signature[name], aligned[name] = "constexpr", False
        elif parameter.has_default:
            signature[name], constants[name] = "constexpr", parameter.default
            aligned[name] = False
        else:
            raise ValueError(f"{kernel.__name__} has the parameter {name}; the launch has not.")
    unknown = (launch.arguments.keys() | launch.constants.keys()) - signature.keys()
    if unknown:
        raise ValueError(f"{kernel.__name__} has no parameter {sorted(unknown)[0]}.")
    options: dict[str, Any] = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    if launch.begins_early:
        options["launch_pdl"] = True
    return CompileJob(
        module=kernel.fn.__module__,
        kernel=kernel.fn.__qualname__,
        arch=arch,
        signature=tuple(signature.items()),
        constants=tuple(sorted(constants.items())),
        aligned=tuple(aligned.items()),
        options=tuple(options.items()),
    )


def compile_all(
    jobs: Iterable[CompileJob], folder: Path, processes: int = 1
) -> dict[CompileJob, Resources]:
    """The resources of every job, each compiled once, kept in ``folder``.

    Raises CompileError with all that could not be compiled.
    """
    distinct = list(dict.fromkeys(jobs))
    paths = {job: folder / f"{_hash(job)}.json" for job in distinct}
    found = {job: kept for job, path in paths.items() if (kept := kept_result(path)) is not None}
    missing = [job for job in distinct if job not in found]
    errors = []
    # Kept one by one, so that what was done is not lost with what is not.
    for job, result in zip(missing, _compile_missing(missing, processes), strict=True):
        if isinstance(result, str):
            errors.append(f"{job.name} for {job.arch}: {result}")
            continue
        found[job] = result
        keep_result(paths[job], result)
    if errors:
        raise CompileError("\n".join(errors))
    return {job: found[job] for job in distinct}


def _compile_missing(jobs: Sequence[CompileJob], processes: int) -> Iterator[Resources | str]:
    if processes == 1 or len(jobs) < 2:
        yield from map(_compile_or_message, jobs)
        return
    # A forked child of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        yield from pool.map(_compile_or_message, jobs)


def _compile_or_message(job: CompileJob) -> Resources | str:
    try:
        return compile_one(job)
    except Exception as error:  # the compiler raises what it likes, and other jobs are to go on
        # What is wrong in a function that the kernel calls is the cause of the outermost one.
        reasons: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            reasons.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__
        return "\nbecause of ".join(reasons)


def compile_one(job: CompileJob) -> Resources:
    """Compiles and reads the machine code; raises what the compiler raises."""
    target = GPUTarget("cuda", int(job.arch.removeprefix("sm_")), 32)
    compiled = triton.compile(source_of(job), target=target, options=dict(job.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        registers, stack, local = machine_usage(Path(file.name))
    return Resources(registers, stack + local, compiled.metadata.shared)


def source_of(job: CompileJob) -> ASTSource:
    """What Triton compiles, equal to what a real launch has compiled: one entry of its cache."""
    module = importlib.import_module(job.module)
    names = [name for name, _ in job.signature]
    attributes = {
        (names.index(name),): [["tt.divisibility", _ALIGNMENT]] if is_aligned else []
        for name, is_aligned in job.aligned
    }
    kernel = getattr(module, job.kernel)
    return ASTSource(kernel, dict(job.signature), dict(job.constants), attributes)


def machine_usage(cubin: Path) -> tuple[int, ...]:
    """Registers, stack and local bytes of the one kernel in a file.

    Its static shared memory is what the hardware keeps for itself; Triton's is dynamic.
    """
    tool = triton.knobs.nvidia.cuobjdump.path
    run = subprocess.run(
        [tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    )
    found = _USAGE.findall(run.stdout)
    if len(found) != 1:
        raise CompileError(f"{tool} says of the machine code: {run.stdout}{run.stderr}")
    return tuple(int(number) for number in found[0])


def _hash(job: CompileJob) -> str:
    """Of the kernel's source and of what it calls, its arguments, the target and the compiler."""
    parts = [_FORMAT, triton.__version__, source_of(job).hash(), job.arch, job.options]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def kept_result(path: Path) -> Resources | None:
    """A result of an earlier run; None where there is none that can be read."""
    try:
        return Resources(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def keep_result(path: Path, resources: Resources) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(json.dumps(dataclasses.asdict(resources)))
    # Another process may write the same; either is whole.
    Path(file.name).replace(path)


def _type(name: str, value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        if value.dtype not in _POINTERS:
            raise ValueError(f"{name} is a tensor of {value.dtype}, which no kernel reads.")
        return _POINTERS[value.dtype]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{name} is {value!r}; an argument is a tensor or a number, and a constant the rest."
        )
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _is_aligned(value: Tensor | int | float) -> bool:
    """Blocks of an allocator are aligned: where a tensor begins in one decides."""
    if isinstance(value, Tensor):
        return value.storage_offset() * value.element_size() % _ALIGNMENT == 0
    return isinstance(value, int) and value % _ALIGNMENT == 0
