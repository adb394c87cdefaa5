"""The flags of `kdecode compare` that are about servers, and the engine's that it cannot take.

Owns their names, that those of servers are refused where there are none, and settings of an engine
where `auto` is one of the arms and has no such thing; what flags mean is `compare_design`'s.
"""

from __future__ import annotations

import argparse

from kdecode.commands.common import InputError, positive
from kdecode.config import OF_GPU_PLANS

# Flags that mean nothing without servers; none of them is given by default.
_OF_SERVERS = (
    *("model_a", "model_b", "api_key", "concurrency", "rate", "sweep_concurrency"),
    *("sweep_prompt_tokens", "preflight", "no_null", "token_ids", "workload", "workload_format"),
    *("agentic", "sessions", "max_pause", "live_replies", "own_times", "out"),
    *("good_ttft_ms", "good_tpot_ms", "good_e2e_ms", "plan", "expect_ttft_ms", "expect_tpot_ms"),
)


def _nats(text: str) -> float | None:
    """An argparse type; None for auto."""
    return None if text == "auto" else float(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "two servers", "any two with OpenAI's interface, instead of two backends in this process"
    )
    group.add_argument("--url-a", metavar="URL", help="the baseline, such as http://host:8000")
    group.add_argument("--url-b", metavar="URL", help="the same URL twice is a null run")
    group.add_argument(
        "--serve",
        action="store_true",
        help="start a server of MODEL for each backend, and compare these",
    )
    group.add_argument(
        "--recipe", metavar="FILE", help="start the servers of a recipe, such as recipes/*.yaml"
    )
    group.add_argument(
        "--restart",
        choices=("never", "block", "arm"),
        default="never",
        help="of servers that are started here: both anew for each block; or one at a time, anew "
        "when the other arm's turn begins, on one set of devices",
    )
    group.add_argument("--model-a", metavar="NAME", help="default: the first that A serves")
    group.add_argument("--model-b", metavar="NAME", help="default: the first that B serves")
    group.add_argument("--api-key", metavar="KEY", help="of both servers")
    group.add_argument(
        "--concurrency", type=positive, metavar="N", help="closed loop of N sessions; default 1"
    )
    group.add_argument(
        "--rate", type=float, metavar="R", help="open loop of R sessions a second, Poisson"
    )
    group.add_argument(
        "--sweep-concurrency",
        type=positive,
        nargs="+",
        metavar="N",
        help="a comparison for each, and one table and page of all",
    )
    group.add_argument("--sweep-prompt-tokens", type=positive, nargs="+", metavar="N")
    group.add_argument(
        "--preflight",
        action="store_true",
        help="read both configurations, say whether they can be compared, and measure nothing",
    )
    group.add_argument(
        "--no-null", action="store_true", help="leave out the null run of A against itself"
    )
    group.add_argument(
        "--cache",
        choices=("salt", "reset", "as is"),
        default="salt",
        help="how prefix caches are brought into one state: cache_salt, /reset_prefix_cache, not",
    )
    group.add_argument("--token-ids", metavar="LOW-HIGH", help="ordinary tokens, for made prompts")
    group.add_argument(
        "--workload", metavar="FILE", help="a Mooncake or Weka trace, or chats; docs/evaluate.md"
    )
    group.add_argument("--workload-format", choices=("mooncake", "weka", "chat"), help="if unclear")
    group.add_argument(
        "--agentic", action="store_true", help="a made set of 10 agents' sessions, by --seed"
    )
    group.add_argument("--sessions", type=positive, metavar="N", help="the workload's first ones")
    group.add_argument("--max-pause", type=float, metavar="S", help="cut pauses inside of sessions")
    group.add_argument(
        "--live-replies",
        action="store_true",
        help="turns follow a server's own replies instead of the recorded ones: no pairs, no ratio",
    )
    group.add_argument(
        "--own-times", action="store_true", help="open loop by the times of the workload"
    )
    group.add_argument("--speed", type=float, default=1.0, help="of the workload's own times")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request")
    group.add_argument(
        "--near-tie-nats",
        type=_nats,
        default=0.5,
        metavar="X",
        help="replies may part where two tokens are this close in ln p; auto: as close as the "
        "roundings of A move them, by its own prompt path",
    )
    for name, of in (("ttft", "first token"), ("tpot", "time per token"), ("e2e", "latency")):
        group.add_argument(
            f"--good-{name}-ms", type=float, metavar="MS", help=f"goodput: limit of the {of}"
        )

    group.add_argument(
        "--out",
        metavar="DIR",
        help="write report.html, report.md, comparison.json, requests.jsonl and exports to DIR",
    )
    group.add_argument(
        "--ratio",
        nargs=2,
        metavar=("ONE.json", "TWO.json"),
        help="the ratio of arm a of ONE and arm b of TWO; refused unless they are one comparison",
    )


def is_about_servers(args: argparse.Namespace) -> bool:
    """Raises InputError for flags of servers where there are none."""
    given = (args.url_a, args.url_b, args.ratio, args.recipe, args.task, args.explain)
    if args.serve or any(value is not None for value in given):
        return True
    alone = [name for name in _OF_SERVERS if getattr(args, name) not in (None, False)]
    if alone:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in alone)
        raise InputError(
            f"{flags}: only a comparison of servers has this; --serve starts one of each backend."
        )
    return False


def check_backends(args: argparse.Namespace) -> None:
    """Raises InputError for a setting that both arms would need and `auto` cannot have.

    Of backends in this process and of servers that are started for them.
    """
    if "auto" not in (args.arm_a, args.arm_b):
        return
    for name, plain in OF_GPU_PLANS.items():
        value = getattr(args, name)
        if value != plain:
            raise InputError(
                f"--{name.replace('_', '-')} {value}: auto cannot have it, and arms that are "
                "compared have the same settings; `kdecode bench layer --shape` times "
                "latency_specialized with it beside auto without it."
            )
