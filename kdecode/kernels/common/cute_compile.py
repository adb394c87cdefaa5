"""Machine code of a launch in CuTe DSL for any architecture, without a driver; and what runs.

Owns how a `CuteLaunch`, whose tensors may be on the meta device, becomes what CuTe DSL's compiler
takes, the compiled functions of this process, and the reading of registers, stack and shared memory
out of the machine code, whose results are kept in a folder by the hash of all that went in.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute import runtime
from torch import Tensor

from kdecode.kernels.common.cute_launch import CuteLaunch
from kdecode.kernels.common.cute_tiles import ARCHS, ProductSizes
from kdecode.kernels.common.triton_compile import (
    CompileError,
    Resources,
    keep_result,
    kept_result,
    machine_usage,
)

DISTRIBUTION = "nvidia-cutlass-dsl"
_TYPES: Mapping[torch.dtype, Any] = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
}
# Read 16 bytes at a time, from multiples of 16: `prepare` sees to it.
_ALIGNED = ("x", "weight")
# What every kernel is made of beside its own module.
_SHARED_SOURCES = ("kdecode.kernels.common.cute_product", "kdecode.kernels.common.cute_tiles")
# Of the kept results; a change of what they mean is another number.
_FORMAT = 1


@dataclass(frozen=True)
class CuteJob:
    """All that the machine code of a launch depends on: equal jobs are one compilation.

    parameters: names and dtypes; None of a whole number.
    """

    module: str
    kernel: str
    arch: str
    parameters: tuple[tuple[str, torch.dtype | None], ...]
    sizes: ProductSizes
    options: tuple[tuple[str, bool], ...]

    @property
    def name(self) -> str:
        return f"{self.module.removeprefix('kdecode.kernels.')}.{self.kernel}"


def compile_job(launch: CuteLaunch, arch: str) -> CuteJob:
    """What a launch is to the compiler. ValueError for an architecture that is not in `ARCHS`."""
    if arch not in ARCHS:
        raise ValueError(f"arch is {arch!r}; it must be one of {', '.join(ARCHS)}.")
    parameters = tuple(
        (name, value.dtype if isinstance(value, Tensor) else None)
        for name, value in launch.arguments.items()
    )
    kernel = launch.kernel
    return CuteJob(
        kernel.__module__,
        kernel.__name__,
        arch,
        parameters,
        launch.sizes,
        tuple(sorted(launch.options.items())),
    )


def runtime_arguments(arguments: Mapping[str, Tensor | int], stream: int) -> list[Any]:
    """What a compiled launch is called with. stream: the address of a CUDA stream."""
    values = (
        _pointer(name, value.dtype, value.data_ptr()) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    )
    return [*values, CUstream(stream)]


@cache
def compiled(job: CuteJob) -> Any:
    """The function that launches it, made once a process."""
    return _compile(job)


def compile_all(jobs: Iterable[CuteJob], folder: Path) -> dict[CuteJob, Resources]:
    """The resources of every job, each compiled once, kept in ``folder``.

    Raises CompileError with all that could not be compiled.
    """
    found, errors = {}, []
    for job in dict.fromkeys(jobs):
        path = folder / f"{_hash(job)}.json"
        result = kept_result(path)
        if result is None:
            try:
                result = compile_one(job)
            except Exception as error:  # the compiler raises what it likes; other jobs go on
                errors.append(f"{job.name} for {job.arch}: {type(error).__name__}: {error}")
                continue
            keep_result(path, result)
        found[job] = result
    if errors:
        raise CompileError("\n".join(errors))
    return found


def compile_one(job: CuteJob) -> Resources:
    """Compiles and reads the machine code; raises what the compiler raises."""
    cubin, _ = machine_code(job)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        registers, stack, local = machine_usage(Path(file.name))
    return Resources(registers, stack + local, job.sizes.shared_bytes)


def machine_code(job: CuteJob) -> tuple[bytes, str]:
    """The cubin and the text that it was assembled from."""
    with tempfile.TemporaryDirectory() as folder:
        made = _compile(job, f"--keep-cubin --keep-ptx --dump-dir {folder}")
        return bytes(made.__cubin__), str(made.__ptx__)


def _compile(job: CuteJob, options: str = "") -> Any:
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    # Only the types matter; nothing is at these addresses.
    values = [
        cutlass.Int32(1) if dtype is None else _pointer(name, dtype, 16)
        for name, dtype in job.parameters
    ]
    values += [runtime.make_fake_stream(), job.sizes, *(value for _, value in job.options)]
    return cute.compile(kernel, *values, options=f"--gpu-arch {ARCHS[job.arch]} {options}")


def _pointer(name: str, dtype: torch.dtype, address: int) -> Any:
    kind = _TYPES[dtype]
    alignment = 16 if name in _ALIGNED else kind.width // 8
    return runtime.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=alignment)


def _hash(job: CuteJob) -> str:
    """Of the kernel's source and of what it calls, its arguments, the target and the compiler."""
    names = (job.module, *_SHARED_SOURCES)
    sources = [inspect.getsource(importlib.import_module(name)) for name in names]
    parts = [_FORMAT, metadata.version(DISTRIBUTION), sources, job]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
