"""`kdecode bench peers`: both backends beside llama.cpp and `transformers`, on the same weights.

Owns which peers run and what is printed. The protocol is `bench.peers`', the programs are
`bench.llama_cpp`'s. Before any ratio with llama.cpp, its next-token distributions on an F32 export
are compared with the reference's.
"""

from __future__ import annotations

import argparse
import random
import string
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kdecode.commands import bench_server_peers
from kdecode.commands.common import (
    InputError,
    ProgressBar,
    add_engine_arguments,
    add_model_argument,
    engine_config,
    model_directory,
    open_model,
    positive,
    table,
)
from kdecode.config import DecodeBackend, EngineConfig, ModelConfig

if TYPE_CHECKING:
    import numpy as np

    from kdecode.bench.llama_cpp import LlamaCpp
    from kdecode.bench.peers import Divergence, PeerArm, PeerRun
    from kdecode.engine.engine import LLM

HELP = "beside llama.cpp and transformers, on the same weights, where they are installed"
# The backend that is asked about comes first, so that ratios are of it.
BACKENDS: tuple[DecodeBackend, ...] = ("latency_specialized", "auto")
PEERS = ("llama.cpp", "llama.cpp-q8_0", "llama.cpp-q4_0", "transformers")
# Routed experts that are MXFP4 in the checkpoint stay so in a quantised file.
_KEEP_EXPERTS = ("ffn_(gate|up|down)_exps=mxfp4",)


def add_arguments(part: argparse.ArgumentParser) -> None:
    add_model_argument(part)
    part.add_argument(
        "--peer",
        choices=PEERS,
        action="append",
        help="only this one; repeatable; default: llama.cpp on the released precisions",
    )
    part.add_argument(
        "--decode-backend",
        choices=get_args(DecodeBackend),
        action="append",
        help="only this one of ours; repeatable; default: both",
    )
    part.add_argument("--rows", type=positive, default=1, help="requests of a step")
    part.add_argument("--context-tokens", type=positive, default=128)
    part.add_argument("--output-tokens", type=positive, default=32)
    part.add_argument("--blocks", type=positive, default=5, help="two runs of every arm each")
    part.add_argument(
        "--agreement-tokens",
        type=positive,
        default=64,
        help="of the check of logits, whose second half counts",
    )
    part.add_argument(
        "--gguf-dir", metavar="DIR", help="keep exported files here and use them again"
    )
    server = part.add_argument_group("servers")
    server.add_argument(
        "--server",
        action="store_true",
        help="`kdecode serve` beside `llama-server`: output tokens a second, inter-token latency",
    )
    server.add_argument(
        "--concurrency", type=positive, nargs="+", default=[1, 4, 16], help="requests at a time"
    )
    server.add_argument(
        "--requests-per-slot", type=positive, default=4, help="of a pass, for each at a time"
    )
    part.add_argument("--json", action="store_true", help="one JSON document instead")
    add_engine_arguments(part, has_backend=False)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The document and the text. Raises InputError for peers that are not there."""
    from kdecode.bench.llama_cpp import PeerError
    from kdecode.bench.machine import read_machine
    from kdecode.bench.peers import measure_peers
    from kdecode.model.gguf_tensors import GgufError

    if args.server:
        return bench_server_peers.run(args)
    if args.blocks < 2:
        raise InputError(f"blocks is {args.blocks}; an interval needs at least 2.")
    directory = model_directory(args)
    bar = ProgressBar()
    try:
        with Files.open(args, directory) as files:
            check = Check(args, files, bar) if files.names else None
            arms = _arms(args, files, check, bar)
            runs = measure_peers([arm for arm, _ in arms], args.blocks, bar.message)
    except (GgufError, PeerError) as error:
        raise InputError(str(error)) from error
    finally:
        bar.clear()
    machine = read_machine()
    ours = len(backends(args))
    document = _document(args, arms, ours, runs, check.agreement if check else None)
    document["machine"] = asdict(machine)
    head = f"{machine.cpu}, {machine.cores} cores, {machine.date}; {args.rows} rows, "
    head += f"{args.context_tokens:,} tokens of context, {args.output_tokens} tokens a run"
    return document, "\n".join([head, *_report(document)])


class Files:
    """The GGUF files of one checkpoint, each made when it is first asked for."""

    def __init__(self, directory: Path, folder: Path, llama: LlamaCpp | None, names: list[str]):
        from kdecode.engine.worker import weights_digest

        self.directory, self.llama, self.names = directory, llama, names
        self.config = ModelConfig.from_checkpoint(directory)
        self._folder, self._digest = folder, weights_digest(directory)

    @classmethod
    @contextmanager
    def open(cls, args: argparse.Namespace, directory: Path) -> Iterator[Files]:
        from kdecode.bench.llama_cpp import LlamaCpp

        names = [name for name in args.peer or PEERS[:1] if name.startswith("llama.cpp")]
        llama = LlamaCpp.find() if names else None
        if args.gguf_dir is not None:
            folder = Path(args.gguf_dir)
            folder.mkdir(parents=True, exist_ok=True)
            yield cls(directory, folder, llama, names)
            return
        with tempfile.TemporaryDirectory(prefix="kdecode-peers-") as folder_name:
            yield cls(directory, Path(folder_name), llama, names)

    def text(self, num_tokens: int) -> Path:
        """A text of at least twice as many tokens: as many random words, of random letters."""
        source = random.Random(1)
        words = (
            "".join(source.choices(string.ascii_lowercase, k=source.randint(2, 9)))
            for _ in range(3 * num_tokens)
        )
        path = self._folder / "text"
        path.write_text(" ".join(words), encoding="ascii")
        return path

    def path(self, kind: str, bar: ProgressBar) -> Path:
        """kind: "f32", "released", "q8_0" or "q4_0"."""
        from kdecode.model.gguf_export import export_gguf

        found = self._folder / f"{self._digest}-{kind}.gguf"
        if found.exists():
            return found
        # Under another name until it is whole.
        partial = found.with_suffix(".partial")
        if kind == "f32" or kind == "released":
            export_gguf(self.directory, partial, kind, lambda done, of: bar(kind, done, of))
        else:
            assert self.llama is not None
            is_mxfp4 = self.config.moe.expert_format == "mxfp4"
            released = self.path("released", bar)
            bar.message(f"{kind}: quantising")
            self.llama.convert(released, partial, kind, _KEEP_EXPERTS if is_mxfp4 else ())
        partial.rename(found)
        return found


class Check:
    """Next-token distributions of every arm against the unrounded reference, teacher-forced.

    The tokens are those that llama.cpp makes of a random text; the second half of them counts.
    """

    def __init__(self, args: argparse.Namespace, files: Files, bar: ProgressBar) -> None:
        from kdecode.bench.llama_cpp import FLOOR_NATS
        from kdecode.bench.peers import divergence

        self._context, self._bar = args.agreement_tokens, bar
        # Every distance is taken the same way, so that they can be compared.
        self._distance = partial(divergence, floor_nats=FLOOR_NATS)
        self._llama, self._threads = files.llama, EngineConfig(num_threads=args.threads)
        self._text = files.text(args.agreement_tokens)
        f32 = files.path("f32", bar)
        bar.message("logits: llama.cpp, F32 weights")
        self._tokens, theirs = self._log_probabilities(f32)
        if args.gguf_dir is None:
            f32.unlink()
        bar.message("logits: the reference, fp32")
        first = self._context // 2
        reference = _reference(files.directory, files.config, self._tokens)
        self._reference = reference[first:-1]
        self.agreement = self._distance(self._reference, theirs)

    def of_llama(self, model: Path) -> Divergence:
        self._bar.message("logits: llama.cpp, the weights that are timed")
        return self._distance(self._reference, self._log_probabilities(model)[1])

    def of_engine(self, llm: LLM) -> Divergence:
        self._bar.message("logits: kdecode")
        first = self._context // 2
        prompt, reply = self._tokens[: first + 1], self._tokens[first + 1 :]
        return self._distance(self._reference, llm.teacher_forced(prompt, reply).numpy())

    def _log_probabilities(self, model: Path) -> tuple[list[int], np.ndarray]:
        assert self._llama is not None
        threads = self._threads.resolved_threads()
        return self._llama.log_probabilities(model, threads, self._context, self._text)


def _reference(directory: Path, config: ModelConfig, ids: Sequence[int]) -> np.ndarray:
    import torch

    from kdecode.model.reference import GOLD32, RequestState, forward
    from kdecode.model.weights import CheckpointReader

    parameters = CheckpointReader(directory).load_model()
    with torch.no_grad():
        state = RequestState.new(config, GOLD32)
        logits: np.ndarray = forward(parameters, config, torch.tensor(ids), state, GOLD32).numpy()
    return logits


def backends(args: argparse.Namespace) -> Sequence[DecodeBackend]:
    """Ours; of those that were not named, the ones that have the trunk that is asked for."""
    own = BACKENDS if args.trunk_format == "bf16" else BACKENDS[:1]
    return args.decode_backend or own


def _arms(
    args: argparse.Namespace, files: Files, check: Check | None, bar: ProgressBar
) -> list[tuple[PeerArm, Divergence | None]]:
    """Ours first. Each with its distance from the reference, where that was measured."""
    from kdecode.bench.peer_arms import KdecodeArm, LlamaCppArm, TransformersArm, Work
    from kdecode.model.gguf_export import tensor_types

    threads = EngineConfig(num_threads=args.threads).resolved_threads()
    work = Work(args.rows, args.context_tokens, args.output_tokens, threads)
    longest = max(args.context_tokens + args.output_tokens, args.agreement_tokens)
    arms: list[tuple[PeerArm, Divergence | None]] = []
    for backend in backends(args):
        config = engine_config(
            args, decode_backend=backend, max_context_tokens=longest, max_requests=args.rows
        )
        llm = open_model(files.directory, config)
        arms.append((KdecodeArm(llm, work), check.of_engine(llm) if check else None))
    for name in files.names:
        assert files.llama is not None
        kind = name.partition("-")[2] or "released"
        path = files.path(kind, bar)
        arm = LlamaCppArm(
            name, files.llama, path, tensor_types(path), work, keeps_weights=kind == "released"
        )
        arms.append((arm, check.of_llama(path) if check else None))
    if "transformers" in (args.peer or ()):
        if files.config.model_type != "kimi_linear":
            raise InputError(
                f"transformers has no class for a {files.config.model_type} model; it has "
                "Kimi-Linear."
            )
        arms.append((TransformersArm(files.directory, files.config.vocab_size, work), None))
    return arms


def _document(
    args: argparse.Namespace,
    checked: Sequence[tuple[PeerArm, Divergence | None]],
    num_ours: int,
    runs: Sequence[PeerRun],
    agreement: Divergence | None,
) -> dict[str, Any]:
    from kdecode.bench.peers import peer_ratio, refusal, typical_speed

    arms = [arm for arm, _ in checked]
    ratios = []
    for ours in range(num_ours):
        for peer in range(ours + 1, len(arms)):
            is_llama = arms[peer].name.startswith("llama.cpp")
            reason = refusal(arms[ours], arms[peer], agreement, needs_check=is_llama)
            estimate = None if reason else asdict(peer_ratio(runs, ours, peer, args.engine_seed))
            ratios.append(
                {
                    "ours": arms[ours].name,
                    "peer": arms[peer].name,
                    "refusal": reason,
                    "estimate": estimate,
                }
            )
    return {
        "rows": args.rows,
        "context_tokens": args.context_tokens,
        "output_tokens": args.output_tokens,
        "agreement": None if agreement is None else asdict(agreement),
        "arms": [
            {
                "name": arm.name,
                "version": arm.version,
                "keeps_weights": arm.keeps_weights,
                "precision": dict(arm.precision),
                "tokens_per_second": typical_speed(runs, number),
                "divergence": None if distance is None else asdict(distance),
            }
            for number, (arm, distance) in enumerate(checked)
        ],
        "runs": [{**asdict(run), "is_spoilt": run.is_spoilt} for run in runs],
        "ratios": ratios,
    }


def _report(document: dict[str, Any]) -> Iterator[str]:
    arms = document["arms"]
    agreement = document["agreement"]
    if agreement is not None:
        yield (
            f"logits of llama.cpp on F32 weights against the fp32 reference, "
            f"{agreement['positions']} positions: KL {agreement['mean']:.1e} nats (largest "
            f"{agreement['largest']:.1e}), {agreement['same_choice']} same choices"
        )
    yield ""
    rows = [("engine", "tok/s", "spoilt runs", "weights", "KL, nats", "version")]
    for number, arm in enumerate(arms):
        mine = [run for run in document["runs"] if run["arm"] == number]
        rows.append(
            (
                arm["name"],
                f"{arm['tokens_per_second']:.2f}",
                f"{sum(run['is_spoilt'] for run in mine)} of {len(mine)}",
                "as released" if arm["keeps_weights"] else "DIFFER FROM THE CHECKPOINT",
                "-" if arm["divergence"] is None else f"{arm['divergence']['mean']:.1e}",
                arm["version"],
            )
        )
    yield table(rows)
    yield ""
    classes = list(dict.fromkeys(label for arm in arms for label in arm["precision"]))
    head = ("held in (x: input of the product)", *(arm["name"] for arm in arms))
    lines = [(label, *(arm["precision"].get(label, "-") for arm in arms)) for label in classes]
    yield table([head, *lines])
    yield ""
    for ratio in document["ratios"]:
        pair = f"{ratio['ours']} / {ratio['peer']}"
        found = ratio["estimate"]
        if found is None:
            yield f"{pair}: no ratio, {ratio['refusal']}"
            continue
        yield (
            f"{pair}: {found['ratio']:.2f}x [{found['low']:.2f}, {found['high']:.2f}], "
            f"{found['num_pairs']} pairs in {found['num_blocks']} blocks"
        )
