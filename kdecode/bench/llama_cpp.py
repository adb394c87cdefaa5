"""llama.cpp as a peer: its own programs, run as a user would run them.

Owns finding the programs on the PATH, their arguments and what their output means. They are never a
dependency. Does not know our engine, nor how its files are made. Speeds are llama.cpp's own figures
(`llama-bench`, `llama-batched-bench`); log-probabilities are what `llama-perplexity` saves.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity")
# A saved log-probability is no more than this below the largest of its position: thousands of
# unlikely tokens are all there at this floor, and would together pass for 3e-3 nats of difference.
FLOOR_NATS = 16.0


class PeerError(RuntimeError):
    """A peer that is not there, or whose program failed; the message has its last lines."""


@dataclass(frozen=True)
class LlamaCpp:
    """The programs of one installation."""

    bench: str
    batched_bench: str
    quantize: str
    perplexity: str

    @classmethod
    def find(cls) -> LlamaCpp:
        """Raises PeerError with the programs that the PATH does not have."""
        found = [shutil.which(name) for name in PROGRAMS]
        missing = [name for name, path in zip(PROGRAMS, found, strict=True) if path is None]
        if missing:
            raise PeerError(f"llama.cpp is not on the PATH: {', '.join(missing)} not found.")
        return cls(*(path for path in found if path is not None))

    def version(self) -> str:
        """As its programs say it, e.g. "llama.cpp 11434 (1a2b3c4)"."""
        done = subprocess.run([self.perplexity, "--version"], capture_output=True, text=True)
        found = re.search(r"version:\s*(.+)", done.stdout + done.stderr)
        return f"llama.cpp {found.group(1).strip()}" if found else "llama.cpp, version unknown"

    def convert(self, source: Path, target: Path, kind: str, keep: Sequence[str] = ()) -> None:
        """Quantises a file to ``kind`` ("q8_0") by its own rules. keep: "pattern=type"."""
        kept = [word for entry in keep for word in ("--tensor-type", entry)]
        _run([self.quantize, *kept, str(source), str(target), kind])

    def decode_speed(
        self, model: Path, threads: int, rows: int, context_tokens: int, output_tokens: int
    ) -> float:
        """Tokens a second of decoding ``rows`` requests together, after a context of their own."""
        if rows == 1:
            command = [self.bench, "-m", str(model), "-p", "0", "-r", "1", "-o", "json"]
            command += ["-n", str(output_tokens), "-d", str(context_tokens), "-t", str(threads)]
            return bench_speed(_run(command))
        total = rows * (context_tokens + output_tokens)
        command = [self.batched_bench, "-m", str(model), "-npp", str(context_tokens)]
        command += ["-ntg", str(output_tokens), "-npl", str(rows), "-c", str(total)]
        command += ["-t", str(threads), "-tb", str(threads), "--output-format", "jsonl"]
        return batched_speed(_run(command))

    def log_probabilities(
        self, model: Path, threads: int, context_tokens: int, text: Path
    ) -> tuple[list[int], np.ndarray]:
        """The tokens of one chunk of a text, and log softmax after each of its second half's.

        fp32 [context_tokens - 1 - context_tokens // 2, vocab]: line i follows token
        context_tokens // 2 + i. Needs a text of twice as many tokens.
        """
        with tempfile.TemporaryDirectory(prefix="kdecode-logits-") as folder:
            target = Path(folder) / "logits"
            command = [self.perplexity, "-m", str(model), "-f", str(text), "--chunks", "1"]
            command += ["-c", str(context_tokens), "-b", str(context_tokens)]
            command += ["-t", str(threads), "-tb", str(threads), "-fa", "off"]
            # Latents are kept in F32, like everything else of an F32 file.
            command += ["-ctk", "f32", "-ctv", "f32", "--save-all-logits", str(target)]
            _run(command)
            return read_logits(target.read_bytes())


def bench_speed(output: str) -> float:
    """Tokens a second, from the JSON that `llama-bench` prints."""
    try:
        entries = json.loads(output)
        return float(next(e["avg_ts"] for e in entries if e["n_gen"] > 0))
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise PeerError(f"llama-bench printed no speed: {output[-300:]!r}") from error


def batched_speed(output: str) -> float:
    """Tokens a second of all rows, from the JSON lines of `llama-batched-bench`."""
    for line in output.splitlines():
        if line.startswith("{") and "speed_tg" in line:
            return float(json.loads(line)["speed_tg"])
    raise PeerError(f"llama-batched-bench printed no speed: {output[-300:]!r}")


def _run(command: Sequence[str]) -> str:
    """Standard output of a program that succeeds."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise PeerError(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return done.stdout


def read_logits(data: bytes) -> tuple[list[int], np.ndarray]:
    """A file of `llama-perplexity --save-all-logits` with one chunk.

    Log-probabilities are there in 16 bits between the lowest and the highest of their position, and
    none is more than FLOOR_NATS below the highest.
    """
    head = np.frombuffer(data, np.int32, 3, offset=8) if data[:8] == b"_logits_" else []
    if len(head) < 3 or head[2] != 1:
        raise PeerError("llama-perplexity wrote no file of logits of one chunk.")
    context, vocab = int(head[0]), int(head[1])
    tokens = np.frombuffer(data, np.int32, context, offset=20)
    width = 4 + 2 * ((vocab + 1) // 2)
    lines = np.frombuffer(data, np.uint16, offset=20 + 4 * context).reshape(-1, width)
    scale_and_lowest = np.ascontiguousarray(lines[:, :4]).view(np.float32)
    values = lines[:, 4 : 4 + vocab] * scale_and_lowest[:, :1] + scale_and_lowest[:, 1:]
    return tokens.tolist(), values
