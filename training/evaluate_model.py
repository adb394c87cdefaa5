"""Figures and pictures of the model card: `python training/evaluate_model.py --work DIR`.

Needs the stages of make_model.py done in DIR. Writes DIR/evaluation.json and DIR/plots. The
checkpoints that are evaluated are the exported ones, through the package's engine; only the
calibration and the figure of the whole held-out text use the training's own forward pass, because
they look at hundreds of thousands of tokens.
"""

from __future__ import annotations

import argparse
import io
import json
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k3train import plots, sizes
from k3train.distil import NUM_DRAFTS
from k3train.draft import Draft
from k3train.ngram import NgramModel, bits_per_byte
from k3train.pretrain import SHORT_TOKENS, cross_entropy
from kdecode.config_draft import DraftConfig
from kdecode.config_speculative import RejectionSampleMethod, SpeculativeConfig
from kdecode.engine.engine import LLM
from kdecode.engine.request import SamplingParams
from kdecode.eval.needles import find, make_items
from kdecode.eval.text import score_text
from make_model import SEED, Work

BACKENDS = ("auto", "latency_specialized")
DECODED_TOKENS, WINDOW_TOKENS = 8192, 512
NEEDLE_DISTANCES, NEEDLE_ITEMS = (500, 2000), 25
PROMPTS, PROMPT_TOKENS, REPLY_TOKENS = 24, 192, 128
# Name, temperature, verification.
ACCEPTANCE_ARMS: tuple[tuple[str, float, RejectionSampleMethod], ...] = (
    ("greedy", 0.0, "standard"),
    ("temperature 1", 1.0, "standard"),
    ("temperature 1, block", 1.0, "block"),
)
# An fp8 cache has no scale of its own in these checkpoints.
FP8_SCALE = 1.0
CALIBRATION_BINS = 10


def held_out_parts(held_out: NDArray[np.uint16], count: int, tokens: int) -> list[list[int]]:
    """Evenly spread excerpts."""
    starts = np.linspace(0, len(held_out) - tokens, count).astype(int)
    return [held_out[start : start + tokens].tolist() for start in starts]


@torch.no_grad()
def whole_held_out(work: Work, held_out: NDArray[np.uint16], num_bytes: int) -> float:
    """Bits per byte of all held-out text, in windows, by the training's forward pass."""
    target = work.target("anneal.pt")
    usable = (len(held_out) - 1) // SHORT_TOKENS * SHORT_TOKENS
    ids = torch.from_numpy(held_out[: usable + 1].astype(np.int64))
    nats = 0.0
    pairs = zip(ids[:-1].view(-1, SHORT_TOKENS), ids[1:].view(-1, SHORT_TOKENS), strict=True)
    for inputs, wanted in pairs:
        logits = target(inputs.unsqueeze(0).to(work.device)).logits()
        nats += float(cross_entropy(logits, wanted.unsqueeze(0).to(work.device))) * SHORT_TOKENS
    return nats / np.log(2) / (num_bytes * usable / len(held_out))


def decoded(work: Work, held_out: NDArray[np.uint16]) -> dict[str, Any]:
    """Bits per byte by backend and cache, and needles by backend, through decode steps."""
    ids = held_out[:DECODED_TOKENS].tolist()
    result: dict[str, Any] = {}
    for backend in BACKENDS:
        for dtype in ("bf16", "fp8"):
            llm = LLM(
                work.folder / "model",
                decode_backend=backend,
                cache_dtype=dtype,
                cache_scale=FP8_SCALE if dtype == "fp8" else None,
                max_context_tokens=8192,
            )
            score = score_text(llm, ids, WINDOW_TOKENS)
            entry = {"bits_per_byte": score.bits_per_byte, "perplexity": score.perplexity}
            entry |= {"tokens": score.num_tokens, "bytes": score.num_bytes}
            stream = held_out.tolist()
            for distance in NEEDLE_DISTANCES:
                items = make_items(llm.tokenizer, stream, distance, NEEDLE_ITEMS, seed=0)
                entry[f"needles_{distance}"] = sum(find(llm, items))
            result[f"{backend}, {dtype}"] = entry
    return result


def acceptance(work: Work, held_out: NDArray[np.uint16]) -> dict[str, Any]:
    """Of real rounds after held-out text, greedy and at temperature 1, by place."""
    prompts = held_out_parts(held_out, PROMPTS, PROMPT_TOKENS)
    result = {}
    for name, temperature, method in ACCEPTANCE_ARMS:
        speculative = SpeculativeConfig(
            model=str(work.folder / "draft"),
            num_speculative_tokens=NUM_DRAFTS,
            draft_sample_method="greedy" if temperature == 0 else "probabilistic",
            rejection_sample_method=method,
        )
        llm = LLM(
            work.folder / "model",
            decode_backend="latency_specialized",
            speculative=speculative,
        )
        params = SamplingParams(
            max_tokens=REPLY_TOKENS, temperature=temperature, ignore_eos=True, seed=0
        )
        llm.generate(prompts, params)
        figures = llm.stats()["speculation"]
        names = ("rounds", "acceptance_length", "acceptance_rate", "rate_by_place")
        result[name] = {key: figures[key] for key in names}
    return result


@torch.no_grad()
def calibration(work: Work, held_out: NDArray[np.uint16]) -> list[dict[str, float]]:
    """Confidence against the probability that verification at temperature 1 accepts, in bins."""
    target = work.target("anneal.pt")
    config = DraftConfig.from_checkpoint(sizes.draft_document())
    draft = Draft(config, target.parameters["embed"], target.parameters["lm_head"], SEED)
    state = torch.load(work.folder / "draft.pt", weights_only=True, map_location="cpu")
    draft.load(state["learner"])
    confidences: list[Tensor] = []
    accepted: list[Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for part in held_out_parts(held_out, 32, SHORT_TOKENS):
        ids = torch.tensor([part], device=work.device)
        anchors = torch.randint(1, SHORT_TOKENS - NUM_DRAFTS, (1, 32), generator=generator)
        anchors = anchors.to(work.device)
        seen = target(ids, taps=config.taps)
        places = anchors.unsqueeze(-1) + torch.arange(NUM_DRAFTS, device=work.device)
        wanted = seen.logits(seen.hidden[0, places.flatten()]).float().softmax(-1)
        taps = torch.stack([seen.taps[layer] for layer in config.taps], dim=2)
        rounds = draft(taps, ids, anchors, NUM_DRAFTS)
        drafts = rounds.logits.float().softmax(-1).flatten(0, -2)
        accepted.append(torch.minimum(wanted, drafts).sum(-1).cpu())
        confidences.append(rounds.confidence.float().sigmoid().flatten().cpu())
    said, found = torch.cat(confidences), torch.cat(accepted)
    bins = (said * CALIBRATION_BINS).long().clamp_max(CALIBRATION_BINS - 1)
    return [
        {
            "confidence": float(said[bins == place].mean()),
            "accepted": float(found[bins == place].mean()),
            "share": float((bins == place).float().mean()),
        }
        for place in range(CALIBRATION_BINS)
        if (bins == place).any()
    ]


def samples(work: Work, held_out: NDArray[np.uint16]) -> list[dict[str, Any]]:
    """Replies as they are, and whether Python's tokenizer reads each to its last whole line."""
    llm = LLM(work.folder / "model")
    prompts = ["def read_file(path):\n", "class Stack:\n", "import os\n\ndef main(argv):\n"]
    result = []
    for prompt, temperature in ((prompt, t) for prompt in prompts for t in (0.0, 0.7)):
        params = SamplingParams(max_tokens=160, temperature=temperature, top_p=0.95, seed=0)
        (reply,) = llm.generate([prompt], params)
        text = prompt + reply.text
        result.append({"temperature": temperature, "text": text, "tokenizes": tokenizes(text)})
    return result


def tokenizes(text: str) -> bool:
    """Whether the whole lines of a text are tokens of Python; an open block at the end is fine."""
    lines = io.StringIO(text[: text.rfind("\n") + 1])
    try:
        kinds = {token.type for token in tokenize.generate_tokens(lines.readline)}
    except tokenize.TokenError as error:
        # The reply was cut inside of a bracket or of a string of several lines.
        return str(error.args[0]).startswith("EOF in multi-line")
    except (IndentationError, SyntaxError):
        return False
    # How Python 3.11 says that a string has no end.
    return tokenize.ERRORTOKEN not in kinds


def read_log(*paths: Path) -> list[dict[str, Any]]:
    """Entries of trainings that followed one another, in steps since the first began.

    What was repeated after a stop is in once, as it was done last.
    """
    entries: list[dict[str, Any]] = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        by_step = {entry["step"]: entry for entry in map(json.loads, lines)}
        begin = len(entries)
        entries += [by_step[step] | {"step": begin + step} for step in sorted(by_step)]
    return entries


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args(argv)
    work = Work(args.work, "cpu")
    train_ids, held_out = work.streams()
    figures = work.figures()
    ngram = NgramModel(train_ids, sizes.TINY.vocab)
    first = held_out[:DECODED_TOKENS]
    evaluation: dict[str, Any] = {"decoded": decoded(work, held_out)}
    num_bytes = evaluation["decoded"]["auto, bf16"]["bytes"]
    evaluation["ngram"] = {
        "whole": figures["ngram_bits_per_byte"],
        "decoded_part": bits_per_byte(ngram.log_probabilities(first), num_bytes),
    }
    whole = whole_held_out(work, held_out, int(figures["held_out_bytes"]))
    evaluation |= {
        "whole_held_out_bits_per_byte": whole,
        "acceptance": acceptance(work, held_out),
        "calibration": calibration(work, held_out),
        "samples": samples(work, held_out),
    }
    text = json.dumps(evaluation, indent=2) + "\n"
    (work.folder / "evaluation.json").write_text(text, encoding="utf-8")
    folder = work.folder / "plots"
    folder.mkdir(exist_ok=True)
    log = read_log(work.folder / "target.jsonl", work.folder / "anneal.jsonl")
    plots.losses(log, evaluation, folder / "loss.svg")
    plots.draft(read_log(work.folder / "draft.jsonl"), folder / "draft.svg")
    plots.acceptance(evaluation["acceptance"], folder / "acceptance.svg")
    plots.calibration(evaluation["calibration"], folder / "calibration.svg")
    print(text)


if __name__ == "__main__":
    main()
