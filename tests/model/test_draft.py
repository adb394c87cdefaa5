"""Drafts as published: totals, what each layout means, loading, random ones on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from released import kimi_k3

from kdecode.cli import main
from kdecode.config import ConfigError, GqaConfig, MlaConfig, ModelConfig
from kdecode.config_draft import DraftConfig, DraftKind
from kdecode.model.draft_parameters import DraftParameters
from kdecode.model.draft_roster import draft_roster
from kdecode.model.draft_synthesis import draft_document, make_draft
from kdecode.model.draft_weights import load_draft
from kdecode.model.parameters import MlaParameters
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.shards import CheckpointError, Shard, write_shard
from kdecode.model.weights import SINGLE_FILE, CheckpointReader

KINDS: tuple[DraftKind, ...] = get_args(DraftKind)
K3 = ModelConfig.from_checkpoint(kimi_k3())
MINI = ModelConfig.from_checkpoint(released_config(PRESETS["mini"]))


def _published(kind: DraftKind) -> DraftConfig:
    return DraftConfig.from_checkpoint(draft_document(kind, K3))


@pytest.mark.parametrize(
    ("kind", "parameters", "tensors"),
    [
        ("inferact", 3_562_312_961, 68),
        ("lightseek", 3_562_348_801, 73),
        ("radixark", 2_249_289_601, 62),
        ("redhat", 4_744_900_481, 64),
    ],
)
def test_totals_of_the_published_files(kind: DraftKind, parameters: int, tensors: int) -> None:
    specs = list(draft_roster(_published(kind)))
    assert len({spec.name for spec in specs}) == len(specs) == tensors
    assert sum(math.prod(spec.shape) for spec in specs) == parameters
    assert {spec.dtype for spec in specs} == {"BF16"}


def test_what_the_mla_layouts_mean() -> None:
    inferact, lightseek = _published("inferact"), _published("lightseek")
    mla = MlaConfig(64, 1536, 512, 128, 64, 128, has_output_gate=False, latent_norm_eps=1e-5)
    assert inferact.attention == lightseek.attention == mla
    assert inferact.taps == (2, 23, 47, 71, 89)
    assert lightseek.taps == (7, 31, 47, 63, 87)
    assert (inferact.tap_stream, lightseek.tap_stream) == ("prefix", "attn_res")
    assert (inferact.has_tap_norms, lightseek.has_tap_norms) == (False, True)
    for draft in (inferact, lightseek):
        assert (draft.is_causal, draft.window, draft.mask_id) == (False, None, 163837)
        assert (draft.max_drafts, draft.markov_rank, draft.has_confidence) == (7, 256, True)
        assert not draft.has_embed
        assert not draft.has_head
        assert (draft.rope.is_interleaved, draft.rope.amplitude) == (True, 1.0)
        scale = 192**-0.5 * draft.rope.score_scale
        assert scale == pytest.approx(0.1308608, abs=5e-8)


def test_what_the_gqa_layouts_mean() -> None:
    radixark, redhat = _published("radixark"), _published("redhat")
    assert radixark.attention == GqaConfig(64, 16, 64)
    assert redhat.attention == GqaConfig(96, 16, 64)
    assert radixark.taps == (7, 23, 51, 67, 83)
    # Stored as 24, 48, 72, 88, 92: the layers before the tap.
    assert redhat.taps == (23, 47, 71, 87, 91)
    assert (radixark.tap_stream, redhat.tap_stream) == ("attn_res", "prefix")
    assert (radixark.is_causal, radixark.window) == (False, None)
    assert (redhat.is_causal, redhat.window) == (True, 2048)
    assert (radixark.mask_id, redhat.mask_id) == (163824, 163837)
    assert (radixark.max_drafts, redhat.max_drafts) == (7, 8)
    assert (radixark.has_embed, radixark.has_head) == (False, False)
    assert (redhat.has_embed, redhat.has_head) == (True, True)
    assert radixark.rope.factor == 16
    assert radixark.rope.amplitude == pytest.approx(1.27726, abs=5e-6)
    assert (redhat.rope.factor, redhat.rope.theta, redhat.rope.amplitude) == (1.0, 10000.0, 1.0)
    assert not radixark.rope.is_interleaved
    assert not redhat.rope.is_interleaved
    assert radixark.rope.score_scale == redhat.rope.score_scale == 1.0


def test_causality_is_what_the_file_says_first() -> None:
    document = draft_document("redhat", MINI)
    assert DraftConfig.from_checkpoint(document).is_causal
    assert not DraftConfig.from_checkpoint({**document, "is_causal": False}).is_causal
    document = draft_document("radixark", MINI)
    document["dflash_config"]["causal"] = True
    assert DraftConfig.from_checkpoint(document).is_causal
    assert not DraftConfig.from_checkpoint({**document, "is_causal": False}).is_causal


def test_the_tap_stream_can_be_chosen() -> None:
    document = draft_document("inferact", MINI)
    assert DraftConfig.from_checkpoint(document, "attn_res").tap_stream == "attn_res"
    with pytest.raises(ConfigError, match="tap_stream is 'both'"):
        DraftConfig.from_checkpoint(document, "both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("inferact", {"markov_head_type": "gated"}, "is 'gated'; only 'vanilla' is supported"),
        ("inferact", {"mla_use_nope": True}, "mla_use_nope is True; only False"),
        ("inferact", {"new_switch": 1}, "new_switch is 1; this setting is unknown"),
        ("inferact", {"target_layer_ids": [3, 2, 5, 6, 7]}, "the layers must ascend"),
        ("inferact", {"target_layer_ids": []}, r"is \[\]; it must be a list of layers"),
        ("inferact", {"num_target_layers": 4}, "num_target_layers is 4; only 5 is supported"),
        ("inferact", {"target_hidden_size": 64}, "target_hidden_size is 64; only 192"),
        ("inferact", {"mask_token_id": 1536}, "mask_token_id is 1536; it must be from 0 to 1535"),
        ("radixark", {"layer_types": ["full_attention", "sliding_attention"]}, "of one type"),
        ("radixark", {"layer_types": ["linear_attention"] * 2}, "is 'linear_attention'"),
        ("radixark", {"num_key_value_heads": 3}, "is 2; it must be a multiple of .* is 3"),
        ("radixark", {"rope_scaling": {"rope_type": "llama3"}}, "is 'llama3'; it must be one of"),
        ("radixark", {"rope_scaling": {"type": "yarn", "factor": 1}}, "factor is 1; .* above 1"),
        ("radixark", {"head_dim": 15}, "15 channels are to be rotated in pairs"),
        ("radixark", {"dflash_config": None}, "none of the known layouts"),
        ("redhat", {"aux_hidden_state_layer_ids": [0, 3]}, "is 0; it must be at least 1"),
        ("redhat", {"speculators_model_type": "eagle3"}, "is 'eagle3'; only 'dspark'"),
    ],
)
def test_refusals(kind: DraftKind, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftConfig.from_checkpoint({**draft_document(kind, MINI), **changes})


def test_a_draft_fits_its_target() -> None:
    config = DraftConfig.from_checkpoint(draft_document("inferact", MINI))
    config.check_target(MINI)
    assert config.taps == (0, 1, 4, 6, 8)
    small = ModelConfig.from_checkpoint(released_config(PRESETS["small"]))
    with pytest.raises(ConfigError, match="hidden_size of the draft is 192; the target has 768"):
        config.check_target(small)
    with pytest.raises(ConfigError, match="after layer 89; the last layer is 8"):
        _with_taps((2, 89)).check_target(MINI)


def _with_taps(taps: tuple[int, ...]) -> DraftConfig:
    changes = {"target_layer_ids": list(taps), "num_target_layers": len(taps)}
    return DraftConfig.from_checkpoint({**draft_document("inferact", MINI), **changes})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_has_a_draft_of_every_kind(kind: DraftKind, preset: str) -> None:
    target = ModelConfig.from_checkpoint(released_config(PRESETS[preset]))
    config = DraftConfig.from_checkpoint(draft_document(kind, target))
    config.check_target(target)
    assert len(config.taps) >= 4


@pytest.fixture(scope="module", params=KINDS)
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafts") / request.param
    make_draft(directory, "mini", request.param, seed=0)
    return directory


def _tensors(parameters: DraftParameters) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def collect(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            for item in value:
                collect(item)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                collect(getattr(value, name))

    collect(parameters)
    return found


def test_written_drafts_load_whole(drafted: Path) -> None:
    config = DraftConfig.from_checkpoint(drafted)
    parameters = load_draft(drafted)
    shard = Shard(drafted / SINGLE_FILE)
    loaded = _tensors(parameters)
    # The MLA form's copy of the target's table is the one tensor that nothing reads.
    is_mla = isinstance(config.attention, MlaConfig)
    assert len(loaded) == len(shard.entries) - is_mla
    assert len({tensor.data_ptr() for tensor in loaded}) == len(loaded)
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in loaded)
    first = parameters.layers[0].attention
    assert isinstance(first, MlaParameters) == is_mla
    for name, tensor in (
        ("layers.1.mlp.down_proj.weight", parameters.layers[1].mlp.down_proj),
        ("layers.0.self_attn.o_proj.weight", first.o_proj),
        ("markov_head.markov_w2.weight", parameters.markov_out),
        ("final_norm.weight" if is_mla else "norm.weight", parameters.norm),
    ):
        assert torch.equal(shard.tensor(name), tensor), name


def test_the_same_seed_makes_the_same_bytes(drafted: Path, tmp_path: Path) -> None:
    kind = drafted.name
    make_draft(tmp_path / "again", "mini", kind, seed=0)  # type: ignore[arg-type]
    make_draft(tmp_path / "other", "mini", kind, seed=1)  # type: ignore[arg-type]
    for name in ("config.json", SINGLE_FILE):
        assert (tmp_path / "again" / name).read_bytes() == (drafted / name).read_bytes()
    assert (tmp_path / "other" / SINGLE_FILE).read_bytes() != (drafted / SINGLE_FILE).read_bytes()


def test_copied_tables_are_the_targets(mini_checkpoint: Path, tmp_path: Path) -> None:
    target = CheckpointReader(mini_checkpoint).load_model()
    make_draft(tmp_path / "redhat", "mini", "redhat", seed=0)
    draft = load_draft(tmp_path / "redhat")
    assert draft.embed is not None
    assert draft.lm_head is not None
    assert torch.equal(draft.embed, target.embed)
    assert torch.equal(draft.lm_head, target.lm_head)
    make_draft(tmp_path / "inferact", "mini", "inferact", seed=0)
    copy = Shard(tmp_path / "inferact" / SINGLE_FILE).tensor("embed_tokens.weight")
    assert torch.equal(copy, target.embed)
    assert load_draft(tmp_path / "inferact").embed is None


def _rewrite(directory: Path, target: Path, changes: dict[str, tuple[int, ...] | None]) -> None:
    """A copy of a draft in which tensors have another shape, or are absent (None) or new."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    shard = Shard(directory / SINGLE_FILE)
    shapes = {name: entry.shape for name, entry in shard.entries.items()} | changes
    header = {name: ("BF16", shape) for name, shape in shapes.items() if shape is not None}
    write_shard(
        target / SINGLE_FILE,
        header,
        lambda name: torch.zeros(header[name][1], dtype=torch.bfloat16),
    )


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.0.input_layernorm.weight", None, "has no tensor layers.0.input_layernorm.weight"),
        ("layers.2.input_layernorm.weight", (192,), "configuration has no such tensor"),
        ("markov_head.markov_w1.weight", (1536, 47), r"expected shape \[1536, 48\], found"),
    ],
)
def test_odd_files_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    make_draft(tmp_path / "good", "mini", "inferact", seed=0)
    _rewrite(tmp_path / "good", tmp_path / "odd", {name: shape})
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path / "odd")


def test_the_copy_of_the_embedding_may_be_absent(tmp_path: Path) -> None:
    make_draft(tmp_path / "good", "mini", "inferact", seed=0)
    _rewrite(tmp_path / "good", tmp_path / "bare", {"embed_tokens.weight": None})
    assert len(load_draft(tmp_path / "bare").layers) == 2


def test_a_checkpoint_is_not_overwritten(mini_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"exists and is no empty directory"):
        make_draft(mini_checkpoint, "mini", "inferact", 0)
    with pytest.raises(ConfigError, match="draft is 'eagle'; it must be one of inferact"):
        make_draft(tmp_path, "mini", "eagle", 0)  # type: ignore[arg-type]
    assert json.loads((mini_checkpoint / "config.json").read_text())["model_type"] == "kimi_k3"


def test_the_command_writes_drafts(
    drafted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, directory = drafted.name, tmp_path / "made"
    assert main(["make-checkpoint", str(directory), "--preset", "mini", "--draft", kind]) == 0
    assert f"preset mini, seed 0, {kind} draft" in capsys.readouterr().out
    assert (directory / SINGLE_FILE).read_bytes() == (drafted / SINGLE_FILE).read_bytes()
    assert main(["make-checkpoint", str(directory), "--draft", "eagle"]) == 2
    assert "invalid choice: 'eagle'" in capsys.readouterr().err
