"""`kdecode plan`: what a decode step runs, what each part covers, and the bytes it has to move."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdecode.bench.wording import counted
from kdecode.commands import plan_device
from kdecode.commands.common import (
    InputError,
    add_engine_arguments,
    add_model_argument,
    add_rank_arguments,
    add_speculative_argument,
    context_tokens,
    engine_config,
    mebibytes,
    model_directory,
    open_model,
    positive,
    write_json,
)
from kdecode.config import EngineConfig

if TYPE_CHECKING:
    from kdecode.decode.plan import DecodePlan, Step

HELP = "print the plan of a decode step"
DESCRIPTION = (
    "Weight bytes are those of one row; more rows read more experts. With --config no weights are "
    "needed. Where the backend cannot run, or with --compile a kernel cannot launch, every reason "
    "is printed and the exit code is 1."
)
EXIT_REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--config", metavar="PATH", help="a config.json instead of a model: the plan it would have"
    )
    parser.add_argument("--rows", type=positive, default=1, help="requests of the step")
    parser.add_argument(
        "--drafts",
        type=positive,
        metavar="N",
        help="drafts of each request: the plan of the step that verifies them; "
        "--speculative-config has a number of its own, and shows the draft's plan too",
    )
    parser.add_argument(
        "--context-tokens", type=positive, default=1024, help="tokens in each request's cache"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead")
    add_engine_arguments(parser)
    add_rank_arguments(parser)
    add_speculative_argument(parser)
    plan_device.add_arguments(parser)
    parser.set_defaults(decode_backend=None)


def run(args: argparse.Namespace) -> int:
    from kdecode.decode.latency_specialized import BackendRefusedError

    plan_device.check_arguments(args)
    if args.decode_backend is None:
        is_device = args.arch is not None
        args.decode_backend = "latency_specialized" if is_device else EngineConfig().decode_backend
    config = engine_config(
        args, max_context_tokens=context_tokens(args.context_tokens), max_requests=1
    )
    if args.config is not None and args.model is not None:
        raise InputError("Give a MODEL or --config, not both: the model has a configuration.")
    if config.speculative is not None:
        if args.drafts is not None:
            raise InputError("Give --drafts or --speculative-config, which has their number.")
        args.drafts = config.speculative.num_speculative_tokens
    try:
        if args.arch is not None:
            launches, text = plan_device.run(_source(args), args, config)
            if args.json:
                write_json(launches, "-")
            else:
                print(text)
            parts = (launches, launches.get("draft", {}))
            return EXIT_REFUSED if any(part.get("cannot_launch") for part in parts) else 0
        # An engine that does not speculate has no plan of verify steps; its configuration tells it,
        # and one rank's plan without starting the others.
        is_described = (
            args.config is not None or args.drafts is not None or config.tensor_parallel_size > 1
        )
        plan, packed_bytes = _described(args, config) if is_described else _built(args, config)
    except BackendRefusedError as error:
        if args.json:
            write_json({"backend": config.decode_backend, "refusals": [*error.reasons]}, "-")
        else:
            print(error)
        return EXIT_REFUSED
    document = _document(plan, args, config.cache_dtype)
    document |= {"requested_backend": config.decode_backend, "packed_bytes": packed_bytes}
    if args.json:
        write_json(document, "-")
        return 0
    print(plan.explain())
    if plan.backend != config.decode_backend:
        rows = counted(document["rows"], "row")
        print(f"{config.decode_backend} has no plan for {rows}; this is what runs.")
    print(f"all packed weights take {mebibytes(packed_bytes)}")
    print(
        f"a step of 1 row reads {mebibytes(document['weight_bytes'])} of weights; each row moves "
        f"{mebibytes(document['state_bytes_per_row'])} of state and cache at "
        f"{counted(args.context_tokens, 'token')} of context"
    )
    if config.speculative is not None:
        print(f"\n{_draft_text(args, config)}", end="")
    return 0


def _draft_text(args: argparse.Namespace, config: EngineConfig) -> str:
    """The plan of the draft's block, or why it has none."""
    from kdecode.config import ModelConfig
    from kdecode.config_draft import DraftConfig
    from kdecode.decode.latency_specialized import BackendRefusedError
    from kdecode.engine.describe import describe_draft

    speculative = config.speculative
    assert speculative is not None
    target = ModelConfig.from_checkpoint(_source(args))
    draft = DraftConfig.from_checkpoint(speculative.model, speculative.tap_stream)
    draft.check_target(target)
    try:
        plan = describe_draft(target, config, draft, speculative.num_speculative_tokens)
    except BackendRefusedError as error:
        return f"the draft runs in torch: {' '.join(error.reasons)}\n"
    return f"the draft: {plan.explain()}"


def _source(args: argparse.Namespace) -> Path:
    """Where the configuration is. Raises InputError."""
    if args.config is None:
        return model_directory(args)
    if not args.config:
        raise InputError("--config is empty; it is the path of a config.json.")
    return Path(args.config)


def _built(args: argparse.Namespace, config: EngineConfig) -> tuple[DecodePlan, int]:
    """The plan of an engine, and the memory of its weights."""
    llm = open_model(model_directory(args), config)
    return llm.decode_plan(args.rows), llm.stats()["packed_bytes"]


def _described(args: argparse.Namespace, config: EngineConfig) -> tuple[DecodePlan, int]:
    """The same from a configuration alone."""
    from kdecode.config import ModelConfig
    from kdecode.engine.describe import describe_plan

    source = _source(args)
    each = 1 + (args.drafts or 0)
    return describe_plan(ModelConfig.from_checkpoint(source), config, args.rows * each, each)


def _document(plan: DecodePlan, args: argparse.Namespace, cache_dtype: str) -> dict[str, Any]:
    from kdecode.cache.budget import item_bytes
    from kdecode.decode.traffic import stage_state_bytes

    item, context, each = item_bytes(cache_dtype), args.context_tokens, 1 + (args.drafts or 0)
    # Where ranks share the positions, one rank reads its own.
    here = -(-context // args.num_context_ranks)
    return {
        "backend": plan.backend,
        "rows": args.rows * each,
        "rows_per_request": each,
        "steps": [_step(step) for step in plan.steps],
        "weight_bytes": sum(step.weight_bytes or 0 for step in plan.steps),
        "state_bytes_per_row": sum(
            stage_state_bytes(plan.config, layer, stage, here, item)
            for step in plan.steps
            for layer, stage in step.stages
        ),
        "context_tokens": context,
        "refusals": [],
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "layer": step.layers[0],
        "op": step.op,
        "impl": step.impl,
        "covers": list(step.covers),
        "reads": list(step.reads),
        "writes": list(step.writes),
        "weight_bytes": step.weight_bytes,
        "stream": step.stream,
        "waits_for": list(step.waits_for),
    }
