"""What every peer is given and measured against: GGUF files of a checkpoint, and its reference.

Owns when a file is made and where it lies, and the next-token distributions that every arm's are
compared with. How a file is written is `model.gguf_export`'s business.
"""

from __future__ import annotations

import argparse
import random
import string
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kdecode.commands.common import ProgressBar
from kdecode.config import DecodeBackend, EngineConfig, ModelConfig

if TYPE_CHECKING:
    import numpy as np

    from kdecode.bench.llama_cpp import LlamaCpp
    from kdecode.bench.peers import Divergence
    from kdecode.engine.engine import LLM

# The peers of `kdecode bench peers`; the first one is the default.
PEERS = ("llama.cpp", "llama.cpp-q8_0", "llama.cpp-q4_0", "transformers")
# The backend that is asked about comes first, so that ratios are of it.
BACKENDS: tuple[DecodeBackend, ...] = ("latency_specialized", "auto")
# Routed experts that are MXFP4 in the checkpoint stay so in a quantised file.
_KEEP_EXPERTS = ("ffn_(gate|up|down)_exps=mxfp4",)


class Files:
    """The GGUF files of one checkpoint, each made when it is first asked for."""

    def __init__(self, directory: Path, folder: Path, llama: LlamaCpp | None, names: list[str]):
        from kdecode.engine.worker import weights_digest

        self.directory, self.llama, self.names = directory, llama, names
        self.config = ModelConfig.from_checkpoint(directory)
        self._folder, self.digest = folder, weights_digest(directory)

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

        found = self._folder / f"{self.digest}-{kind}.gguf"
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


def file_kind(peer: str) -> str:
    """Of the file that a peer reads, as `Files.path` has it."""
    return peer.partition("-")[2] or "released"


def backends(args: argparse.Namespace) -> Sequence[DecodeBackend]:
    """Ours; of those that were not named, the ones that have the trunk that is asked for."""
    own = BACKENDS if args.trunk_format == "bf16" else BACKENDS[:1]
    return args.decode_backend or own
