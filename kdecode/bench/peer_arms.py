"""The arms of `kdecode bench peers`: our engine, llama.cpp, `transformers`.

Owns how one run of each is timed: tokens after every request has its first one, over the time that
they took, so prefill is in none of them. Every arm decodes the same number of requests at the same
context length, with the same number of threads. The tokens are random; a speed does not depend on
them but for the experts they choose.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kdecode.bench.decode_speed import decode_window
from kdecode.bench.llama_cpp import LlamaCpp, PeerError
from kdecode.engine.engine import LLM
from kdecode.engine.request import SamplingParams

# What ggml multiplies a weight type with: the input is converted to this first.
_GGML_INPUTS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
# Class of tensor -> what the names of its tensors have; the rest is the trunk.
_GGML_CLASSES = {
    "embedding": r"^token_embd\.",
    "output matrix": r"^output\.weight",
    "router": r"ffn_gate_inp\.",
    "routed experts": r"_exps\.",
    "norms, convolutions, biases": r"norm|conv1d|bias|_res_score|ssm_a$",
}
TRUNK = "projections, dense and shared MLP"


@dataclass(frozen=True)
class Work:
    """What every arm runs, once a run."""

    rows: int
    context_tokens: int
    output_tokens: int
    threads: int

    def prompts(self, vocab: int) -> list[list[int]]:
        source = random.Random(0)
        return [
            [source.randrange(vocab) for _ in range(self.context_tokens)] for _ in range(self.rows)
        ]


class KdecodeArm:
    """One of our backends."""

    def __init__(self, llm: LLM, work: Work) -> None:
        self._llm, self._work = llm, work
        config = llm.resolved_config()
        trunk = config["trunk_format"]
        self.name = f"kdecode {config['decode_backend']}" + ("" if trunk == "bf16" else f" {trunk}")
        self.version = f"kdecode {config['versions']['kdecode']}, {config['isa']}"
        self.keeps_weights = not config["weights_differ_from_checkpoint"]
        self.precision = _our_precision(llm)

    def tokens_per_second(self) -> float:
        prompts = self._work.prompts(self._llm.tokenizer.num_base)
        params = SamplingParams(max_tokens=self._work.output_tokens, ignore_eos=True)
        outputs = self._llm.generate(prompts, params)
        window = decode_window([output.timing.token_ns for output in outputs])
        return window.tokens / window.seconds


class LlamaCppArm:
    """llama.cpp on one GGUF file. types: of its tensors, as `gguf_export.tensor_types` has them."""

    def __init__(
        self,
        name: str,
        llama: LlamaCpp,
        model: Path,
        types: Mapping[str, tuple[str, int]],
        work: Work,
        *,
        keeps_weights: bool,
    ) -> None:
        self.name, self.model = name, model
        self.version = llama.version()
        self.keeps_weights = keeps_weights
        self.precision = ggml_precision(types)
        self._llama, self._work = llama, work

    def tokens_per_second(self) -> float:
        work = self._work
        return self._llama.decode_speed(
            self.model, work.threads, work.rows, work.context_tokens, work.output_tokens
        )


class TransformersArm:
    """The `transformers` package's own class, eager, bf16. Raises PeerError where there is none."""

    def __init__(self, directory: Path, vocab: int, work: Work) -> None:
        try:
            from transformers import KimiLinearForCausalLM
        except ImportError as error:
            raise PeerError(f"transformers is not installed, or has no Kimi-Linear: {error}") from (
                error
            )
        import torch

        loader: Any = KimiLinearForCausalLM
        self._model = loader.from_pretrained(
            directory, dtype=torch.bfloat16, local_files_only=True
        ).eval()
        self._work, self._vocab = work, vocab
        self.name = "transformers, eager"
        self.version = f"transformers {metadata.version('transformers')}, torch {torch.__version__}"
        self.keeps_weights = True
        self.precision = {
            "embedding": "bf16",
            "output matrix": "bf16 x bf16",
            "router": "bf16, scores fp32",
            "routed experts": "bf16 x bf16",
            TRUNK: "bf16 x bf16",
            "norms, convolutions, biases": "bf16",
            "recurrent state": "fp32",
            "latent cache": "bf16",
        }

    def tokens_per_second(self) -> float:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self._work.threads)
        try:
            with torch.no_grad():
                return self._decode(torch.tensor(self._work.prompts(self._vocab)))
        finally:
            torch.set_num_threads(before)

    def _decode(self, ids: Any) -> float:
        out = self._model(ids, use_cache=True)
        steps = self._work.output_tokens - 1
        begin = time.perf_counter()
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            out = self._model(token, cache=out.cache, use_cache=True)
        return steps * self._work.rows / (time.perf_counter() - begin)


def _our_precision(llm: LLM) -> dict[str, str]:
    config = llm.resolved_config()
    is_specialized = config["decode_backend"] == "latency_specialized"
    packs = is_specialized and config["lossless_packing"] != "off"
    trunk = "bf16 x bf16" + (", packed without loss where that is faster" if packs else "")
    experts = "MXFP4 x bf16" if llm.model_config.moe.expert_format == "mxfp4" else trunk
    if config["weights_differ_from_checkpoint"]:
        trunk = f"{config['trunk_format']} with a bf16 scale for 32, x bf16"
        experts = experts if experts.startswith("MXFP4") else trunk
    return {
        "embedding": "bf16",
        "output matrix": trunk,
        "router": "bf16 x bf16, scores fp32",
        "routed experts": experts,
        TRUNK: trunk,
        "norms, convolutions, biases": "fp32",
        "recurrent state": "fp32",
        "latent cache": config["cache"]["dtype"],
    }


def ggml_precision(types: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """The types of each class of tensor in a GGUF file, and what their inputs are converted to."""
    found: dict[str, set[str]] = {}
    for name, (kind, _) in types.items():
        classes = (label for label, mark in _GGML_CLASSES.items() if re.search(mark, name))
        found.setdefault(next(classes, TRUNK), set()).add(kind)
    precision = {}
    for label, kinds in found.items():
        if label in ("embedding", "norms, convolutions, biases"):
            precision[label] = ", ".join(sorted(kinds))
        else:
            # Block formats multiply with an input in 8-bit blocks.
            precision[label] = ", ".join(
                f"{kind} x {_GGML_INPUTS.get(kind, 'int8')}" for kind in sorted(kinds)
            )
    return {**precision, "recurrent state": "F32", "latent cache": "F16"}
