"""The arms of `kdecode bench peers`: our engine, llama.cpp, `transformers`.

Owns how one run of each is timed. Of decoding: tokens after every request has its first one, over
the time that they took, so prefill is in none of them. Of a prompt: its tokens over the time until
the first one of the reply is known. Every arm has the same number of requests of the same length,
and the same number of threads. The tokens are random; a speed does not depend on them but for the
experts they choose.
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

from kdecode.bench.decode_speed import Window, decode_window
from kdecode.bench.llama_cpp import LlamaCpp, LlamaSpeed, PeerError
from kdecode.config import OF_GPU_PLANS
from kdecode.engine.engine import LLM
from kdecode.engine.request import Output, SamplingParams

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
# Of our settings, what an arm on a GPU names in the place of threads and instructions.
_OF_A_GPU = ("gpu_kernels", *OF_GPU_PLANS)
# What the products of a trunk in whole numbers take x as.
_INTEGER_INPUTS = {"int8": "whole numbers of 16 bits", "int4": "bf16"}


@dataclass(frozen=True)
class Work:
    """What every arm runs, once a run. Of a prompt only rows 1 and context_tokens count."""

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
        trunk, versions = config["trunk_format"], config["versions"]
        self.name = f"kdecode {config['decode_backend']}" + ("" if trunk == "bf16" else f" {trunk}")
        self.version = f"kdecode {versions['kdecode']}, torch {versions['torch']}"
        self.keeps_weights = not config["weights_differ_from_checkpoint"]
        self.precision = _our_precision(llm)
        self.settings: Mapping[str, Any] = own_settings(config)

    def tokens_per_second(self) -> float:
        window = self.decoded()
        return window.tokens / window.seconds

    def decoded(self) -> Window:
        """The part of a run in which every request decodes."""
        return decode_window([output.timing.token_ns for output in self._generate()])

    def _generate(self) -> list[Output]:
        prompts = self._work.prompts(self._llm.tokenizer.num_base)
        params = SamplingParams(max_tokens=self._work.output_tokens, ignore_eos=True)
        return self._llm.generate(prompts, params)


class KdecodePromptArm(KdecodeArm):
    """One of our backends on a prompt: from the request to its first token, with nothing left out.

    That is taking it in, the steps of the prefill, and choosing the token.
    """

    def tokens_per_second(self) -> float:
        (output,) = self._generate()
        timing = output.timing
        return self._work.context_tokens * 1e9 / (timing.token_ns[0] - timing.start_ns)


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
        # As the last run had them.
        self.settings: Mapping[str, Any] = {}
        self._llama, self._work = llama, work

    def tokens_per_second(self) -> float:
        speed = self._speed()
        self.settings = speed.settings
        return speed.tokens_per_second

    def _speed(self) -> LlamaSpeed:
        work = self._work
        return self._llama.decode_speed(
            self.model, work.threads, work.rows, work.context_tokens, work.output_tokens
        )


class LlamaCppPromptArm(LlamaCppArm):
    """llama.cpp on a prompt of one request."""

    def _speed(self) -> LlamaSpeed:
        work = self._work
        return self._llama.prompt_speed(self.model, work.threads, work.context_tokens)


def load_transformers(directory: Path) -> Any:
    """The `transformers` package's own class, in bf16. Raises PeerError where there is none."""
    try:
        from transformers import KimiLinearForCausalLM
    except ImportError as error:
        raise PeerError(f"transformers is not installed, or has no Kimi-Linear: {error}") from error
    import torch

    loader: Any = KimiLinearForCausalLM
    return loader.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True).eval()


class TransformersArm:
    """A model of `load_transformers`, eager."""

    def __init__(self, model: Any, vocab: int, work: Work) -> None:
        import torch

        self._model, self._work, self._vocab = model, work, vocab
        self.name = "transformers, eager"
        self.version = f"transformers {metadata.version('transformers')}, torch {torch.__version__}"
        self.keeps_weights = True
        self.settings: Mapping[str, Any] = {"device": "cpu", "threads": work.threads}
        self.precision = {
            "embedding": "bf16",
            "output matrix": "bf16 x bf16",
            "router": "bf16, scores fp32",
            "routed experts": "bf16 x bf16",
            TRUNK: "bf16 x bf16",
            "norms, convolutions, biases": "bf16",
            "convolution windows": "bf16",
            "recurrent state": "fp32",
            "latent cache": "bf16",
        }

    def tokens_per_second(self) -> float:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self._work.threads)
        try:
            with torch.no_grad():
                return self._run(torch.tensor(self._work.prompts(self._vocab)))
        finally:
            torch.set_num_threads(before)

    def _run(self, ids: Any) -> float:
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        steps = self._work.output_tokens - 1
        begin = time.perf_counter()
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            out = self._model(token, cache=out.cache, use_cache=True)
        return steps * self._work.rows / (time.perf_counter() - begin)


class TransformersPromptArm(TransformersArm):
    """The same on a prompt, up to the choice of its first token."""

    def _run(self, ids: Any) -> float:
        begin = time.perf_counter()
        self._model(ids, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        return self._work.context_tokens / (time.perf_counter() - begin)


def own_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of `LLM.resolved_config`, what a report names."""
    trunk = config["trunk_format"]
    is_packed = config["decode_backend"] == "latency_specialized" and trunk == "bf16"
    packing = {"lossless packing": config["lossless_packing"]} if is_packed else {}
    names = ("threads", "isa") if config["device"] == "cpu" else _OF_A_GPU
    return {
        "device": config["device"],
        **{name.replace("_", " "): config[name] for name in names},
        "trunk": trunk,
        **packing,
        "pages of": config["cache"]["page_tokens"],
        "steps of at most": config["max_step_tokens"],
        "prefix caching": config["prefix_caching"],
    }


def _our_precision(llm: LLM) -> dict[str, str]:
    config = llm.resolved_config()
    is_specialized = config["decode_backend"] == "latency_specialized"
    packs = is_specialized and config["lossless_packing"] != "off"
    trunk = "bf16 x bf16" + (", packed without loss where that is faster" if packs else "")
    experts = "MXFP4 x bf16" if llm.model_config.moe.expert_format == "mxfp4" else trunk
    if config["weights_differ_from_checkpoint"]:
        kind = config["trunk_format"]
        trunk = f"{kind} with a bf16 scale for 32, x {_INTEGER_INPUTS[kind]}"
        experts = experts if experts.startswith("MXFP4") else trunk
    return {
        "embedding": "bf16",
        "output matrix": trunk,
        "router": "bf16 x bf16, scores fp32",
        "routed experts": experts,
        TRUNK: trunk,
        "norms, convolutions, biases": "fp32",
        "convolution windows": "bf16",
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
    more = {"convolution windows": "F32", "recurrent state": "F32", "latent cache": "F16"}
    return {**precision, **more}
