"""Launches in CuTe DSL as machine code, without a GPU: what is in it, and what is kept of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kdecode.kernels.attn_join.cute_impl import attn_join
from kdecode.kernels.common import cute_compile
from kdecode.kernels.common.compiled_launches import resources_of
from kdecode.kernels.common.cute_launch import CuteLaunch
from kdecode.kernels.common.cute_tiles import ARCHS, STEPS, CuteTile, ProductSizes
from kdecode.kernels.common.triton_compile import SHARED_LIMITS, CompileError
from kdecode.kernels.projection.cute_impl import projection


def projected(tile: CuteTile, dtype: torch.dtype = torch.bfloat16) -> CuteLaunch:
    sizes = ProductSizes(100, 1000, tile)
    arguments = {
        "x": torch.empty(3, 1000, dtype=torch.bfloat16, device="meta"),
        "weight": torch.empty(100, 1000, dtype=torch.bfloat16, device="meta"),
        "out": torch.empty(3, 100, dtype=dtype, device="meta"),
        "rows": 3,
    }
    return CuteLaunch(projection, "sm_90", sizes, arguments)


def joined(tile: CuteTile, *, push: bool) -> CuteLaunch:
    arguments = dict(projected(tile).arguments)
    out = arguments.pop("out")
    rows = arguments.pop("rows")
    arguments |= {"delta_out": out, "prefix": out, "pushed": out, "rows": rows}
    sizes = ProductSizes(100, 1000, tile)
    return CuteLaunch(attn_join, "sm_90", sizes, arguments, {"push": push})


def test_its_text_is_the_kernel_that_was_meant() -> None:
    """Weights before the launch before this one is over, inputs behind it, and nothing else."""
    tile = CuteTile(tiles=2, chunks=3, split=4, warps=2)
    job = cute_compile.compile_job(projected(tile), "sm_103")
    cubin, text = cute_compile.machine_code(job)
    assert cubin.startswith(b"\x7fELF")
    assert re.search(r"\.target sm_103a", text)
    early, late = text.split("griddepcontrol.wait;")
    wide = r"ld\.global\S*\.v4\S*"
    assert len(re.findall(wide, early)) == 2 * tile.tiles * tile.chunks
    assert not re.search(r"\bst\.", early)
    # A round's inputs, and in a loop the next round's weights.
    assert len(re.findall(wide, late)) == (1 + 2 * tile.tiles) * tile.chunks
    products = re.findall(r"mma\.sync\.aligned\.m16n8k16\S*\.f32\.bf16\.bf16\.f32", late)
    assert len(products) == STEPS * tile.chunks * tile.tiles
    assert early.count("cp.async.bulk.prefetch.L2.global") == 1
    assert late.index("griddepcontrol.launch_dependents") < late.index("mma.sync")
    # Sums go to the cluster's first program, which waits for them.
    assert len(re.findall(r"st\.shared::cluster\.f32", late)) == 4 * tile.tiles
    assert early.count("barrier.cluster.arrive.relaxed") == 1
    assert late.count("barrier.cluster.wait") == 2
    assert len(re.findall(r"cvt\.rn\.bf16\S*\.f32", late)) >= 1


def test_a_program_without_others_has_no_cluster() -> None:
    job = cute_compile.compile_job(joined(CuteTile(1, 8, 1, 4), push=True), "sm_90")
    _, text = cute_compile.machine_code(job)
    assert "cluster" not in text.replace("cluster_", "")
    assert "prefetch" not in text
    assert re.search(r"bar(rier)?\.(cta\.)?sync", text)


def test_resources_of_every_architecture_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = CuteTile(2, 4, 2, 2)
    launches = [
        projected(tile),
        projected(tile, torch.float32),
        joined(tile, push=False),
        joined(tile, push=True),
        # Other rows are the same kernel.
        replace(projected(tile), arguments={**projected(tile).arguments, "rows": 8}),
    ]
    for arch in ARCHS:
        found = resources_of(launches, arch, tmp_path)
        for taken in found:
            assert 16 < taken.registers <= 255
            assert taken.stack_bytes == 0
            assert taken.shared_bytes == 4 * 8 * 32 * 4 < SHARED_LIMITS[arch]
    assert len(list(tmp_path.glob("*.json"))) == 4 * len(ARCHS)

    def compiled_again(job: object) -> None:
        raise AssertionError("what is kept is not compiled again")

    monkeypatch.setattr(cute_compile, "compile_one", compiled_again)
    assert resources_of(launches, "sm_103", tmp_path) == found
    with pytest.raises(CompileError, match=r"projection.cute_impl.projection for sm_90: .*again"):
        resources_of([projected(CuteTile(1, 2, 2, 2))], "sm_90", tmp_path)


def test_what_cannot_be_compiled_says_why() -> None:
    launch = projected(CuteTile(1, 4, 1, 2))
    with pytest.raises(ValueError, match="arch is 'sm_120'; it must be one of sm_90, sm_100"):
        cute_compile.compile_job(launch, "sm_120")


def test_a_launch_hands_over_its_tensors_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiled function is called with, on torch's current stream."""
    launch = projected(CuteTile(1, 4, 1, 2))
    shapes = {"x": (3, 1000), "weight": (100, 1000), "out": (3, 100)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    given: list[tuple[object, ...]] = []
    asked = []

    def compiled(job: object) -> object:
        asked.append(job)
        return lambda *arguments: given.append(arguments)

    monkeypatch.setattr(cute_compile, "compiled", compiled)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=4096))
    replace(launch, arguments={**tensors, "rows": 3}).run()
    assert asked == [cute_compile.compile_job(launch, "sm_90")]
    (*pointers, rows, stream) = given[0]
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    assert [int(pointer._pointer) for pointer in pointers] == addresses  # type: ignore[attr-defined]
    assert (rows, int(stream)) == (3, 4096)  # type: ignore[call-overload]


LAUNCHED = """
from types import SimpleNamespace
import torch
from cutlass.base_dsl.common import DSLCudaRuntimeError
from kdecode.kernels.common.cute_launch import CuteLaunch
from kdecode.kernels.common.cute_tiles import CuteTile, ProductSizes
from kdecode.kernels.projection.cute_impl import projection

torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=0)
sizes = ProductSizes(32, 64, CuteTile(1, 2, 1, 1))
x, weight, out = (torch.zeros(*shape).bfloat16() for shape in ((2, 64), (32, 64), (2, 32)))
arguments = {"x": x, "weight": weight, "out": out, "rows": 2}
try:
    CuteLaunch(projection, "sm_90", sizes, arguments).run()
except DSLCudaRuntimeError as error:
    print(error)
"""


def test_a_launch_comes_as_far_as_the_driver() -> None:
    """Compiled, loaded and called with what it takes; where no GPU can be seen that is the end."""
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-P", "-c", LAUNCHED], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert re.search("cudaError(InsufficientDriver|NoDevice)", run.stdout), run.stdout
