"""What several commands share: the model argument, engine settings, progress bars, tables."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kdecode.commands.process import OutputError
from kdecode.config import (
    CacheDtype,
    ConfigError,
    DecodeBackend,
    EngineConfig,
    ExpertProducts,
    GpuExchange,
    GpuKernels,
    Isa,
    LosslessPacking,
    SharedExperts,
    TrunkWeights,
    WeightPrefetch,
    terminal_draws,
)
from kdecode.config_json import parse_json_object
from kdecode.config_speculative import SpeculativeConfig

if TYPE_CHECKING:
    from kdecode.engine.engine import LLM

_BAR_CELLS = 30
_REDRAW_S = 0.1
_LINE_S = 10.0


class InputError(ValueError):
    """Input of a command that cannot be used; the message names the value and the limit."""


class ProgressBar:
    """What is going on, on stderr: a line that is drawn over on a terminal, else lines to keep.

    Where stderr is no terminal, or one that cannot draw over a line, a phase gets one line when it
    begins, and long ones more of them.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty() and terminal_draws()
        self._written_s = 0.0
        self._phase = ""

    def __call__(self, label: str, done: int, total: int) -> None:
        is_last = done >= total
        if not self._is_terminal:
            if self._is_due(label, _LINE_S):
                self._print(f"{label}: {done} of {total}")
        elif is_last or self._is_due(label, _REDRAW_S):
            # What the bar stands between: " [", "] " and the count.
            left = _columns() - len(f"{label} [] {done}/{total}")
            cells = max(0, min(_BAR_CELLS, left))
            filled = cells * done // max(total, 1)
            bar = f"[{'#' * filled}{'.' * (cells - filled)}] " if cells else ""
            self._draw(f"{label} {bar}{done}/{total}")
            if is_last:
                self.clear()

    def message(self, phase: str, detail: str = "") -> None:
        """A phase, and how far it is, which only a terminal shows."""
        if self._is_terminal:
            self._draw(f"{phase}, {detail}" if detail else phase)
        elif self._is_due(phase, math.inf):
            self._print(phase)

    def clear(self) -> None:
        if self._is_terminal:
            self._draw("")

    def _is_due(self, phase: str, pause_s: float) -> bool:
        """Whether to write: a new phase, or the last time is long enough ago."""
        now = time.monotonic()
        if phase == self._phase and now - self._written_s < pause_s:
            return False
        self._phase, self._written_s = phase, now
        return True

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _draw(self, text: str) -> None:
        # A line that wraps could not be drawn over.
        print(f"\r\033[K{text[: _columns()]}", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    """Of the terminal or by COLUMNS, without the last one, behind which some terminals wrap."""
    try:
        fallback = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        fallback = os.terminal_size((80, 24))
    # Of stdout where that is a terminal, too.
    return max(1, shutil.get_terminal_size(fallback).columns - 1)


def positive(text: str) -> int:
    """An argparse type: a whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="checkpoint directory; without it the embedded default model",
    )


def add_machine_arguments(group: argparse._ArgumentGroup) -> None:
    """Where and with what a model runs; every command that builds an engine has these."""
    defaults = EngineConfig()
    group.add_argument("--device", default=defaults.device, help="cpu, cuda or cuda:N")
    group.add_argument("--threads", type=positive, help="default: every core it may use")
    group.add_argument("--isa", choices=get_args(Isa), help="default: the best there is")
    group.add_argument(
        "--lossless-packing",
        choices=get_args(LosslessPacking),
        default=defaults.lossless_packing,
        help="bf16 weights at 12 bits, the same bit by bit, in latency_specialized",
    )
    group.add_argument(
        "--trunk-format",
        choices=get_args(TrunkWeights),
        default=defaults.trunk_format,
        help="integers make other weights than the checkpoint's; latency_specialized only",
    )
    group.add_argument(
        "--gpu-kernels",
        choices=get_args(GpuKernels),
        default=defaults.gpu_kernels,
        help="of latency_specialized on CUDA, where there are both; docs/gpu.md",
    )
    group.add_argument(
        "--shared-experts",
        choices=get_args(SharedExperts),
        default=defaults.shared_experts,
        help="of latency_specialized on one GPU: inside of other launches, or beside them",
    )
    group.add_argument(
        "--weight-prefetch",
        choices=get_args(WeightPrefetch),
        default=defaults.weight_prefetch,
        help="of latency_specialized on one GPU: l2 to ask for weights ahead of their launches",
    )
    group.add_argument(
        "--expert-products",
        choices=get_args(ExpertProducts),
        default=defaults.expert_products,
        help="of latency_specialized on Blackwell: MXFP4 experts by scaled tensor-core products",
    )


def add_engine_arguments(parser: argparse.ArgumentParser, *, has_backend: bool = True) -> None:
    defaults = EngineConfig()
    group = parser.add_argument_group("engine")
    if has_backend:
        group.add_argument(
            "--decode-backend", choices=get_args(DecodeBackend), default=defaults.decode_backend
        )
    add_machine_arguments(group)
    group.add_argument("--cache-dtype", choices=get_args(CacheDtype), default=defaults.cache_dtype)
    group.add_argument(
        "--cache-scale", type=float, help="scale of an fp8 cache that the checkpoint has none for"
    )
    group.add_argument("--page-tokens", type=positive, default=defaults.page_tokens)
    group.add_argument("--engine-seed", type=int, default=defaults.seed)


def add_rank_arguments(group: argparse._ActionsContainer) -> None:
    """For commands that build an engine which several processes may share."""
    defaults = EngineConfig()
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        default=defaults.tensor_parallel_size,
        dest="num_ranks",
        metavar="N",
        help="processes that share the model; --threads is then of each. docs/parallel.md",
    )
    group.add_argument(
        "--gpu-exchange",
        choices=get_args(GpuExchange),
        default=defaults.gpu_exchange,
        help="between the GPUs of such processes; auto is symmetric memory where all have it",
    )
    group.add_argument(
        "--decode-context-parallel-size",
        "-dcp",
        type=positive,
        default=defaults.decode_context_parallel_size,
        dest="num_context_ranks",
        metavar="N",
        help="of these processes, how many share the positions of the latent cache: 1 or all",
    )
    group.add_argument(
        "--dcp-kv-cache-interleave-size",
        type=positive,
        default=defaults.context_interleave_tokens,
        dest="context_interleave",
        metavar="TOKENS",
        help="positions that follow each other on one of them",
    )
    group.add_argument(
        "--rank-timeout-seconds",
        type=float,
        default=defaults.rank_timeout_s,
        metavar="SECONDS",
        help="how long such a process may give no sign of life",
    )
    group.add_argument(
        "--check-ranks",
        action="store_true",
        help="they compare what they have after every step, for debugging",
    )


def rank_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_rank_arguments` reads, as fields of `EngineConfig`."""
    return {
        "tensor_parallel_size": args.num_ranks,
        "gpu_exchange": args.gpu_exchange,
        "decode_context_parallel_size": args.num_context_ranks,
        "context_interleave_tokens": args.context_interleave,
        "rank_timeout_s": args.rank_timeout_seconds,
        "check_ranks": args.check_ranks,
    }


def add_speculative_argument(parser: argparse._ActionsContainer) -> None:
    """For commands that decode, which a draft makes faster."""
    parser.add_argument(
        "--speculative-config",
        type=_speculative_config,
        metavar="JSON",
        help="a draft model and how it is used, with vLLM's names: docs/speculative.md; without a "
        '"model" the draft of the default model',
    )


def _speculative_config(text: str) -> SpeculativeConfig:
    """An argparse type. Without a model it is the default model's draft."""
    try:
        document = parse_json_object(text, "The speculative configuration", ConfigError)
        if "model" not in document:
            from kdecode.model.default_model import default_draft_directory

            document["model"] = str(default_draft_directory())
        return SpeculativeConfig.from_json(document)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def engine_config(args: argparse.Namespace, **settings: Any) -> EngineConfig:
    """What `add_engine_arguments` and the two beside it read. Raises ConfigError."""
    given: dict[str, Any] = {
        "device": args.device,
        "num_threads": args.threads,
        "isa": args.isa,
        "lossless_packing": args.lossless_packing,
        "trunk_format": args.trunk_format,
        "gpu_kernels": args.gpu_kernels,
        "shared_experts": args.shared_experts,
        "weight_prefetch": args.weight_prefetch,
        "expert_products": args.expert_products,
        "cache_dtype": args.cache_dtype,
        "cache_scale": args.cache_scale,
        "page_tokens": args.page_tokens,
        "seed": args.engine_seed,
    }
    if hasattr(args, "speculative_config"):
        given["speculative"] = args.speculative_config
    if hasattr(args, "decode_backend"):
        given["decode_backend"] = args.decode_backend
    if hasattr(args, "num_ranks"):
        given |= rank_settings(args)
    return EngineConfig(**{**given, **settings})


def model_directory(args: argparse.Namespace) -> Path:
    """The model's directory, or the default one's. Raises InputError, CheckpointError."""
    if args.model is None:
        from kdecode.model.default_model import default_model_directory

        directory = default_model_directory()
        print(f"no model was named; using the default model in {directory}", file=sys.stderr)
        return directory
    if not args.model:
        raise InputError("MODEL is empty; leave it out for the default model.")
    directory = Path(args.model)
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory with a checkpoint.")
    return directory


def open_model(directory: Path, config: EngineConfig) -> LLM:
    """Builds an engine, with progress and what it took on stderr."""
    from kdecode.engine.engine import LLM

    llm = LLM(directory, config, progress=ProgressBar())
    stats = llm.stats()
    build = stats["build"]
    print(
        f"{config.decode_backend}: opened the checkpoint in {build['open_s']:.2f} s, read and "
        f"packed {mebibytes(stats['packed_bytes'])} in {build['pack_s']:.2f} s, prepared plans in "
        f"{build['prepare_s']:.2f} s",
        file=sys.stderr,
    )
    note = weights_note(config)
    if note is not None:
        print(note, file=sys.stderr)
    return llm


def weights_note(config: EngineConfig) -> str | None:
    """What every output has to say of an engine whose weights are not the checkpoint's."""
    if not config.changes_weights:
        return None
    return f"trunk in {config.trunk_format}: WEIGHTS DIFFER FROM THE CHECKPOINT"


def context_tokens(*needed: int) -> int:
    """max_context_tokens of an engine that serves requests of these lengths."""
    return max(EngineConfig().max_context_tokens, *needed)


def read_prompt_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the prompt file {path} cannot be read: {error}") from error


def mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def check_output_file(target: str) -> None:
    """Raises InputError for a path that `write_json` could not write; nothing is left behind.

    For the start of a command whose document comes at its end.
    """
    if target == "-":
        return
    if not target:
        raise InputError("the output file has no name; it is a path, or - for stdout.")
    path = Path(target)
    try:
        try:
            path.stat()
        except FileNotFoundError:
            # A file without a name, so that a run which fails leaves none.
            with tempfile.TemporaryFile(dir=path.parent):
                return
        # Opened without being emptied: what is in it is replaced at the end only.
        with path.open("ab"):
            return
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}") from error


def write_json(document: Any, target: str, echo: Callable[[str], None] = print) -> None:
    """Writes a document to a path, or to stdout for "-". Raises OutputError."""
    text = json.dumps(document, indent=2)
    if target == "-":
        echo(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{target} cannot be written: {error}") from error
