"""`kdecode check`: both backends against the reference, on a given checkpoint.

Two questions, two parts. *Steps*: is each step of a decode plan right by itself? It is given the
reference's inputs and compared by its op's tolerance. *Model*: do the errors of all steps together
stay what rounding explains? Logits and states of a run over fixed tokens are compared with the
unrounded reference (gold), and may be no further from it than the rounded reference is, but for a
factor. Medians, because one expert that changes place at a tie moves a whole row.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kdecode.bench.wording import counted
from kdecode.commands import check_trunk
from kdecode.commands.common import (
    InputError,
    ProgressBar,
    add_engine_arguments,
    add_model_argument,
    add_speculative_argument,
    context_tokens,
    engine_config,
    model_directory,
    positive,
    table,
    write_json,
)
from kdecode.config import DecodeBackend, EngineConfig, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from kdecode.cache.batch import StepBatch
    from kdecode.decode.verify import StepCheck
    from kdecode.engine.worker import Worker
    from kdecode.model.parameters import ModelParameters
    from kdecode.model.reference import RequestState, Rounding

HELP = "check the numerics of both backends against the reference"
DESCRIPTION = "Exit code 1 when a step or the model is outside its bounds."
EXIT_FAILED = 1

# A backend may be so many times as far from gold as the rounded reference is.
MODEL_FACTOR = 1.5
# Of distances too small to be divided by.
MODEL_FLOOR = 5e-3
# Above this the reference would take minutes a token; the first layers still say most.
WHOLE_MODEL_BYTES = 2 << 30
LAYERS_OF_LARGE = 4


@dataclass(frozen=True)
class ModelCheck:
    """One quantity of the whole model: median relative RMS distance from gold."""

    quantity: str
    backend: float
    rounded: float

    @property
    def limit(self) -> float:
        return MODEL_FACTOR * self.rounded + MODEL_FLOOR

    @property
    def is_within(self) -> bool:
        return self.backend <= self.limit


@dataclass(frozen=True)
class BackendCheck:
    backend: str
    refusal: str | None
    steps: tuple[StepCheck, ...]
    model: tuple[ModelCheck, ...]

    @property
    def is_within(self) -> bool:
        steps = all(check.is_within for check in self.steps)
        return steps and all(check.is_within for check in self.model)


@dataclass(frozen=True)
class Case:
    """What is run: fixed tokens, so that nothing depends on what a backend would say."""

    sequences: tuple[tuple[int, ...], ...]
    prompt_tokens: tuple[int, ...]
    num_layers: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--decode-backend",
        choices=get_args(DecodeBackend),
        action="append",
        help="only this one; repeatable; default: both",
    )
    parser.add_argument("--rows", type=positive, default=2, help="requests of a decode step")
    parser.add_argument("--prompt-tokens", type=positive, default=24)
    parser.add_argument("--steps", type=positive, default=8, help="decode steps of the model part")
    parser.add_argument(
        "--layers", type=positive, help="check the steps of the first layers only, not the model"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the tokens")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead")
    add_engine_arguments(parser, has_backend=False)
    add_speculative_argument(parser)


def run(args: argparse.Namespace) -> int:
    from kdecode.decode.latency_specialized import BackendRefusedError
    from kdecode.engine.preflight import check_deployment
    from kdecode.model.weights import CheckpointReader

    directory = model_directory(args)
    reader = CheckpointReader(directory)
    case = _case(args, directory, reader.config)
    length = context_tokens(max(map(len, case.sequences)))
    configs = {
        backend: engine_config(
            args, decode_backend=backend, max_requests=args.rows, max_context_tokens=length
        )
        for backend in args.decode_backend or check_trunk.backends(args.trunk_format)
    }
    for backend, config in configs.items():
        # What was not asked for by name may be refused, which is reported.
        if args.decode_backend or backend == "auto":
            check_deployment(reader, config)
    if args.trunk_format != "bf16":
        (config,) = configs.values()
        return check_trunk.run(args.json, config, lambda each: _logits(directory, each, case))
    parameters = reader.load_model()
    bar = ProgressBar()
    checks = []
    gold = None if case.num_layers is not None else _Gold(args, directory, parameters, case)
    for backend, config in configs.items():
        bar.message(f"{backend}: building")
        try:
            checks.append(_check(directory, config, parameters, case, gold))
        except BackendRefusedError as error:
            checks.append(BackendCheck(backend, str(error), (), ()))
        bar.clear()
    if args.json:
        write_json([_document(check) for check in checks], "-")
    else:
        print("\n".join(line for check in checks for line in _report(check, case)))
    return 0 if all(check.is_within for check in checks) else EXIT_FAILED


def _case(args: argparse.Namespace, directory: Path, config: ModelConfig) -> Case:
    """Raises InputError for more layers than the model has."""
    if args.layers is not None and args.layers > config.num_layers:
        raise InputError(f"--layers is {args.layers}; the model has {config.num_layers} layers.")
    source = random.Random(args.seed)
    # Lengths differ, so that rows of one step are at different positions.
    prompts = tuple(args.prompt_tokens + 5 * row for row in range(args.rows))
    sequences = tuple(
        tuple(source.randrange(config.vocab_size) for _ in range(length + args.steps))
        for length in prompts
    )
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    layers = args.layers
    if layers is None and size > WHOLE_MODEL_BYTES:
        layers = LAYERS_OF_LARGE
    return Case(sequences, prompts, layers)


class _Gold:
    """Logits and states of every sequence by the reference, unrounded and rounded."""

    def __init__(
        self, args: argparse.Namespace, directory: Path, parameters: ModelParameters, case: Case
    ) -> None:
        import torch

        from kdecode.model.parameters import MlaParameters
        from kdecode.model.reference import GOLD, ROUNDED, RequestState, forward

        config = ModelConfig.from_checkpoint(directory)
        bar = ProgressBar()
        cache_dtype, scale = args.cache_dtype, args.cache_scale or 1.0
        self._scales = {
            layer: scale if p.attention.k_scale is None else float(p.attention.k_scale)
            for layer, p in enumerate(parameters.layers)
            if isinstance(p.attention, MlaParameters)
        }

        def run_all(rounding: Rounding) -> list[tuple[Tensor, RequestState]]:
            found = []
            for number, ids in enumerate(case.sequences):
                bar(f"reference, {rounding.name}", number, len(case.sequences))
                state = RequestState.new(config, rounding, cache_dtype, scale)
                with torch.no_grad():
                    logits = forward(parameters, config, torch.tensor(ids), state, rounding)
                found.append((logits[case.prompt_tokens[number] - 1 :], state))
            bar.clear()
            return found

        self.gold = run_all(GOLD)
        self.rounded = run_all(ROUNDED)

    def compare(
        self, logits: Sequence[Tensor], states: Sequence[dict[str, Tensor]]
    ) -> tuple[ModelCheck, ...]:
        """logits: one tensor [steps + 1, vocab] a sequence; states: the caches' at the end."""
        kinds = {"logits": ([], [])}  # type: dict[str, tuple[list[float], list[float]]]
        for row, (gold, rounded) in enumerate(zip(self.gold, self.rounded, strict=True)):
            for ours, wanted, near in zip(logits[row], gold[0], rounded[0], strict=True):
                kinds["logits"][0].append(distance(ours, wanted))
                kinds["logits"][1].append(distance(near, wanted))
            wanted_state, near_state = self._parts(gold[1]), self._parts(rounded[1])
            for name, ours in states[row].items():
                backend, reference = kinds.setdefault(name.split(".")[0], ([], []))
                # One by one: samples of a window, heads of a state, tokens of a latent cache.
                parts = zip(ours, near_state[name], wanted_state[name], strict=True)
                for mine, near, wanted in parts:
                    backend.append(distance(mine, wanted))
                    reference.append(distance(near, wanted))
        return tuple(
            ModelCheck(kind, statistics.median(backend), statistics.median(reference))
            for kind, (backend, reference) in kinds.items()
        )

    def _parts(self, state: RequestState) -> dict[str, Tensor]:
        """A reference's state by the names of `verify.model_state`."""
        is_fp8 = state.cache_dtype == "fp8"
        return {
            **{f"conv.{layer}": tensor for layer, tensor in state.windows.items()},
            **{f"recurrent.{layer}": tensor for layer, tensor in state.recurrent.items()},
            **{
                f"pages.{layer}": rows.float() * self._scales[layer] if is_fp8 else rows
                for layer, rows in state.rows.items()
            },
        }


def distance(actual: Tensor, gold: Tensor) -> float:
    """Relative, root mean square."""
    actual, gold = actual.double(), gold.double()
    return float((actual - gold).norm() / gold.norm().clamp_min(1e-30))


def _check(
    directory: Path,
    config: EngineConfig,
    parameters: ModelParameters,
    case: Case,
    gold: _Gold | None,
) -> BackendCheck:
    from kdecode.engine.worker import Worker

    worker = Worker(directory, config)
    model: tuple[ModelCheck, ...] = ()
    if gold is not None:
        model = gold.compare(*_run_model(worker, case))
    if worker.speculation is not None:
        from kdecode.commands.check_draft import check_draft

        model += check_draft(worker, parameters)
    steps = tuple(_run_steps(worker, parameters, case))
    return BackendCheck(config.decode_backend, None, steps, model)


def _logits(directory: Path, config: EngineConfig, case: Case) -> list[Tensor]:
    from kdecode.engine.worker import Worker

    return _run_model(Worker(directory, config), case)[0]


def _run_model(worker: Worker, case: Case) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Prefills every prompt and decodes the rest of each sequence, all rows together."""
    import torch

    from kdecode.decode.verify import model_state

    places = _Places(worker, case)
    logits = [[] for _ in case.sequences]  # type: list[list[Tensor]]
    for row in range(len(case.sequences)):
        logits[row].append(worker.runner.run(places.prefill(row))[0].clone().cpu())
    num_steps = len(case.sequences[0]) - case.prompt_tokens[0]
    for step in range(num_steps):
        batch = places.decode(step)
        for row, line in enumerate(worker.runner.run(batch).clone().cpu()):
            logits[row].append(line)
    states = [
        model_state(worker.config, worker.caches, request)
        for request in places.decode(num_steps - 1).requests
    ]
    places.free()
    return [torch.stack(lines) for lines in logits], states


def _run_steps(worker: Worker, parameters: ModelParameters, case: Case) -> Iterable[StepCheck]:
    """One decode step of all rows after the reference's own prefill."""
    import torch

    from kdecode.cache.caches import Caches
    from kdecode.decode import all_reference
    from kdecode.decode.verify import check_steps, copy_caches

    own = worker.caches
    caches = Caches.allocate(
        worker.config,
        "cpu",
        own.num_slots,
        own.num_pages,
        own.page_tokens,
        cache_dtype=own.cache_dtype,
        scales=own.scales,
    )
    oracle = all_reference.build(parameters, worker.config, caches, page_tokens=own.page_tokens)
    places = _Places(worker, case)
    last = len(oracle.steps) - 1
    if case.num_layers is not None:
        inside = [i for i, s in enumerate(oracle.steps) if s.layers[0] in range(case.num_layers)]
        last = inside[-1]
    with torch.no_grad():
        for row in range(len(case.sequences)):
            oracle.buffers.batch = places.prefill(row)
            oracle.run_until(last)
        copy_caches(caches, own)
        plan = worker.runner.plan(len(case.sequences))
        yield from check_steps(plan, oracle, places.decode(0), parameters, case.num_layers)
    places.free()


class _Places:
    """Slots and pages of a case's sequences, and the steps that run them."""

    def __init__(self, worker: Worker, case: Case) -> None:
        self._caches, self._case = worker.caches, case
        self._slots = [self._caches.allocate_slot() for _ in case.sequences]
        self._pages = [self._caches.allocate_pages(len(ids)) for ids in case.sequences]

    def prefill(self, row: int) -> StepBatch:
        from kdecode.cache.batch import StepBatch, StepRequest

        ids = self._case.sequences[row][: self._case.prompt_tokens[row]]
        request = StepRequest(ids, 0, self._slots[row], self._pages[row], is_decode=False)
        return StepBatch((request,))

    def decode(self, step: int) -> StepBatch:
        from kdecode.cache.batch import StepBatch, StepRequest

        requests = []
        for row, ids in enumerate(self._case.sequences):
            start = self._case.prompt_tokens[row] + step
            token = (ids[start],)
            requests.append(
                StepRequest(token, start, self._slots[row], self._pages[row], is_decode=True)
            )
        return StepBatch(tuple(requests))

    def free(self) -> None:
        for slot, pages in zip(self._slots, self._pages, strict=True):
            self._caches.free_slot(slot)
            self._caches.free_pages(pages)


def _report(check: BackendCheck, case: Case) -> Iterable[str]:
    yield f"{check.backend}: {_verdict(check)}"
    if check.refusal is not None:
        yield check.refusal
        yield ""
        return
    rows = [("op", "buffer", "checks", "worst layer", "error / bound", "rms / limit", "")]
    for worst, count in _worst(check.steps):
        rows.append(
            (
                worst.op,
                worst.buffer,
                str(count),
                "-" if worst.layer is None else str(worst.layer),
                f"{worst.ratio:.3f}",
                f"{worst.rms_ratio:.2e} / {worst.rms_limit:.0e}",
                "ok" if worst.is_within else "OUTSIDE",
            )
        )
    yield table(rows)
    if case.num_layers is not None:
        first = counted(case.num_layers, "layer")
        yield f"the first {first} only; the model as a whole was not checked"
    for item in check.model:
        yield (
            f"model, {item.quantity}: {item.backend:.2e} from gold; the rounded reference is "
            f"{item.rounded:.2e}, the limit {item.limit:.2e}: "
            f"{'ok' if item.is_within else 'OUTSIDE'}"
        )
    yield ""


def _verdict(check: BackendCheck) -> str:
    if check.refusal is not None:
        return "refused, not checked"
    return "within bounds" if check.is_within else "OUTSIDE ITS BOUNDS"


def _worst(checks: Sequence[StepCheck]) -> list[tuple[StepCheck, int]]:
    """The worst layer of each (op, buffer), in plan order, and how many were checked."""
    groups: dict[tuple[str, str], list[StepCheck]] = {}
    for check in checks:
        groups.setdefault((check.op, check.buffer), []).append(check)
    return [
        (max(group, key=lambda c: (not c.is_within, c.ratio, c.rms_ratio)), len(group))
        for group in groups.values()
    ]


def _document(check: BackendCheck) -> dict[str, Any]:
    return {
        "backend": check.backend,
        "is_within": check.is_within,
        "refusal": check.refusal,
        "steps": [{**asdict(step), "is_within": step.is_within} for step in check.steps],
        "model": [
            {**asdict(item), "limit": item.limit, "is_within": item.is_within}
            for item in check.model
        ],
    }
