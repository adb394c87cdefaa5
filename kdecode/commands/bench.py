"""`kdecode bench`: the memory's speed, a backend's share of it, and where a step's time goes."""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdecode.commands.common import (
    add_engine_arguments,
    add_model_argument,
    engine_config,
    mebibytes,
    model_directory,
    open_model,
    positive,
    table,
    write_json,
)
from kdecode.config import EngineConfig

if TYPE_CHECKING:
    from kdecode.bench.decode_speed import DecodeRun
    from kdecode.bench.kernel import ReadProbe
    from kdecode.decode.inspect import PlanCost, StepCost
    from kdecode.engine.engine import LLM

HELP = "measure decoding against the speed of memory"
DESCRIPTION = (
    "A step has to read its weights, state and cache once; the floor is the time that this takes "
    "at the read bandwidth measured right before and after. Runs in which other processes used "
    "more than a tenth of a core are marked spoilt."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    formatter = argparse.ArgumentDefaultsHelpFormatter
    roofline = parts.add_parser(
        "roofline", help="read bandwidth at 1 to all threads", formatter_class=formatter
    )
    roofline.add_argument("--threads", type=positive, help="most threads; default: every core")
    roofline.add_argument("--rounds", type=positive, default=7)
    roofline.add_argument("--json", action="store_true", help="one JSON document instead")
    for name, text in (
        ("decode", "tokens a second, and the share of the floor"),
        ("layer", "every step of the plan: time, bytes, share of the floor"),
    ):
        part = parts.add_parser(name, help=text, formatter_class=formatter)
        add_model_argument(part)
        part.add_argument("--rows", type=positive, default=1, help="requests of the step")
        part.add_argument(
            "--context-tokens", type=positive, default=128, help="tokens in each request's cache"
        )
        part.add_argument("--runs", type=positive, default=5 if name == "decode" else 15)
        if name == "decode":
            part.add_argument("--output-tokens", type=positive, default=32)
        part.add_argument("--json", action="store_true", help="one JSON document instead")
        add_engine_arguments(part)


def run(args: argparse.Namespace) -> int:
    parts: dict[str, Callable[[argparse.Namespace], tuple[dict[str, Any], str]]] = {
        "roofline": _roofline,
        "decode": _decode,
        "layer": _layer,
    }
    document, text = parts[args.part](args)
    if args.json:
        write_json(document, "-")
    else:
        print(text)
    return 0


def _roofline(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kdecode.bench.kernel import ReadProbe
    from kdecode.bench.machine import read_machine
    from kdecode.bench.roofline import measure_roofline, render_roofline

    most = EngineConfig(num_threads=args.threads).resolved_threads()
    bandwidths = measure_roofline(range(1, most + 1), ReadProbe, args.rounds)
    machine = read_machine()
    text = f"{machine.cpu}, {machine.cores} cores, {machine.date}\n"
    text += table(render_roofline(bandwidths))
    entries = [{**dataclasses.asdict(entry), "median": entry.median} for entry in bandwidths]
    return {"bandwidth": entries, "machine": dataclasses.asdict(machine)}, text


def _decode(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kdecode.bench.decode_speed import measure_decode, summary

    llm, probe = _engine(args, args.output_tokens)
    cost = llm.inspect_decode(args.rows, args.context_tokens, 3)
    runs = measure_decode(lambda: _generate(llm, args), probe, args.rows, cost.num_bytes, args.runs)
    speed, share, clean = summary(runs)
    rows = [("run", "tok/s", "of the floor", "GB/s before", "after", "others' cores", "")]
    rows += [_run_row(number, entry) for number, entry in enumerate(runs)]
    experts = [step.distinct_experts for step in cost.steps if step.distinct_experts is not None]
    text = "\n".join(
        [
            _title(cost),
            _bytes_line(cost),
            *([f"distinct experts a layer: {sum(experts) / len(experts):.1f}"] if experts else []),
            table(rows),
            f"median of {clean or len(runs)} runs{'' if clean else ', ALL SPOILT'}: "
            f"{speed:.2f} tok/s, {share:.0%} of the floor",
        ]
    )
    document = {
        "backend": cost.backend,
        "rows": args.rows,
        "context_tokens": args.context_tokens,
        "step_bytes": cost.num_bytes,
        "weight_bytes": sum(step.weight_bytes for step in cost.steps),
        "runs": [
            {
                **dataclasses.asdict(entry),
                "tokens_per_second": entry.tokens_per_second,
                "floor_share": entry.floor_share,
                "is_spoilt": entry.is_spoilt,
            }
            for entry in runs
        ],
        "tokens_per_second": speed,
        "floor_share": share,
        "clean_runs": clean,
        "config": llm.resolved_config(),
    }
    return document, text


def _layer(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from kdecode.bench.load import LoadMeter, is_spoilt

    llm, probe = _engine(args, 0)
    meter = LoadMeter()
    before = probe.bytes_per_second()
    meter.start()
    cost = llm.inspect_decode(args.rows, args.context_tokens, args.runs)
    others = meter.stop()
    bandwidth = (before + probe.bytes_per_second()) / 2
    rows = [("layer", "op", "us", "MiB", "GB/s", "of the floor", "experts", "covers")]
    rows += [_step_row(step, bandwidth) for step in cost.steps]
    groups = _layers(cost)
    spoilt = "  SPOILT by other processes" if is_spoilt(others) else ""
    text = "\n".join(
        [
            _title(cost),
            table(rows),
            "",
            table(_kind_rows(groups, bandwidth)),
            _bytes_line(cost),
            f"whole step {cost.plan_microseconds:,.0f} us, "
            f"{_share(cost.num_bytes, cost.plan_microseconds, bandwidth)} of the floor at "
            f"{bandwidth / 1e9:.1f} GB/s; its steps one by one "
            f"{sum(step.microseconds for step in cost.steps):,.0f} us{spoilt}",
        ]
    )
    document = {
        **dataclasses.asdict(cost),
        "bytes_per_second": bandwidth,
        "others_cores": others,
        "is_spoilt": is_spoilt(others),
        "layers": [
            {
                "layer": layer,
                "launches": len(steps),
                "microseconds": sum(step.microseconds for step in steps),
                "bytes": sum(step.num_bytes for step in steps),
            }
            for layer, steps in groups.items()
        ],
        "config": llm.resolved_config(),
    }
    return document, text


def _engine(args: argparse.Namespace, output_tokens: int) -> tuple[LLM, ReadProbe]:
    from kdecode.bench.kernel import ReadProbe

    config = engine_config(
        args,
        max_context_tokens=args.context_tokens + output_tokens,
        max_requests=args.rows,
    )
    llm = open_model(model_directory(args), config)
    return llm, ReadProbe(config.resolved_threads())


def _generate(llm: LLM, args: argparse.Namespace) -> list[list[int]]:
    """Arrivals of the tokens of `rows` requests with random prompts, decoded together."""
    from kdecode.engine.request import SamplingParams

    source = random.Random(0)
    num_base = llm.tokenizer.num_base
    prompts = [
        [source.randrange(num_base) for _ in range(args.context_tokens)] for _ in range(args.rows)
    ]
    params = SamplingParams(max_tokens=args.output_tokens, ignore_eos=True)
    return [output.timing.token_ns for output in llm.generate(prompts, params)]


def _run_row(number: int, run: DecodeRun) -> tuple[str, ...]:
    others = "-" if run.others_cores is None else f"{run.others_cores:.2f}"
    return (
        str(number),
        f"{run.tokens_per_second:.2f}",
        f"{run.floor_share:.0%}",
        *(f"{probe / 1e9:.1f}" for probe in run.probes),
        others,
        "spoilt" if run.is_spoilt else "",
    )


def _title(cost: PlanCost) -> str:
    return (
        f"backend {cost.backend}, {cost.rows} rows, {cost.context_tokens:,} tokens of context, "
        f"{len(cost.steps)} launches a step"
    )


def _bytes_line(cost: PlanCost) -> str:
    weights = sum(step.weight_bytes for step in cost.steps)
    state = sum(step.state_bytes for step in cost.steps)
    return f"a step moves {mebibytes(weights)} of weights, {mebibytes(state)} of state and cache"


def _step_row(step: StepCost, bandwidth: float) -> tuple[str, ...]:
    return (
        "-" if step.layer is None else str(step.layer),
        step.op,
        f"{step.microseconds:.1f}",
        f"{step.num_bytes / 2**20:.2f}",
        f"{step.num_bytes / step.microseconds / 1e3:.1f}",
        _share(step.num_bytes, step.microseconds, bandwidth),
        "-" if step.distinct_experts is None else f"{step.distinct_experts:.1f}",
        " ".join(step.covers),
    )


def _share(num_bytes: float, microseconds: float, bandwidth: float) -> str:
    from kdecode.bench.roofline import share_of_floor

    return f"{share_of_floor(num_bytes, microseconds / 1e6, bandwidth):.0%}"


def _layers(cost: PlanCost) -> dict[int, list[StepCost]]:
    groups: dict[int, list[StepCost]] = {}
    for step in cost.steps:
        if step.layer is not None:
            groups.setdefault(step.layer, []).append(step)
    return groups


def _kind_rows(groups: dict[int, list[StepCost]], bandwidth: float) -> list[tuple[str, ...]]:
    """Launches and microseconds a layer, the mean over the layers of each kind."""
    kinds: dict[str, list[list[StepCost]]] = {}
    for steps in groups.values():
        covers = {stage for step in steps for stage in step.covers}
        kind = "KDA" if "kda_step" in covers else "MLA"
        kind += " + dense" if "dense_mlp" in covers else " + MoE"
        kinds.setdefault(kind, []).append(steps)
    rows = [("kind of layer", "layers", "launches a layer", "us a layer", "of the floor")]
    for kind, members in kinds.items():
        spent = sum(step.microseconds for steps in members for step in steps)
        moved = sum(step.num_bytes for steps in members for step in steps)
        launches = sum(len(steps) for steps in members) / len(members)
        rows.append(
            (
                kind,
                str(len(members)),
                f"{launches:g}",
                f"{spent / len(members):,.1f}",
                _share(moved, spent, bandwidth),
            )
        )
    return rows
