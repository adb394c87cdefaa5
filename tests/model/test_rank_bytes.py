"""The accounting of what ranks have and read: every byte of a release, by hand where it matters."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from released import kimi_k3, kimi_linear

from kdecode.cli import main
from kdecode.config import ConfigError, ModelConfig
from kdecode.model.rank_bytes import ROUTER_SLOTS, rank_bytes
from kdecode.model.roster import roster

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text().replace("\n", " ")
K3 = ModelConfig.from_checkpoint(kimi_k3())
LINEAR = ModelConfig.from_checkpoint(kimi_linear())
M, L, E, F, D = 7168, 3584, 896, 3072, 96 * 128


@cache
def total_bytes(config: ModelConfig) -> int:
    """Without the padding of A_log."""
    heads = 4 * config.kda.num_heads
    return sum(heads if s.name.endswith("A_log") else s.num_bytes for s in roster(config))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("config", [K3, LINEAR], ids=["k3", "linear"])
def test_ranks_have_every_byte_of_a_release_and_copies_of_some(
    config: ModelConfig, size: int
) -> None:
    kinds = rank_bytes(config, size)
    total = total_bytes(config)
    assert sum(kind.whole for kind in kinds) == total
    assert sum(kind.count for kind in kinds) == config.num_layers + 1
    copies = sum(kind.count * kind.copied for kind in kinds)
    assert sum(kind.all_ranks for kind in kinds) == total + (size - 1) * copies
    # Of a sixteenth of every divided tensor nothing is lost to rounding.
    for kind in kinds:
        assert all(t.whole % size == 0 for t in kind.tensors if t.cut != "whole")


def test_a_layer_of_kimi_k3_on_16_ranks() -> None:
    by_name = {kind.name: kind for kind in rank_bytes(K3, 16)}
    assert {name: kind.count for name, kind in by_name.items()} == {
        "KDA + dense": 1,
        "KDA + MoE": 68,
        "MLA + MoE": 24,
        "outside": 1,
    }
    kind = by_name["KDA + MoE"]
    matrices = 5 * D * M + D * 128 + 96 * M  # q, k, v, g, o; f_b; b
    mixture = E * M + 2 * L * M + 3 * 2 * F * M
    vectors = 3 * D * 4 * 4 + 4 * D + 4 * 96  # convolutions, dt_bias, A_log
    experts = 16 * 3 * F * L * 17 // 32
    assert kind.divided_read == (2 * (matrices + mixture) + vectors + experts) // 16
    # f_a, two norms, two mixes, the norms of heads and latents, the router's bias.
    assert kind.copied_read == 2 * 128 * M + 6 * 2 * M + 4 * 128 + 2 * L + 4 * E
    stock, router = kind.read_with_whole(ROUTER_SLOTS)
    assert router == 2 * (E + L) * M
    assert stock == kind.divided_read + kind.copied_read + router * 15 // 16
    # As the published figures have it, without the state: 64 of 160 MB.
    assert (round(stock / 1e6), round(router / 1e6)) == (159, 64)
    numbers = (kind.divided_read + kind.copied_read, kind.copied_read, stock, router)
    found = re.search(r"takes ([\d.]+) MB .*, ([\d.]+) of .* ([\d.]+) with .* ([\d.]+) of it", PAGE)
    assert found is not None
    assert list(found.groups()) == [f"{number / 1e6:.1f}" for number in numbers]


def test_what_cannot_be_divided_is_not_counted() -> None:
    with pytest.raises(ConfigError, match="96 KDA heads cannot be divided among 7 ranks"):
        rank_bytes(K3, 7)


def test_the_command_counts_without_timing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "layer", "--tensor-parallel-size", "16", "--bytes"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("kimi-k3: what one rank of 16 reads of a layer")
    rows = {
        line[:56].strip(): line[56:].split() for line in lines if line.startswith(("toge", "the s"))
    }
    assert rows["together"] == ["148.13", "98.59", "98.80"]
    assert rows["the same with router and latent_down whole on every rank"][1] == "158.80"
    assert main([*arguments, "--json"]) == 0
    kinds = json.loads(capsys.readouterr().out)["rank_bytes"]
    for kind in kinds:
        read = sum(tensor["rank_read_bytes"] for tensor in kind["tensors"])
        assert read == kind["rank_read_bytes_divided"] + kind["rank_read_bytes_copied"]
        held = sum(tensor["rank_bytes"] for tensor in kind["tensors"])
        assert held == kind["rank_bytes_divided"] + kind["rank_bytes_copied"]


def test_bytes_are_of_a_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", "--bytes"]) == 2
    assert "--bytes needs a --shape" in capsys.readouterr().err
    assert main(["bench", "layer", "-tp", "16", "--bytes", "--gpu-exchange", "nccl"]) == 2
    assert "--bytes given, which exchanges nothing" in capsys.readouterr().err
