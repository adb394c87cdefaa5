"""CUDA plans of several ranks on a small model: each rank's part of its weights and caches, its
plan, and one rank's run in a process that has others.

Imported by other processes by name, and by nothing that pytest rewrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from cuda_cases import CONFIGS, DEVICE, Twins, decode_batch, deployment, poison
from native_cases import Loaded
from pretended_gpus import PretendedMemory
from rank_cuts import divisible, rank_case
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from triton_cases import Case, make_case
from triton_interpreter import round_in_the_interpreter

from kdecode.cache.caches import Caches
from kdecode.config import ModelConfig
from kdecode.decode import latency_specialized
from kdecode.decode.deployment import Deployment
from kdecode.decode.plan import DecodePlan
from kdecode.decode.runner import load_inputs
from kdecode.kernels.common.peer_table import LIMIT
from kdecode.parallel.group import Group
from kdecode.parallel.ranks import Ranks
from kdecode.parallel.symmetric import SymmetricBlocks

# Of a wait, with other processes on the same cores.
LIMIT_MS = 120_000


@dataclass(frozen=True)
class Share:
    """What one rank has, and its plan."""

    plan: DecodePlan
    caches: Caches


def rank_share(
    case: Case, ranks: Ranks, exchange: Any, rows: int, each: int, whole: Caches
) -> Share:
    """whole: what the caches of one rank would have, on the host."""
    share = rank_case(case, ranks)
    caches = own_caches(share, whole, ranks)
    where = rank_deployment(share.config, ranks, exchange)
    return Share(latency_specialized.build(where, share.packed, caches, rows, each), caches)


def rank_deployment(config: ModelConfig, ranks: Ranks, exchange: Any) -> Deployment:
    return replace(deployment(config), ranks=ranks, shared=exchange)


def own_caches(share: Case, whole: Caches, ranks: Ranks) -> Caches:
    size = whole.num_slots, whole.num_pages, whole.page_tokens
    own = Caches.allocate(share.config, DEVICE, *size)
    for layer, state in whole.recurrent.items():
        own.recurrent[layer].copy_(own_part(state, ranks, 1))
        windows = [own_part(window, ranks, 2) for window in whole.conv[layer].chunk(3, dim=2)]
        own.conv[layer].copy_(torch.cat(windows, dim=2))
    for layer, pages in whole.pages.items():
        own.pages[layer].copy_(pages)
    return own


def own_part(whole: Tensor, ranks: Ranks, dim: int) -> Tensor:
    begin, end = ranks.span(whole.shape[dim])
    return whole.narrow(dim, begin, end - begin)


def follow_plan(group: Group, *args: Any) -> None:
    """A follower that runs its plan as rank 0 does."""
    round_in_the_interpreter()
    torch.set_num_threads(1)
    run_in_this_process(group, *args)
    group.tell_ready()
    while group.receive() is not None:
        raise ValueError("Nothing is left to be done.")


def run_in_this_process(
    group: Group, name: str, contexts: Sequence[int], steps: int
) -> list[list[Tensor]]:
    """This rank's part in steps that follow each other; the logits of every rank, step by step."""
    ranks = group.ranks
    case = make_case(divisible(CONFIGS[name]))
    twins, batch = Twins.of(Loaded(case.packed, case.parameters)), decode_batch([*contexts])
    twins.fill(batch, seed=1)
    memory = PretendedMemory(PrefixStore("plan", group._store), ranks, DEVICE)
    blocks = SymmetricBlocks(memory, ranks, DEVICE)
    blocks.fault[LIMIT] = LIMIT_MS
    plan = rank_share(case, ranks, blocks, len(contexts), 1, twins.theirs).plan
    poison(plan)
    found = []
    for _ in range(steps):
        load_inputs(plan, batch)
        for step in plan.steps:
            step.run()
        found.append(plan.buffers["logits"].clone())
    late = blocks.late(blocks.fault.tolist())
    assert late is None, f"rank {ranks.rank} waited in vain: {late}"
    gathered = [group.control.gather(logits) for logits in found]
    return [list(every.chunk(ranks.size, dim=1)) for every in gathered]
