"""make-checkpoint: the files, their determinism, and the scales of what they hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from kdecode.config import ModelConfig
from kdecode.model.mxfp4 import dequantise
from kdecode.model.parameters import KdaParameters, MoeParameters, Mxfp4
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.reference import GOLD32, Options, RequestState, forward, kda_gate
from kdecode.model.roster import roster
from kdecode.model.synthesis import make_checkpoint
from kdecode.model.tokenizer import Tokenizer
from kdecode.model.weights import INDEX_FILE, CheckpointReader


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def test_the_same_seed_makes_the_same_bytes(mini_checkpoint: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    make_checkpoint(tmp_path / "again", "mini", 0, lambda done, of: steps.append((done, of)))
    assert digests(tmp_path / "again") == digests(mini_checkpoint)
    count = len(json.loads((mini_checkpoint / INDEX_FILE).read_text())["weight_map"])
    assert steps == [(done, count) for done in range(1, count + 1)]
    make_checkpoint(tmp_path / "other", "mini", 1)
    other, first = digests(tmp_path / "other"), digests(mini_checkpoint)
    assert other["config.json"] == first["config.json"]
    shards = [name for name in first if name.endswith(".safetensors")]
    assert all(other[name] != first[name] for name in shards)


def test_bytes_do_not_change_between_versions(mini_checkpoint: Path) -> None:
    """A stated digest: baselines of generated text stay valid only while this one does."""
    digest = hashlib.sha256()
    for path in sorted(mini_checkpoint.iterdir()):
        digest.update(path.name.encode() + b"\n" + path.read_bytes())
    assert digest.hexdigest()[:16] == "a3e6789d69b26465"


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "new" / "mini", "mini", 0, interrupt)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_valid_configuration(name: str) -> None:
    preset = PRESETS[name]
    config = ModelConfig.from_checkpoint(released_config(preset))
    assert config.model_type == preset.family
    assert config.kda.width == config.mla.num_heads * config.mla.v_dim
    assert config.eos_id < config.vocab_size
    is_k3 = preset.family == "kimi_k3"
    assert (config.attn_res_block is not None) == is_k3
    assert config.moe.expert_format == ("mxfp4" if is_k3 else "bf16")
    assert (config.kda.gate_lower_bound is not None) == is_k3


def test_sizes_of_the_large_presets() -> None:
    """Bytes of the files, without writing them."""
    sizes = {}
    for name in ("small", "medium", "kimi-linear-medium"):
        config = ModelConfig.from_checkpoint(released_config(PRESETS[name]))
        sizes[name] = sum(spec.num_bytes for spec in roster(config))
    assert 100e6 < sizes["small"] < 250e6
    assert 1.5e9 < sizes["medium"] < 2.5e9
    assert 2e9 < sizes["kimi-linear-medium"] < 3.5e9


def test_the_files_of_a_checkpoint(mini_checkpoint: Path) -> None:
    index = json.loads((mini_checkpoint / INDEX_FILE).read_text())
    files = set(index["weight_map"].values())
    assert len(files) >= 3
    assert files == {path.name for path in mini_checkpoint.glob("*.safetensors")}
    config = ModelConfig.from_checkpoint(mini_checkpoint)
    assert index["metadata"]["total_size"] == sum(spec.num_bytes for spec in roster(config))
    tokenizer = Tokenizer.from_directory(mini_checkpoint, config.vocab_size)
    assert tokenizer.special_id("<|end_of_msg|>") == config.eos_id
    assert tokenizer.special_id("[BOS]") == config.bos_id
    assert tokenizer.special_id("[PAD]") == config.pad_id


def test_bad_requests(mini_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"preset is 'tiny'; it must be one of mini"):
        make_checkpoint(tmp_path, "tiny", 0)
    with pytest.raises(FileExistsError, match="exists and is no empty directory"):
        make_checkpoint(mini_checkpoint, "mini", 0)


@pytest.mark.parametrize("directory", [".", "", "../here"])
def test_the_current_directory_is_refused_before_anything_is_written(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    calls: list[int] = []
    with pytest.raises(FileExistsError, match=r"here is the current directory"):
        make_checkpoint(directory, "mini", 0, lambda done, of: calls.append(done))
    assert calls == []
    make_checkpoint("new", "mini", 0)
    assert (tmp_path / "here" / "new" / "config.json").is_file()


@pytest.mark.parametrize("family", ["mini_checkpoint", "mini_linear_checkpoint"])
def test_decays_span_the_realistic_range(family: str, request: pytest.FixtureRequest) -> None:
    reader = CheckpointReader(request.getfixturevalue(family))
    config = reader.config.kda
    alphas = []
    for layer in reader.iter_layers():
        p = layer.attention
        if isinstance(p, KdaParameters):
            columns = 3 * config.width
            gate = config.width if config.is_gate_full_rank else config.head_dim
            proj = torch.zeros(1, columns + gate + config.head_dim + config.num_heads)
            g, beta = kda_gate(p, config, proj, GOLD32)
            alphas.append(g.exp().flatten())
            assert torch.equal(beta, torch.full_like(beta, 0.5))
    alpha = torch.cat(alphas)
    half_life = torch.log(torch.tensor(0.5)) / alpha.log()
    assert 0.9 < half_life.min() < 1.3
    assert 700 < half_life.max() < 1100
    slow = ((alpha > 0.9) & (alpha < 0.9995)).float().mean()
    assert 0.6 < slow < 0.8


def test_mxfp4_weights_have_the_intended_spread(mini_checkpoint: Path) -> None:
    mlp = CheckpointReader(mini_checkpoint).load_layer(1).mlp
    assert isinstance(mlp, MoeParameters)
    for part, gain in ((mlp.w1, 1.3), (mlp.w2, 0.5)):
        weights = [dequantise(w).float() for w in part if isinstance(w, Mxfp4)]
        assert len(weights) == 24
        spread = torch.stack(weights).std() * weights[0].shape[1] ** 0.5 / gain
        # Scales are powers of two.
        assert 2**-0.5 < spread / 1.15 < 2**0.5
    assert isinstance(mlp.w1[0], Mxfp4)
    codes = torch.stack([w.packed & 15 for w in mlp.w1 if isinstance(w, Mxfp4)])
    assert codes.unique().numel() >= 15


@pytest.mark.parametrize("family", ["mini_checkpoint", "mini_linear_checkpoint"])
def test_activations_keep_their_size(family: str, request: pytest.FixtureRequest) -> None:
    reader = CheckpointReader(request.getfixturevalue(family))
    model, config = reader.load_model(), reader.config
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, config.vocab_size, (48,), generator=generator)
    sizes: list[float] = []
    options = Options(
        kda_form="chunked",
        on_layer=lambda layer, prefix: sizes.append(prefix.square().mean().sqrt().item()),
    )
    state = RequestState.new(config, GOLD32)
    logits = forward(model, config, ids, state, GOLD32, options)
    assert all(0.5 < size < 10 for size in sizes)
    assert 1.5 < logits.std(-1).mean() < 4
    # Different tokens lead to different predictions.
    assert logits.argmax(-1).unique().numel() > 24


def test_experts_are_used_unevenly_but_broadly(mini_checkpoint: Path) -> None:
    from kdecode.model.reference import route

    reader = CheckpointReader(mini_checkpoint)
    moe = reader.config.moe
    x = torch.randn(512, 192, generator=torch.Generator().manual_seed(5))
    for number, layer in enumerate(reader.iter_layers()):
        if isinstance(layer.mlp, MoeParameters):
            ids, weights = route(layer.mlp, moe, x, GOLD32)
            counts = torch.bincount(ids.flatten().long(), minlength=moe.num_experts)
            share = counts / counts.sum() * moe.num_experts
            assert (counts > 0).sum() >= 20, number
            assert share.max() < 4, number
            assert share.max() > 1.2, number
            assert weights.max() < 0.9
