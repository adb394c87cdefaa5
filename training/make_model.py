"""Makes the shipped model from nothing: `python training/make_model.py all --work DIR`.

Each stage reads what the one before left in the working folder, and a training that was stopped
goes on from its last state. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from k3train import sizes
from k3train.corpus import Corpus, token_stream
from k3train.distil import Distillation
from k3train.draft import Draft
from k3train.export import export_draft, export_target, load_target
from k3train.ngram import NgramModel, bits_per_byte
from k3train.optimiser import Optimiser
from k3train.pretrain import SHORT_TOKENS, Batches, Pretraining
from k3train.run import Schedule, train
from k3train.target import Target
from k3train.vocabulary import train_vocabulary
from kdecode.config_draft import DraftConfig
from kdecode.model.tokenizer import Tokenizer, save_tokens

SEED = 0
# The target's rate is constant, then falls to nothing in a stage of its own. That one begins at an
# exported checkpoint, so that the two can be trained on different machines.
TARGET_STEPS, TARGET_RATE = 1000, 3e-3
ANNEAL_STEPS, ANNEAL_WARM_UP = 140, 10
DRAFT_STEPS, DRAFT_RATE = 620, 3e-3
DRAFT_SEQUENCES = 8


class Work:
    """The working folder: where each stage leaves what the next one reads."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        folder.mkdir(parents=True, exist_ok=True)
        self.figures_file = folder / "figures.json"

    def streams(self) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        """Training ids and held-out ids."""
        return np.load(self.folder / "train.npy"), np.load(self.folder / "held_out.npy")

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self.folder, sizes.TINY.vocab)

    def figures(self) -> dict[str, float | int | str]:
        if not self.figures_file.exists():
            return {}
        return dict(json.loads(self.figures_file.read_text(encoding="utf-8")))

    def add_figures(self, **figures: float | int | str) -> None:
        text = json.dumps(self.figures() | figures, indent=2, sort_keys=True) + "\n"
        self.figures_file.write_text(text, encoding="utf-8")

    def target(self, state_file: str) -> Target:
        """The target as a training left it."""
        target = Target(sizes.model_config(), SEED, device=self.device)
        state = torch.load(self.folder / state_file, weights_only=True, map_location="cpu")
        target.load(state["learner"])
        return target

    def export_target(self, state_file: str, name: str) -> None:
        """The target as a checkpoint in the released layout, with its tokenizer."""
        tokenizer = self.tokenizer()
        tokens = [tokenizer.token_bytes(rank) for rank in range(tokenizer.num_base)]
        state = {slot: tensor.cpu() for slot, tensor in self.target(state_file).state().items()}
        folder = self.folder / name
        export_target(folder, sizes.document(), state, tokens, sizes.generation())


def prepare(work: Work, minutes: float | None) -> bool:
    """Corpus, vocabulary, ids, and the 5-gram model's figure."""
    corpus = Corpus.read()
    save_tokens(work.folder, train_vocabulary(corpus.train, sizes.TINY.vocab))
    tokenizer = work.tokenizer()
    end = sizes.model_config().eos_id
    train_ids = token_stream(tokenizer, corpus.train, end)
    held_out = token_stream(tokenizer, corpus.held_out, end)
    np.save(work.folder / "train.npy", train_ids)
    np.save(work.folder / "held_out.npy", held_out)
    held_out_bytes = sum(len(text.encode()) for text in corpus.held_out)
    ngram = NgramModel(train_ids, sizes.TINY.vocab)
    work.add_figures(
        python=sys.version.split()[0],
        corpus_sha256=corpus.digest,
        train_files=len(corpus.train),
        train_bytes=sum(len(text.encode()) for text in corpus.train),
        train_tokens=len(train_ids),
        held_out_files=len(corpus.held_out),
        held_out_bytes=held_out_bytes,
        held_out_tokens=len(held_out),
        ngram_bits_per_byte=bits_per_byte(ngram.log_probabilities(held_out), held_out_bytes),
    )
    return True


def pretrain(work: Work, minutes: float | None) -> bool:
    """The target at a constant rate, and the checkpoint ``base``."""
    target = Target(sizes.model_config(), SEED, device=work.device)
    schedule = Schedule(TARGET_STEPS, TARGET_RATE, decay_share=0.0)
    if not _train_target(work, target, "target", SEED, schedule, minutes):
        return False
    work.export_target("target.pt", "base")
    return True


def anneal(work: Work, minutes: float | None) -> bool:
    """The target from ``base`` on, at a falling rate."""
    target = Target(sizes.model_config(), SEED, device=work.device)
    target.load(load_target(work.folder / "base"))
    schedule = Schedule(
        ANNEAL_STEPS, TARGET_RATE, warm_up=ANNEAL_WARM_UP, decay_share=1.0, held_out_every=70
    )
    return _train_target(work, target, "anneal", SEED + 2, schedule, minutes)


def _train_target(
    work: Work, target: Target, name: str, seed: int, schedule: Schedule, minutes: float | None
) -> bool:
    train_ids, held_out = work.streams()
    figures = work.figures()
    bytes_per_token = float(figures["held_out_bytes"]) / float(figures["held_out_tokens"])
    batches = Batches(work.tokenizer(), train_ids, seed)
    return train(
        Pretraining(target, batches, held_out, bytes_per_token),
        Optimiser(target.parameters),
        schedule,
        work.folder / f"{name}.pt",
        work.folder / f"{name}.jsonl",
        minutes=minutes,
    )


def distil(work: Work, minutes: float | None) -> bool:
    """The draft."""
    train_ids, held_out = work.streams()
    target = work.target("anneal.pt")
    for tensor in target.parameters.values():
        tensor.requires_grad_(False)
    config = DraftConfig.from_checkpoint(sizes.draft_document())
    draft = Draft(config, target.parameters["embed"], target.parameters["lm_head"], SEED)
    usable = len(held_out) // SHORT_TOKENS * SHORT_TOKENS
    rows = torch.from_numpy(held_out[:usable].astype(np.int64)).view(-1, SHORT_TOKENS)
    batches = Batches(work.tokenizer(), train_ids, SEED + 1)
    return train(
        Distillation(draft, target, batches, rows, DRAFT_SEQUENCES),
        Optimiser(draft.parameters),
        Schedule(DRAFT_STEPS, DRAFT_RATE),
        work.folder / "draft.pt",
        work.folder / "draft.jsonl",
        minutes=minutes,
    )


def export(work: Work, minutes: float | None) -> bool:
    """Both checkpoints in the released layout, in the folders ``model`` and ``draft``."""
    work.export_target("anneal.pt", "model")
    state = torch.load(work.folder / "draft.pt", weights_only=True, map_location="cpu")
    export_draft(work.folder / "draft", sizes.draft_document(), state["learner"])
    return True


STAGES = {
    "prepare": prepare,
    "target": pretrain,
    "anneal": anneal,
    "draft": distil,
    "export": export,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--work", type=Path, required=True, help="working folder")
    parser.add_argument("--minutes", type=float, help="end a training after so long")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--device", default="cpu", help="of both trainings: cpu or cuda")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    work = Work(args.work, args.device)
    for name, stage in STAGES.items():
        if args.stage in (name, "all") and not stage(work, args.minutes):
            print(f"{name}: stopped before its end; the same command goes on.")
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
