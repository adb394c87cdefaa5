"""Kernels that `test_triton_compile.py` compiles in a process of its own, and what it reports.

In pytest's process Triton may be the interpreter, which has no compiler. Prints one JSON document.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from kdecode.kernels.common.triton_compile import (
    SHARED_LIMITS,
    CompileError,
    compile_all,
    compile_job,
    source_of,
)
from kdecode.kernels.common.triton_launch import Launch


@triton.jit(do_not_specialize=["rows"])
def scale(
    source, target, rows, columns, stride, factor, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr
):
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    if tl.program_id(0) < rows:
        values = tl.load(source + at, mask=at < columns)
        if IS_WIDE:
            values = tl.sort(values.to(tl.float32)).to(tl.bfloat16)
        tl.store(target + at, values * factor, mask=at < columns)


@triton.jit
def square(matrix, out, SIZE: tl.constexpr):
    """Its operands pass through shared memory."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(matrix + at)
    tl.store(out + at, tl.dot(values, values))


@triton.jit
def broken(source):
    tl.store(source, tl.arange(0, 3))


_MANY = {"BLOCK": 8192, "IS_WIDE": False}


def scaled(device: str, offset: int = 0, **changes: Any) -> Launch:
    data = torch.empty(4096, dtype=torch.bfloat16, device=device)
    numbers = {"rows": 16, "columns": 48, "stride": 1, "factor": 2.0, **changes}
    arguments = {"source": data, "target": data[offset:], **numbers}
    return Launch(scale, (4,), arguments, {"BLOCK": 1024, "IS_WIDE": False}, num_warps=1)


def squared(size: int) -> Launch:
    data = torch.empty(size, size, dtype=torch.bfloat16, device="meta")
    out = torch.empty(size, size, dtype=torch.float32, device="meta")
    return Launch(square, (1,), {"matrix": data, "out": out}, {"SIZE": size})


def as_launched(launch: Launch) -> list[Any]:
    """Signature, constants and aligned parameters as Triton's own launcher finds them."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(
        **launch.arguments, **launch.constants, num_warps=launch.num_warps
    )
    _, signature, constants, attributes = kernel._pack_args(
        backend, dict(options), bound, specialization, options
    )
    return _described(ASTSource(kernel, signature, constants, attributes))


def as_compiled(launch: Launch) -> list[Any]:
    return _described(source_of(compile_job(launch, "sm_90")))


def _described(source: ASTSource) -> list[Any]:
    """With the hash by which Triton keeps machine code."""
    constants, attributes = (sorted(part.items()) for part in (source.constants, source.attrs))
    return [source.signature, constants, attributes, source.hash()]


def message(launch: Launch, arch: str = "sm_90") -> str:
    try:
        compile_all([compile_job(launch, arch)], Path("unused"))
    except (CompileError, ValueError) as error:
        return str(error)
    return ""


def report(folder: Path) -> dict[str, Any]:
    variants: list[dict[str, Any]] = [
        {},
        {"offset": 8},
        {"offset": 3},
        {"columns": 1, "stride": 17},
        {"rows": 1, "columns": 1 << 33},
        {"factor": 1.0},
    ]
    jobs = {arch: compile_job(scaled("meta"), arch) for arch in SHARED_LIMITS}
    compiled = compile_all([*jobs.values(), *jobs.values()], folder, processes=2)
    kept = sorted(path.name for path in folder.iterdir())
    (folder / kept[0]).write_text("{")
    again = compile_all(jobs.values(), folder)
    # One warp has too few registers for so many numbers.
    spilling = compile_job(replace(scaled("meta"), constants=_MANY), "sm_90")
    fitting = compile_job(squared(64), "sm_90")
    products = compile_all([spilling, fitting], folder)
    data = torch.empty(8, dtype=torch.int32, device="meta")
    return {
        "specialised": [
            [as_launched(scaled("cpu", **v)), as_compiled(scaled("meta", **v))] for v in variants
        ],
        "registers": {arch: compiled[job].registers for arch, job in jobs.items()},
        "same_again": again == compiled,
        "kept": len(kept),
        "spilling": vars(products[spilling]),
        "fitting": vars(products[fitting]),
        "broken": message(Launch(broken, (1,), {"source": data}, {})),
        "arch": message(scaled("meta"), "sm_80"),
        "missing": message(Launch(square, (1,), {"matrix": data}, {"SIZE": 16})),
        "unknown": message(
            Launch(square, (1,), {"matrix": data, "out": data}, {"SIZE": 1, "N": 1})
        ),
        "bool": message(scaled("meta", stride=True)),
        "dtype": message(Launch(broken, (1,), {"source": data.to(torch.complex64)}, {})),
    }


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]))))
