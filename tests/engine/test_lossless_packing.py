"""An engine with 12-bit weights says, bit by bit, what one with 16-bit weights says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdecode.config import ConfigError, EngineConfig, Isa
from kdecode.decode.runner import resolve
from kdecode.engine.engine import LLM
from kdecode.engine.rank import trunk_format
from kdecode.kernels.common.native import supported_isas

PROMPT, REPLY = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22, 23]


def _engine(directory: Path, packing: str, isa: str) -> LLM:
    return LLM(
        directory,
        decode_backend="latency_specialized",
        lossless_packing=packing,
        isa=isa,
        num_threads=1,
        max_context_tokens=64,
        max_requests=1,
        page_tokens=16,
    )


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("checkpoint", ["mini_checkpoint", "mini_linear_checkpoint"])
def test_logits_are_the_same_bits_from_fewer_bytes(
    request: pytest.FixtureRequest, checkpoint: str, isa: Isa
) -> None:
    directory = request.getfixturevalue(checkpoint)
    logits, sizes = [], []
    for packing in ("off", "on"):
        llm = _engine(directory, packing, isa)
        assert llm.resolved_config()["lossless_packing"] == packing
        logits.append(torch.stack(list(llm.follow_reply(PROMPT, REPLY))))
        sizes.append(sum(step.weight_bytes or 0 for step in llm.decode_plan(1).steps))
        assert llm.stats()["coverage"] == 1.0
    assert torch.equal(logits[0].view(torch.int32), logits[1].view(torch.int32))
    assert sizes[1] < 0.95 * sizes[0]


def test_packing_is_chosen_where_its_kernels_are_fast() -> None:
    def chosen(**settings: object) -> str:
        return trunk_format(resolve(EngineConfig(**settings)))  # type: ignore[arg-type]

    native = {"decode_backend": "latency_specialized"}
    assert chosen() == chosen(lossless_packing="on") == "rows"
    assert chosen(**native, isa="avx512") == "tiles12"
    assert chosen(**native, isa="avx2") == chosen(**native, isa="portable") == "tiles"
    assert chosen(**native, isa="avx2", lossless_packing="on") == "tiles12"
    assert chosen(**native, isa="avx512", lossless_packing="off") == "tiles"
    with pytest.raises(ConfigError, match="lossless_packing is 'yes'"):
        chosen(lossless_packing="yes")
