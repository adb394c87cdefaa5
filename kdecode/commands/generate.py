"""`kdecode generate`: one prompt, its reply as it comes, and what it took."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdecode.bench.wording import counted
from kdecode.commands.common import (
    InputError,
    add_engine_arguments,
    add_model_argument,
    add_rank_arguments,
    add_speculative_argument,
    context_tokens,
    engine_config,
    model_directory,
    open_model,
    positive,
    read_prompt_file,
    write_json,
)

if TYPE_CHECKING:
    from kdecode.engine.engine import LLM, ChatReply
    from kdecode.engine.request import Output, SamplingParams

HELP = "generate the reply to one prompt"
DESCRIPTION = (
    "The text streams to stdout; what loading took and a line of metrics go to stderr. With --chat "
    "the prompt is a user's message, and the reasoning of the reply streams to stderr."
)
EXIT_BROKEN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the prompt's text")
    source.add_argument("--prompt-file", metavar="PATH", help="a file with the prompt's text")
    parser.add_argument("--chat", action="store_true", help="encode the prompt as a chat")
    parser.add_argument("--no-thinking", action="store_true", help="a chat reply without reasoning")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=positive, default=128)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sampling.add_argument("--top-k", type=int, default=0, help="0 is off")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--seed", type=int, help="of the random draws")
    sampling.add_argument(
        "--stop",
        action="append",
        default=[],
        help="a text that ends the reply (with --chat: its response); repeatable",
    )
    sampling.add_argument("--min-tokens", type=int, default=0)
    sampling.add_argument("--ignore-eos", action="store_true")
    add_engine_arguments(parser)
    add_rank_arguments(parser)
    add_speculative_argument(parser)


def run(args: argparse.Namespace) -> int:
    params = _sampling(args)
    prompt = args.prompt if args.prompt is not None else read_prompt_file(args.prompt_file)
    directory = model_directory(args)
    longest = _total_tokens(directory, args, prompt)
    config = engine_config(args, max_context_tokens=context_tokens(longest), max_requests=1)
    with open_model(directory, config) as llm:
        reply = _reply(llm, args, prompt, params)
        output = reply if not args.chat else reply.output
        metrics = _metrics(output)
        document = _document(llm, output, metrics, reply if args.chat else None)
    if args.json:
        write_json(document, "-")
    else:
        print(_metrics_line(metrics, output), file=sys.stderr)
        if metrics and metrics["speculation"] is not None:
            print(speculation_line(metrics["speculation"]), file=sys.stderr)
    if output.error is not None:
        print(f"kdecode generate: the reply broke: {output.error}", file=sys.stderr)
        return EXIT_BROKEN
    return 0


def _total_tokens(directory: Path, args: argparse.Namespace, prompt: str) -> int:
    """Tokens of the prompt and the longest reply; the caches are made for so many.

    Raises InputError for more than the model was made for, before anything is packed.
    """
    from kdecode.config import ModelConfig
    from kdecode.model.chat import encode_chat
    from kdecode.model.tokenizer import Tokenizer

    config = ModelConfig.from_checkpoint(directory)
    tokenizer = Tokenizer.from_directory(directory, config.vocab_size)
    if args.chat:
        messages = [{"role": "user", "content": prompt}]
        ids = encode_chat(tokenizer, messages, thinking=not args.no_thinking)
    else:
        ids = tokenizer.encode_text(prompt)
    total = len(ids) + args.max_tokens
    if total > config.max_positions:
        raise InputError(
            f"The prompt has {len(ids):,} tokens and max_tokens is {args.max_tokens:,}; the model "
            f"was made for at most {config.max_positions:,} positions."
        )
    return total


def _sampling(args: argparse.Namespace) -> SamplingParams:
    from kdecode.engine.request import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        min_tokens=args.min_tokens,
    )


def _reply(llm: LLM, args: argparse.Namespace, prompt: str, params: SamplingParams) -> Any:
    """An Output, or with --chat a ChatReply; printed unless JSON is asked for."""
    if args.chat:
        messages = [{"role": "user", "content": prompt}]
        show = None if args.json else _ChatPrinter()
        chat = llm.chat(messages, params, thinking=not args.no_thinking, on_text=show)
        if show is not None:
            show.end()
        return chat
    if args.json:
        return llm.generate([prompt], params)[0]
    output = llm.generate(
        [prompt], params, on_token=lambda token: print(token.text, end="", flush=True)
    )[0]
    print()
    return output


class _ChatPrinter:
    """Prints a reply as it comes: its reasoning to stderr, its response to stdout."""

    def __init__(self) -> None:
        self._is_reasoning = False

    def __call__(self, reasoning: str, response: str) -> None:
        if reasoning:
            self._is_reasoning = True
            print(reasoning, end="", file=sys.stderr, flush=True)
        if response:
            self._end_reasoning()
            print(response, end="", flush=True)

    def end(self) -> None:
        self._end_reasoning()
        print(flush=True)

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            print(file=sys.stderr, flush=True)
        self._is_reasoning = False


def _metrics(output: Output) -> dict[str, Any]:
    """The reply by the definitions of `bench.metrics`; None where they do not define a value."""
    from kdecode.bench.engine_arm import record_of
    from kdecode.bench.metrics import SPECIALIZED

    if output.error is not None or not output.token_ids:
        return {}
    record = record_of(output)
    metrics = record.metrics()
    total = sum(record.decode_steps.values())
    return {
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": metrics.n,
        "prefill_s": record.prefill_ns / 1e9,
        "ttft_s": metrics.ttft_s,
        "tpot_s": metrics.tpot_s,
        "decode_tps": metrics.decode_tps,
        "e2e_s": metrics.e2e_s,
        "coverage": record.decode_steps.get(SPECIALIZED, 0) / total if total else None,
        "decode_steps": dict(record.decode_steps),
        "fallback_reasons": dict(record.fallback_reasons),
        "speculation": output.rounds.figures() if output.rounds.rounds else None,
    }


def speculation_line(figures: dict[str, Any]) -> str:
    """One line about the rounds of a reply."""
    kind = "SYNTHETIC acceptance, no answer of the model" if figures["is_synthetic"] else "drafts"
    places = ", ".join("-" if rate is None else f"{rate:.2f}" for rate in figures["rate_by_place"])
    return (
        f"{kind}: {figures['acceptance_length']:.2f} tokens a round as verified, "
        f"{figures['emitted_length']:.2f} as emitted, in {figures['rounds']} rounds; accepted "
        f"{100 * figures['acceptance_rate']:.0f} % of {figures['drafted_tokens']} drafts, by place "
        f"{places}"
    )


def _metrics_line(metrics: dict[str, Any], output: Output) -> str:
    if not metrics:
        return f"no measurement: the request ended with {output.finish_reason}"
    decode = "undefined"
    if metrics["decode_tps"] is not None:
        decode = f"{metrics['decode_tps']:.1f} tok/s ({1000 * metrics['tpot_s']:.2f} ms/token)"
    coverage = metrics["coverage"]
    served = "no decode steps" if coverage is None else f"{100 * coverage:.0f} % specialized"
    return (
        f"{counted(metrics['prompt_tokens'], 'prompt token')} and "
        f"{counted(metrics['output_tokens'], 'output token')}, "
        f"finish {output.finish_reason}; prefill {1000 * metrics['prefill_s']:.1f} ms, first token "
        f"after {1000 * metrics['ttft_s']:.1f} ms, decode {decode}, {served}"
    )


def _document(
    llm: LLM, output: Output, metrics: dict[str, Any], chat: ChatReply | None
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "text": output.text if chat is None else chat.response,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "error": output.error,
        "metrics": metrics,
        "load": llm.stats()["build"],
        "speculation": llm.stats()["speculation"],
        "outputs_valid": llm.resolved_config()["outputs_valid"],
        "config": llm.resolved_config(),
    }
    if chat is not None:
        document |= {"reasoning": chat.reasoning, "response": chat.response}
    return document
