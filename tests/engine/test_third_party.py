"""Third party: the engine on either backend against the `transformers` Kimi-Linear class, in bf16.

One checkpoint directory, each side with its own loader, packing, caches and kernels; the router's
biases in it are so far apart that no rounding changes a choice of experts, so what is left is bf16
noise. The reference in fp64 says how much of it each side has. `tests/model` compares the reference
itself with `transformers`, in fp32 too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.engine.engine import LLM
from kdecode.kernels.contract import Tolerance
from kdecode.model import reference
from kdecode.model.reference import GOLD, RequestState
from kdecode.model.weights import CheckpointReader
from kdecode.testing.compare import assert_close, near_tie

PROMPT, DECODED = 40, 64
BIAS = "e_score_correction_bias"
# Logits deviate by about 2.5. Measured RMS-error ratios: 0.009 to 0.010 from gold for either of our
# backends, 0.011 to 0.012 for transformers, 0.013 to 0.015 between the sides.
BF16 = Tolerance(rtol=0.05, atol=0.4, rms_ratio=0.03)
# Neither engine backend may be noisier than transformers by more than this factor.
NOISE_FACTOR = 1.2
NEAR_TIE = 0.5


@pytest.fixture(scope="module", autouse=True)
def _no_network() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def settled(mini_linear_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with other router biases, everything else byte for byte the same numbers."""
    directory = tmp_path_factory.mktemp("settled") / "model"
    shutil.copytree(mini_linear_checkpoint, directory)
    generator = torch.Generator().manual_seed(1)
    shards = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in sorted({file for name, file in shards.items() if BIAS in name}):
        tensors = load_file(directory / shard)
        for name in sorted(name for name in tensors if BIAS in name):
            order = torch.randperm(len(tensors[name]), generator=generator)
            tensors[name] = (order * 4.0).to(tensors[name].dtype)
        save_file(tensors, directory / shard, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def ids(settled: Path) -> list[int]:
    vocab = ModelConfig.from_checkpoint(settled).vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab, (PROMPT + DECODED,), generator=generator).tolist()


@pytest.fixture(scope="module")
def gold(settled: Path, ids: list[int]) -> Tensor:
    """Logits of every position in fp64."""
    config = ModelConfig.from_checkpoint(settled)
    parameters = CheckpointReader(settled).load_model()
    state = RequestState.new(config, GOLD)
    return reference.forward(parameters, config, torch.tensor(ids), state, GOLD)


@pytest.fixture(scope="module")
def theirs(settled: Path, ids: list[int]) -> Tensor:
    """Their logits in bf16: the prompt in one forward, then each token with their cache."""
    from transformers import KimiLinearForCausalLM

    loader: Any = KimiLinearForCausalLM
    model, info = loader.from_pretrained(
        settled, dtype=torch.bfloat16, local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    logits, cache, tokens = [], None, torch.tensor(ids)
    with torch.no_grad():
        for part in (tokens[:PROMPT], *torch.split(tokens[PROMPT:], 1)):
            out = model.eval()(part.unsqueeze(0), cache=cache, use_cache=True)
            logits.append(out.logits[0].float())
            cache = out.cache
    return torch.cat(logits)


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_logits_of_prompt_and_decoded_tokens(
    backend: str, settled: Path, ids: list[int], gold: Tensor, theirs: Tensor
) -> None:
    llm = LLM(settled, decode_backend=backend, num_threads=1, max_context_tokens=256)
    # The engine gives logits from the prompt's end on. Positions inside the prompt are prompts that
    # end there: the first token alone, an odd one, and all but the last.
    inside = [llm.teacher_forced(ids[:end], ids[end : end + 1])[0] for end in (1, 17, PROMPT - 1)]
    # What follows the last token is asked for, too: any token stands in for the next one.
    decoded = llm.teacher_forced(ids[:PROMPT], [*ids[PROMPT:], 0])
    is_auto = backend == "auto"
    path = ("standard", "decode_backend is auto") if is_auto else ("specialized", "")
    counts = {(entry["path"], entry["reason"]) for entry in llm.stats()["decode_steps"]}
    assert counts == {path}
    prompt_rows, decoded_rows = [0, 16, PROMPT - 2, PROMPT - 1], slice(PROMPT, None)
    parts = {
        "prompt": (torch.stack([*inside, decoded[0]]), prompt_rows),
        "decoded": (decoded[1:], decoded_rows),
    }
    for name, (ours, rows) in parts.items():
        ours_error = assert_close(ours, gold[rows], BF16, f"{name}, {backend}").rms_ratio
        their_error = assert_close(theirs[rows], gold[rows], BF16, f"{name}, theirs").rms_ratio
        between = assert_close(ours, theirs[rows], BF16, f"{name}, between").rms_ratio
        assert ours_error <= NOISE_FACTOR * their_error, name
        assert between <= NOISE_FACTOR * (ours_error**2 + their_error**2) ** 0.5, name
        for our_row, their_row in zip(ours, theirs[rows], strict=True):
            near_tie(their_row, int(our_row.argmax()), NEAR_TIE)
