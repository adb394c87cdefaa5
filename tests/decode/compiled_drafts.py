"""Compiles the CUDA plans of Kimi K3's drafts, in a process of its own, and prints what they take.

In pytest's process Triton may be the interpreter, which has no compiler. Arguments: the folder of
kept results, then cases as ``ARCH/KIND/REQUESTS``. Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import triton
from released import kimi_k3

from kdecode.config import EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.decode.launches import LaunchLine, compile_lines, compile_steps, tile_text
from kdecode.engine.describe_draft import DraftLaunches, describe_draft_launches
from kdecode.kernels.common.triton_gqa import MAX_HEAD_DIM
from kdecode.model.draft_synthesis import draft_document

# As the drafts were trained.
NUM_DRAFTS = 7
# Not a published one: `redhat` with the widest heads that plans are made for, all of one group.
WIDE = "wide"
_OF_HEADS = ("gqa_query", "gqa_attend", "draft_insert")


@cache
def draft_launches(arch: str, kind: str, requests: int) -> DraftLaunches:
    """The plans of a published draft of the whole model: a draft is not divided among ranks."""
    target = ModelConfig.from_checkpoint(kimi_k3())
    document = draft_document("redhat" if kind == WIDE else kind, target)
    if kind == WIDE:
        document["transformer_layer_config"] |= {
            "head_dim": MAX_HEAD_DIM,
            "num_attention_heads": 16,
            "num_key_value_heads": 1,
        }
    draft = DraftConfig.from_checkpoint(document)
    engine = EngineConfig(device="cuda", max_context_tokens=131_072)
    return describe_draft_launches(target, engine, draft, arch, requests, NUM_DRAFTS)


def report(folder: Path, cases: list[str]) -> list[dict[str, Any]]:
    """A line a case and kernel with one tile: the most that any of its launches takes. Of `WIDE`
    what the width of a head decides."""
    processes = len(os.sched_getaffinity(0))
    most: dict[tuple[str, ...], dict[str, int]] = {}
    for case in cases:
        arch, kind, requests = case.split("/")
        found = draft_launches(arch, kind, int(requests))
        if kind == WIDE:
            steps = [*found.block.steps, *found.context]
            own = [step for step in steps if step.op in _OF_HEADS]
            lines = compile_steps(own, arch, folder, processes)
        else:
            lines = compile_lines(found.block, arch, folder, processes)
            lines += compile_steps(found.context, arch, folder, processes)
        for line in lines:
            taken = most.setdefault((case, *_name(line)), {})
            for name, value in vars(line.compiled).items():
                taken[name] = max(value, taken.get(name, 0))
    return [
        {"case": key[0], "kernel": key[1], "tile": key[2], **taken} for key, taken in most.items()
    ]


def _name(line: LaunchLine) -> tuple[str, str]:
    tile = {**line.tile, "warps": line.warps, "stages": line.stages}
    kernel = line.op if line.op == line.kernel else f"{line.op} {line.kernel}"
    return kernel, tile_text(tile)


if __name__ == "__main__":
    made = report(Path(sys.argv[1]), sys.argv[2:])
    print(json.dumps({"triton": triton.__version__, "lines": made}))
