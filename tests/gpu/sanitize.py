"""Runs the CUDA plans of the smallest models under NVIDIA's compute-sanitizer.

    python tests/gpu/sanitize.py               memcheck, then racecheck
    python tests/gpu/sanitize.py memcheck

memcheck finds accesses outside of a tensor: torch's caching allocator is off, so that each tensor
is an allocation of its own. racecheck finds hazards in the shared memory of a program. A run is one
step of every plan below with either kind of kernels, launched step by step, with the commit of the
verify step, and a round of a draft. Needs a GPU and compute-sanitizer in the PATH; the first run
compiles the kernels before the tools start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Literal

TESTS = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck")
PRESETS = ("mini", "kimi-linear-mini")
# Rows, and how many of them are one request's.
SIZES = ((1, 1), (2, 1), (5, 1), (8, 4))
KERNELS: tuple[Literal["triton", "cute"], ...] = ("triton", "cute")
FAILED = 66


def run_plans() -> None:
    """One step of every plan, on each preset."""
    import torch
    from cuda_cases import Twins, build, decode_batch, verify_batch
    from native_cases import Loaded

    from kdecode.decode.runner import load_inputs
    from kdecode.model.layout import pack_model, to_device
    from kdecode.model.synthesis import make_checkpoint
    from kdecode.model.weights import CheckpointReader

    for preset in PRESETS:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / preset
            make_checkpoint(directory, preset, seed=0)
            packed = pack_model(CheckpointReader(directory), "rows", mxfp4="mxfp4_rows")
            parameters = CheckpointReader(directory).load_model()
            loaded = Loaded(to_device(packed, "cuda"), parameters)
            for (rows, each), kernels in product(SIZES, KERNELS):
                contexts = [70, 0, 64, 5, 1][: rows // each]
                batch = decode_batch(contexts) if each == 1 else verify_batch(contexts, each)
                twins = Twins.of(loaded)
                twins.fill(batch, seed=rows)
                plan = build(loaded, twins.ours, rows, each, gpu_kernels=kernels)
                load_inputs(plan, batch)
                plan.run()
                if each > 1:
                    twins.ours.commit({request.slot: each - 1 for request in batch.requests})
                torch.cuda.synchronize()
                finite = bool(torch.isfinite(plan.buffers["logits"]).all())
                told = f"{preset}, {rows} rows, {each} a request, {kernels}: finite {finite}"
                print(told, flush=True)
                if not finite:
                    sys.exit(FAILED)


def run_draft() -> None:
    """Committed tokens and a round of a draft's plans, greedy and chosen by the host."""
    import torch
    from draft_cuda_cases import cuda_rounds
    from draft_rounds import NUM_DRAFTS, requests_of

    from kdecode.decode.draft_standard import first_choices
    from kdecode.model.synthesis import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "mini"
        make_checkpoint(directory, "mini", seed=0)
        case = cuda_rounds(directory, Path(folder) / "draft", "lightseek", None)
        requests = requests_of(case.fill()[0])
        greedy = case.draft.block(requests, NUM_DRAFTS, first_choices)
        chosen = case.draft.block(requests, NUM_DRAFTS, lambda *at: first_choices(*at))
        torch.cuda.synchronize()
        print(f"mini's draft, {len(requests)} requests: alike {greedy == chosen}", flush=True)
        if greedy != chosen:
            sys.exit(FAILED)


def main(tools: tuple[str, ...]) -> int:
    here = [sys.executable, str(Path(__file__)), "run"]
    folders = [str(TESTS / name) for name in ("decode", "kernels", "model")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    # Compiles, and shows that the plans run at all.
    if code := subprocess.run(here, env=environment).returncode:
        return code
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    for tool in tools:
        print(f"compute-sanitizer --tool {tool}", flush=True)
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FAILED), *here]
        if code := subprocess.run(command, env=environment).returncode:
            return code
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run_plans()
        run_draft()
    else:
        sys.exit(main(tuple(sys.argv[1:]) or TOOLS))
