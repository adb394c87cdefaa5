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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity")
# What the programs say of how they ran; which of them there are depends on the program.
_SETTINGS = (
    *("backends", "n_threads", "n_threads_batch", "n_batch", "n_ubatch", "flash_attn"),
    *("type_k", "type_v", "repack"),
)
# Runs of `llama-batched-bench` until one has printed something; of 20, 9 had not.
_PRINT_TRIES = 8
# A saved log-probability is no more than this below the largest of its position: thousands of
# unlikely tokens are all there at this floor, and would together pass for 3e-3 nats of difference.
FLOOR_NATS = 16.0


class PeerError(RuntimeError):
    """A peer that is not there, or whose program failed; the message has its last lines."""


@dataclass(frozen=True)
class LlamaSpeed:
    """Of one run. settings: that it had, as its program prints them."""

    tokens_per_second: float
    settings: Mapping[str, Any]


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
    ) -> LlamaSpeed:
        """Of decoding ``rows`` requests together, after a context of their own."""
        if rows == 1:
            command = [*self._bench_once(model, threads), "-p", "0", "-n", str(output_tokens)]
            return bench_speed(_run([*command, "-d", str(context_tokens)]))
        total = rows * (context_tokens + output_tokens)
        command = [self.batched_bench, "-m", str(model), "-npp", str(context_tokens)]
        command += ["-ntg", str(output_tokens), "-npl", str(rows), "-c", str(total)]
        command += ["-t", str(threads), "-tb", str(threads), "--output-format", "jsonl"]
        return batched_speed(_run_until_printed(command))

    def prompt_speed(self, model: Path, threads: int, prompt_tokens: int) -> LlamaSpeed:
        """Of the prompt of one request, up to the logits behind its last token."""
        command = [*self._bench_once(model, threads), "-p", str(prompt_tokens), "-n", "0"]
        return bench_speed(_run(command), is_prompt=True)

    def _bench_once(self, model: Path, threads: int) -> list[str]:
        """One timed run, after the one that `llama-bench` throws away."""
        command = [self.bench, "-m", str(model), "-r", "1", "-o", "json"]
        return [*command, "-t", str(threads)]

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


def bench_speed(output: str, *, is_prompt: bool = False) -> LlamaSpeed:
    """Of the prompt or of decoding, from the JSON that `llama-bench` prints."""
    own, other = ("n_prompt", "n_gen") if is_prompt else ("n_gen", "n_prompt")
    try:
        entries = json.loads(output)
        entry = next(e for e in entries if e.get(own, 0) > 0 and not e.get(other, 0))
        return LlamaSpeed(float(entry["avg_ts"]), _settings(entry))
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise PeerError(f"llama-bench printed no speed: {output[-300:]!r}") from error


def batched_speed(output: str) -> LlamaSpeed:
    """Of decoding all rows, from the JSON lines of `llama-batched-bench`."""
    for line in output.splitlines():
        if line.startswith("{") and "speed_tg" in line:
            entry = json.loads(line)
            return LlamaSpeed(float(entry["speed_tg"]), _settings(entry))
    raise PeerError(f"llama-batched-bench printed no speed: {output[-300:]!r}")


def _settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in _SETTINGS if name in entry}


def _run(command: Sequence[str]) -> str:
    """Standard output of a program that succeeds."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise PeerError(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return done.stdout


def _run_until_printed(command: Sequence[str]) -> str:
    """As `_run`, of a program whose end races the thread that prints: it loses lines, often all."""
    output = ""
    for _ in range(_PRINT_TRIES):
        output = _run(command)
        if output.strip():
            break
    return output


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
