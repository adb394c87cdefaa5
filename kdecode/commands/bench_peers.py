"""`kdecode bench peers`: both backends beside llama.cpp and `transformers`, on the same weights.

Owns which arms run, on which work. The protocol is `bench.peers`', the programs are
`bench.llama_cpp`'s, the files and the check of logits before any ratio `peer_files`', and what is
printed `peer_report`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from kdecode.commands import bench_server_peers, peer_report
from kdecode.commands.common import (
    InputError,
    ProgressBar,
    add_engine_arguments,
    add_model_argument,
    engine_config,
    model_directory,
    open_model,
    positive,
)
from kdecode.commands.compare import NEAR_TIE_RTOL
from kdecode.commands.peer_files import PEERS, Check, Files, backends, file_kind
from kdecode.config import CompileForm, DecodeBackend, EngineConfig

if TYPE_CHECKING:
    from kdecode.bench.agreement import NearTie
    from kdecode.bench.peer_arms import Work
    from kdecode.bench.peers import Divergence, PeerArm

HELP = "beside llama.cpp and transformers, on the same weights, where they are installed"
MEASURES = ("decode", "prompt")
# Arguments that not every kind of run reads, where they are not given.
DEFAULTS: dict[str, Any] = {
    "context_tokens": 128,
    "output_tokens": 32,
    "prompt_tokens": [128, 512, 2048],
    "near_tie_rtol": NEAR_TIE_RTOL,
}


def add_arguments(part: argparse.ArgumentParser) -> None:
    add_model_argument(part)
    part.add_argument(
        "--peer",
        choices=(*PEERS, "none"),
        action="append",
        help="only this one, or none; repeatable; default: llama.cpp on the released precisions",
    )
    part.add_argument(
        "--decode-backend",
        choices=get_args(DecodeBackend),
        action="append",
        help="only this one of ours; repeatable; default: both",
    )
    part.add_argument(
        "--measure",
        choices=MEASURES,
        default=MEASURES[0],
        help="tokens a second of replies, or of a prompt up to the first token of its reply",
    )
    part.add_argument("--rows", type=positive, default=1, help="requests of a step")
    part.add_argument("--context-tokens", type=positive, help=_default("context_tokens"))
    part.add_argument("--output-tokens", type=positive, help=_default("output_tokens"))
    part.add_argument(
        "--prompt-tokens",
        type=positive,
        nargs="+",
        help=f"lengths for --measure prompt, one after the other; {_default('prompt_tokens')}",
    )
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
    _add_compile_arguments(part)
    _add_server_arguments(part)
    part.add_argument("--json", action="store_true", help="one JSON document instead")
    add_engine_arguments(part, has_backend=False)


def _default(name: str) -> str:
    value = DEFAULTS[name]
    return f"default: {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _add_compile_arguments(part: argparse.ArgumentParser) -> None:
    compiled = part.add_argument_group("torch.compile")
    compiled.add_argument(
        "--compile-auto",
        choices=get_args(CompileForm),
        action="append",
        help="one more arm: decode steps of auto, compiled in this form; repeatable; needs a C++ "
        "compiler and takes minutes",
    )
    compiled.add_argument(
        "--near-tie-rtol",
        type=float,
        help="how far below the largest logit, in parts of it, another choice of that arm may be; "
        + _default("near_tie_rtol"),
    )


def _add_server_arguments(part: argparse.ArgumentParser) -> None:
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


@dataclass(frozen=True)
class Source:
    """An engine that can be an arm of any work.

    divergence: from the reference, where that was measured. needs_check: it reads weights that were
    converted for it.
    """

    arm: Callable[[Work], PeerArm]
    divergence: Divergence | None
    is_ours: bool
    needs_check: bool = False


@dataclass
class Entrants:
    """Ours first. left_out: arms that were asked for and are not measured, with the reason."""

    sources: list[Source] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The document and the text. Raises InputError for peers that are not there."""
    from kdecode.bench.llama_cpp import PeerError
    from kdecode.bench.peers import measure_peers
    from kdecode.model.gguf_tensors import GgufError

    _check(args)
    if args.server:
        return bench_server_peers.run(args)
    directory = model_directory(args)
    bar = ProgressBar()
    sections = []
    try:
        with Files.open(args, directory) as files:
            check = Check(args, files, bar) if files.names else None
            entrants = _entrants(args, files, check, bar)
            for work in _works(args):
                arms = [source.arm(work) for source in entrants.sources]
                runs = measure_peers(arms, args.blocks, bar.message)
                sections.append(peer_report.Section(work, arms, runs))
    except (GgufError, PeerError) as error:
        raise InputError(str(error)) from error
    finally:
        bar.clear()
    agreement = check.agreement if check else None
    document = peer_report.document(args, files, entrants, sections, agreement)
    return document, "\n".join(peer_report.report(document))


def _check(args: argparse.Namespace) -> None:
    """Raises InputError for arguments that contradict each other, before anything takes time."""
    if args.blocks < 2:
        raise InputError(f"blocks is {args.blocks}; an interval needs at least 2.")
    if args.measure == "prompt" and args.rows > 1:
        raise InputError(f"A prompt is timed alone; rows is {args.rows}.")
    is_alone = "none" in (args.peer or ())
    if is_alone and set(args.peer) != {"none"}:
        raise InputError("--peer none leaves ours alone; no other --peer goes with it.")
    if args.server and is_alone:
        raise InputError("--server compares servers; --peer none leaves ours alone.")
    if args.server and args.measure == "prompt":
        raise InputError("--server has measures of its own; leave --measure out.")
    if args.compile_auto and (args.server or args.measure == "prompt"):
        raise InputError("--compile-auto compiles decode steps; neither servers nor prompts.")
    _settle(args)
    if args.device != "cpu" and not is_alone:
        raise InputError(
            f"--device is {args.device}, and other engines are measured on the CPU; no ratio is of "
            "two devices: add --peer none, or leave --device out."
        )
    if args.compile_auto:
        _check_compiled(args)


def _settle(args: argparse.Namespace) -> None:
    """Defaults for what was not given. Raises InputError for what was given and nothing reads."""
    is_prompt = args.measure == "prompt"
    unread = {
        "context_tokens": "has no part in --measure prompt" if is_prompt else None,
        "output_tokens": "has no part in --measure prompt" if is_prompt else None,
        "prompt_tokens": None if is_prompt else "needs --measure prompt",
        "near_tie_rtol": None if args.compile_auto else "needs --compile-auto",
    }
    for name, reason in unread.items():
        if getattr(args, name) is None:
            setattr(args, name, DEFAULTS[name])
        elif reason is not None:
            raise InputError(f"--{name.replace('_', '-')} {reason}.")


def _check_compiled(args: argparse.Namespace) -> None:
    from kdecode.decode.compiled import missing_compiler

    if args.trunk_format != "bf16":
        raise InputError(f"auto has no trunk in {args.trunk_format}, compiled or not.")
    _near_tie(args)
    reason = missing_compiler()
    if reason is not None:
        raise InputError(reason)


def _near_tie(args: argparse.Namespace) -> NearTie:
    from kdecode.bench.agreement import NearTie

    try:
        return NearTie(0.0, args.near_tie_rtol)
    except ValueError as error:
        raise InputError(str(error)) from error


def _works(args: argparse.Namespace) -> list[Work]:
    from kdecode.bench.peer_arms import Work

    threads = EngineConfig(num_threads=args.threads).resolved_threads()
    if args.measure == "prompt":
        return [Work(1, tokens, 1, threads) for tokens in args.prompt_tokens]
    return [Work(args.rows, args.context_tokens, args.output_tokens, threads)]


def _entrants(
    args: argparse.Namespace, files: Files, check: Check | None, bar: ProgressBar
) -> Entrants:
    from kdecode.bench import peer_arms

    is_prompt = args.measure == "prompt"
    own_kind = peer_arms.KdecodePromptArm if is_prompt else peer_arms.KdecodeArm
    entrants = Entrants()
    for backend in backends(args):
        llm = open_model(files.directory, _engine(args, backend))
        distance = check.of_engine(llm) if check else None
        entrants.sources.append(Source(partial(own_kind, llm), distance, is_ours=True))
    for form in args.compile_auto or ():
        _add_compiled(entrants, args, files, check, form, bar)
    for name in files.names:
        entrants.sources.append(_llama_source(name, files, check, bar, is_prompt=is_prompt))
    if "transformers" in (args.peer or ()):
        if files.config.model_type != "kimi_linear":
            raise InputError(
                f"transformers has no class for a {files.config.model_type} model; it has "
                "Kimi-Linear."
            )
        package_kind = peer_arms.TransformersPromptArm if is_prompt else peer_arms.TransformersArm
        model = peer_arms.load_transformers(files.directory)
        make = partial(package_kind, model, files.config.vocab_size)
        entrants.sources.append(Source(make, None, is_ours=False))
    return entrants


def _add_compiled(
    entrants: Entrants,
    args: argparse.Namespace,
    files: Files,
    check: Check | None,
    form: CompileForm,
    bar: ProgressBar,
) -> None:
    """An arm of the one work that there is, or why there is none."""
    from kdecode.bench.compiled_arm import CompiledArm
    from kdecode.bench.llama_cpp import PeerError
    from kdecode.decode.compiled import CompileError

    (work,) = _works(args)
    llm = open_model(files.directory, _engine(args, "auto"))
    bar.message(f"torch.compile, {form}")
    try:
        arm = CompiledArm(llm, form, _near_tie(args), work)
    except (CompileError, PeerError) as error:
        name = f"kdecode auto, torch.compile {form}"
        entrants.left_out.append({"name": name, "reason": str(error)})
        return
    # One request is compared with the reference, whatever the rows of the work.
    distance = check.of_engine(llm) if check and work.rows == 1 else None
    entrants.sources.append(Source(lambda work: arm, distance, is_ours=True))


def _llama_source(
    name: str, files: Files, check: Check | None, bar: ProgressBar, *, is_prompt: bool
) -> Source:
    from kdecode.bench.peer_arms import LlamaCppArm, LlamaCppPromptArm
    from kdecode.model.gguf_export import tensor_types

    assert files.llama is not None
    kind = file_kind(name)
    path = files.path(kind, bar)
    make = partial(
        LlamaCppPromptArm if is_prompt else LlamaCppArm,
        name,
        files.llama,
        path,
        tensor_types(path),
        keeps_weights=kind == "released",
    )
    distance = check.of_llama(path) if check else None
    return Source(make, distance, is_ours=False, needs_check=True)


def _engine(args: argparse.Namespace, backend: DecodeBackend) -> EngineConfig:
    works = _works(args)
    longest = max(work.context_tokens + work.output_tokens for work in works)
    if args.compile_auto:
        from kdecode.bench.compiled_arm import checked_tokens

        longest = max(longest, *(work.context_tokens + checked_tokens(work) for work in works))
    return engine_config(
        args,
        decode_backend=backend,
        max_context_tokens=max(longest, args.agreement_tokens),
        max_requests=works[0].rows,
    )
