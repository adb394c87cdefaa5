"""Compiles what the standard path has in Triton for the experts of one rank's share of Kimi K3, and
for the sums of ranks, in its own process.

In pytest's process Triton may be the interpreter, which has no compiler. Arguments: the folder of
kept results, then architectures. Prints one JSON document: a line a kernel and size of tiles.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from released import kimi_k3

from kdecode.config import ModelConfig
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.kernels.common.triton_compile import compile_all, compile_job
from kdecode.kernels.common.triton_expert_down import Choice
from kdecode.kernels.common.triton_expert_tiles import tile_launches
from kdecode.kernels.common.triton_launch import Launch
from kdecode.kernels.common.triton_rank_sum import sum_launch
from kdecode.kernels.common.triton_route import route_launch
from kdecode.model.layout import PackedMoe
from kdecode.model.outline import outline_model
from kdecode.model.rank_share import share_of

# Rows of a step: tiles of 16 and of 128 pairs.
ROWS = (512, 8192)


def launches(arch: str) -> Iterator[Launch]:
    whole = ModelConfig.from_checkpoint(kimi_k3())
    few = replace(whole, layer_kinds=whole.layer_kinds[:2], mlp_kinds=whole.mlp_kinds[:2])
    config = share_of(few, 16)
    mixture = outline_model(config, "rows", "mxfp4_rows").layers[1].mlp
    assert isinstance(mixture, PackedMoe)
    stack, moe = ExpertStack.of(mixture.experts), config.moe
    for rows in ROWS:
        ids = torch.empty(rows, moe.top_k, dtype=torch.int32, device="meta")
        weights = ids.new_empty(ids.shape, dtype=torch.float32)
        source = ids.new_empty(rows, moe.latent_width, dtype=torch.bfloat16)
        choice = Choice(ids, weights)
        # Of one rank, and of several, which add up what is not rounded.
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.empty_like(source, dtype=dtype)
            yield from tile_launches(config, arch, stack, source, choice, out)
        logits = weights.new_empty(rows, moe.num_experts)
        yield route_launch(moe, logits, mixture.router_bias, ids, weights)
    for size in (2, 16):
        parts = weights.new_empty(size, config.hidden_size)
        yield sum_launch(parts, parts.new_empty(config.hidden_size, dtype=torch.bfloat16))


def main(folder: Path, archs: list[str]) -> None:
    jobs = {compile_job(launch, arch): launch for arch in archs for launch in launches(arch)}
    found = compile_all(jobs, folder)
    lines = [
        {"kernel": job.name, "arch": job.arch, "pairs": launch.constants.get("BLOCK_R", 0)}
        | vars(found[job])
        for job, launch in jobs.items()
    ]
    print(json.dumps(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
