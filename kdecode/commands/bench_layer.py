"""`kdecode bench layer`: every step of a plan, of a checkpoint or of a release's shape.

Owns the arguments, and how a plan's costs are printed. What of a release's shape is timed is
`bench_shape`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from kdecode.bench.wording import counted
from kdecode.commands.common import (
    InputError,
    add_engine_arguments,
    add_model_argument,
    add_speculative_argument,
    engine_config,
    mebibytes,
    model_directory,
    open_model,
    positive,
    table,
    weights_note,
)
from kdecode.config import OF_GPU_PLANS, EngineConfig, GpuExchange

if TYPE_CHECKING:
    from kdecode.bench.roofline import Probe
    from kdecode.decode.inspect import PlanCost, StepCost
    from kdecode.engine.engine import LLM

HELP = "every step of the plan: time, bytes, share of the floor"
SHAPES = ("kimi-k3", "kimi-linear-48b")
DEFAULT_LAYERS = 4


def add_arguments(part: argparse.ArgumentParser) -> None:
    add_model_argument(part)
    part.add_argument("--rows", type=positive, default=1, help="requests of the step")
    part.add_argument(
        "--context-tokens", type=positive, default=128, help="tokens in each request's cache"
    )
    part.add_argument(
        "--drafts",
        type=positive,
        metavar="N",
        help="drafts of each request: the step that verifies them, of a MODEL; "
        "--speculative-config has a number of its own, and times the draft's round too",
    )
    part.add_argument("--runs", type=positive, default=15)
    part.add_argument("--json", action="store_true", help="one JSON document instead")
    shape = part.add_argument_group("shape of a release, instead of a MODEL; on both backends")
    shape.add_argument("--shape", choices=SHAPES, help=f"with ranks and no MODEL {SHAPES[0]}")
    shape.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        metavar="N",
        help="ranks: with --device cuda all are timed together, a GPU each, else one's share "
        "alone; what all of them have is counted; default: 1",
    )
    shape.add_argument(
        "--rank-share",
        type=positive,
        metavar="N",
        help="ranks, of which one's share is timed alone, also on a GPU",
    )
    shape.add_argument("--rank", type=int, help="of a share: whose random weights; default: 0")
    shape.add_argument(
        "--gpu-exchange",
        choices=get_args(GpuExchange),
        default="auto",
        help="between the GPUs of ranks; auto is symmetric memory where all have it",
    )
    shape.add_argument("--layers", type=positive, help=f"the first N; default: {DEFAULT_LAYERS}")
    shape.add_argument(
        "--bytes",
        action="store_true",
        help="only what every rank has of the whole release and reads; nothing is timed",
    )
    add_engine_arguments(part)
    add_speculative_argument(part)
    part.set_defaults(decode_backend=None)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The document and the text."""
    if args.shape is None and args.model is None and (args.tensor_parallel_size or args.rank_share):
        args.shape = SHAPES[0]
    if args.shape is not None:
        from kdecode.commands import bench_shape

        return bench_shape.run(args)
    for name in ("tensor_parallel_size", "rank_share", "rank", "layers", "bytes", "gpu_exchange"):
        if getattr(args, name) not in (None, False, "auto"):
            raise InputError(f"--{name.replace('_', '-')} needs a --shape.")
    args.decode_backend = args.decode_backend or EngineConfig().decode_backend
    if args.speculative_config is not None:
        if args.drafts is not None:
            raise InputError("Give --drafts or --speculative-config, which has their number.")
        args.drafts = args.speculative_config.num_speculative_tokens
    # The draft's probe needs room for a round of its own behind the context.
    llm, probe = open_engine(args, (args.drafts or 0) + 1)
    document, text = timed(
        probe,
        llm.engine_config,
        lambda: llm.inspect_decode(
            args.rows, args.context_tokens, args.runs, drafts=args.drafts or 0
        ),
    )
    document["config"] = llm.resolved_config()
    if args.speculative_config is not None:
        drafted = _draft(llm, args, document["bytes_per_second"])
        document["draft"], of_draft = drafted
        text += f"\n\n{of_draft}"
    return document, text


def _draft(llm: LLM, args: argparse.Namespace, bandwidth: float) -> tuple[dict[str, Any], str]:
    """The round of the draft, whichever forward it has."""
    cost = llm.inspect_draft(args.context_tokens, args.runs)
    assert cost is not None, "there is a speculative configuration"
    count = counted(cost.num_drafts, "draft")
    if cost.plan is None:
        context = counted(args.context_tokens, "token")
        lines = [f"the draft in torch: {count}, {context} of context; timed as it is launched"]
    else:
        rows = [("layer", "op", "us", "MiB", "GB/s", "of the floor", "experts", "covers")]
        rows += [_step_row(step, bandwidth) for step in cost.plan.steps]
        lines = [f"the draft: {title(cost.plan, llm.engine_config)}", table(rows)]
    lines += [
        _part_line("the block", cost.block_microseconds, cost.block_bytes, bandwidth),
        _part_line(
            f"{counted(cost.num_drafts, 'Markov product')} with the choice of a draft",
            cost.markov_microseconds,
            cost.markov_bytes,
            bandwidth,
        ),
        _part_line(
            f"caching {counted(cost.num_drafts + 1, 'committed token')}",
            cost.append_microseconds,
            cost.append_bytes,
            bandwidth,
        ),
    ]
    return dataclasses.asdict(cost), "\n".join(lines)


def _part_line(what: str, microseconds: float, num_bytes: float, bandwidth: float) -> str:
    return (
        f"{what}: {microseconds:,.0f} us, {mebibytes(num_bytes)}, "
        f"{_share(num_bytes, microseconds, bandwidth)} of the floor"
    )


def read_probe(config: EngineConfig) -> Probe:
    """What tells how fast the memory is that a plan reads."""
    if config.device == "cpu":
        from kdecode.bench.kernel import ReadProbe

        return ReadProbe(config.resolved_threads())
    from kdecode.bench.device import DeviceReadProbe

    return DeviceReadProbe(config.device)


def open_engine(args: argparse.Namespace, output_tokens: int) -> tuple[LLM, Probe]:
    config = engine_config(
        args,
        max_context_tokens=args.context_tokens + output_tokens,
        max_requests=args.rows,
    )
    llm = open_model(model_directory(args), config)
    return llm, read_probe(config)


def timed(
    probe: Probe, config: EngineConfig, inspect: Callable[[], PlanCost]
) -> tuple[dict[str, Any], str]:
    """A plan's costs against the memory's speed right before and after."""
    from kdecode.bench.load import LoadMeter, is_spoilt

    meter = LoadMeter()
    before = probe.bytes_per_second()
    meter.start()
    cost = inspect()
    others = meter.stop()
    bandwidth = (before + probe.bytes_per_second()) / 2
    rows = [("layer", "op", "us", "MiB", "GB/s", "of the floor", "experts", "covers")]
    rows += [_step_row(step, bandwidth) for step in cost.steps]
    groups = _layers(cost)
    spoilt = "  SPOILT by other processes" if is_spoilt(others) else ""
    text = "\n".join(
        [
            title(cost, config),
            table(rows),
            "",
            table(_kind_rows(groups, bandwidth)),
            bytes_line(cost),
            f"whole step {cost.plan_microseconds:,.0f} us, "
            f"{_share(cost.num_bytes, cost.plan_microseconds, bandwidth)} of the floor at "
            f"{bandwidth / 1e9:.1f} GB/s; its steps one by one "
            f"{sum(step.microseconds for step in cost.steps):,.0f} us{spoilt}",
            *_commit_line(cost, bandwidth),
        ]
    )
    document = {
        **dataclasses.asdict(cost),
        "settings": {name: getattr(config, name) for name in ("gpu_kernels", *OF_GPU_PLANS)},
        "bytes_per_second": bandwidth,
        "others_cores": others,
        "is_spoilt": is_spoilt(others),
        "layers": [
            {
                "layer": layer,
                "launches": _num_launches(steps),
                "exchanges": sum(step.exchanges for step in steps),
                "microseconds": sum(step.microseconds for step in steps),
                "bytes": sum(step.num_bytes for step in steps),
            }
            for layer, steps in groups.items()
        ],
    }
    return document, text


def _commit_line(cost: PlanCost, bandwidth: float) -> list[str]:
    """What comes after a verify step, once it is known what stays."""
    spent = cost.commit_microseconds
    if spent is None:
        return []
    share = _share(cost.commit_bytes, spent, bandwidth)
    return [
        f"then the KDA slots past all {cost.rows_per_request} rows of a request: {spent:,.0f} us, "
        f"{mebibytes(cost.commit_bytes)}, {share} of the floor"
    ]


def title(cost: PlanCost, config: EngineConfig) -> str:
    note = weights_note(config)
    each = f", {cost.rows_per_request} a request" if cost.rows_per_request > 1 else ""
    ranks = ""
    if cost.gpu_exchange is not None:
        ranks = f", {config.tensor_parallel_size} ranks through {cost.gpu_exchange}"
    told = [
        f", {name.replace('_', ' ')} {getattr(config, name)}"
        for name, plain in OF_GPU_PLANS.items()
        if getattr(config, name) != plain
    ]
    return (
        ("" if note is None else f"{note}\n")
        + f"backend {cost.backend}, {counted(cost.rows, 'row')}{each}, "
        f"{counted(cost.context_tokens, 'token')} of context, {_num_launches(cost.steps)} launches "
        f"a step{ranks}{''.join(told)}{cost.timed_as and f'; {cost.timed_as}'}"
    )


def bytes_line(cost: PlanCost) -> str:
    weights = sum(step.weight_bytes for step in cost.steps)
    state = sum(step.state_bytes for step in cost.steps)
    return f"a step moves {mebibytes(weights)} of weights, {mebibytes(state)} of state and cache"


def _step_row(step: StepCost, bandwidth: float) -> tuple[str, ...]:
    return (
        "-" if step.layer is None else str(step.layer),
        step.op,
        f"{step.microseconds:.1f}",
        f"{step.num_bytes / 2**20:.2f}",
        # A step that is over beside others adds nothing.
        f"{step.num_bytes / step.microseconds / 1e3:.1f}" if step.microseconds else "-",
        _share(step.num_bytes, step.microseconds, bandwidth),
        "-" if step.distinct_experts is None else f"{step.distinct_experts:.1f}",
        " ".join(step.covers),
    )


def _share(num_bytes: float, microseconds: float, bandwidth: float) -> str:
    from kdecode.bench.roofline import share_of_floor

    if not microseconds:
        return "-"
    return f"{share_of_floor(num_bytes, microseconds / 1e6, bandwidth):.0%}"


def _layers(cost: PlanCost) -> dict[int, list[StepCost]]:
    groups: dict[int, list[StepCost]] = {}
    for step in cost.steps:
        if step.layer is not None:
            groups.setdefault(step.layer, []).append(step)
    return groups


def _num_launches(steps: Sequence[StepCost]) -> int:
    """Of a CUDA graph, where they were counted; else one a step."""
    return sum(1 if step.launches is None else step.launches for step in steps)


def _kind_rows(groups: dict[int, list[StepCost]], bandwidth: float) -> list[tuple[str, ...]]:
    """Launches and microseconds a layer, the mean over the layers of each kind."""
    kinds: dict[str, list[list[StepCost]]] = {}
    for steps in groups.values():
        covers = {stage for step in steps for stage in step.covers}
        kind = "KDA" if "kda_step" in covers else "MLA"
        kind += " + dense" if "dense_mlp" in covers else " + MoE"
        kinds.setdefault(kind, []).append(steps)
    has_exchanges = any(step.exchanges for steps in groups.values() for step in steps)
    more: tuple[str, ...] = ("exchanges a layer",) if has_exchanges else ()
    head = ("kind of layer", "layers", "launches a layer")
    rows = [(*head, *more, "us a layer", "of the floor")]
    for kind, members in kinds.items():
        spent = sum(step.microseconds for steps in members for step in steps)
        moved = sum(step.num_bytes for steps in members for step in steps)
        launches = sum(_num_launches(steps) for steps in members) / len(members)
        exchanges = sum(step.exchanges for steps in members for step in steps) / len(members)
        rows.append(
            (
                kind,
                str(len(members)),
                f"{launches:g}",
                *(f"{exchanges:g}" for _ in more),
                f"{spent / len(members):,.1f}",
                _share(moved, spent, bandwidth),
            )
        )
    return rows
