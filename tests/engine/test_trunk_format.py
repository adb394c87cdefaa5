"""A trunk of integers: what is rounded and what is not, that it runs right, and that it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from kdecode.cli import main
from kdecode.config import ConfigError, EngineConfig, ModelConfig, TrunkWeights
from kdecode.engine.describe import describe_plan
from kdecode.engine.engine import LLM
from kdecode.kernels.common.integers import round_rows
from kdecode.model.layout import PackedKda, PackedMla, PackedMlp, PackedMoe, pack_model
from kdecode.model.outline import outline_bytes, outline_model
from kdecode.model.parameters import (
    KdaParameters,
    LayerParameters,
    MlaParameters,
    MlpParameters,
    ModelParameters,
    MoeParameters,
    Mxfp4,
)
from kdecode.model.reference import ROUNDED, RequestState, forward
from kdecode.model.weights import CheckpointReader

INTEGERS = [name for name in get_args(TrunkWeights) if name != "bf16"]
FAMILIES = ["mini_checkpoint", "mini_linear_checkpoint"]


def _rounded(weight: Tensor | Mxfp4, bits: int) -> Tensor | Mxfp4:
    """A weight with the numbers that its integers stand for."""
    if isinstance(weight, Mxfp4) or weight.shape[1] % 32:
        return weight
    codes, scales = round_rows(weight, bits)
    values = codes.float().view(len(weight), -1, 32) * scales.float().unsqueeze(-1)
    return values.view_as(weight).bfloat16()


def _rounded_model(model: ModelParameters, config: ModelConfig, bits: int) -> ModelParameters:
    """The model that an engine with such a trunk has, for the reference."""

    def matrices(part: KdaParameters | MlaParameters | MlpParameters) -> dict[str, Tensor]:
        return {
            name: _rounded(value, bits)
            for name, value in vars(part).items()
            if name.endswith("_proj") and value is not None
        }

    def mla(part: MlaParameters) -> dict[str, Tensor]:
        # The absorbed W_UK is rounded along the other side.
        c, found = config.mla, matrices(part)
        heads = part.kv_b_proj.view(c.num_heads, c.nope_dim + c.v_dim, c.kv_rank)
        w_uk, w_uv = heads[:, : c.nope_dim], heads[:, c.nope_dim :]
        w_uk = torch.stack([_rounded(h.T.contiguous(), bits).T for h in w_uk])
        w_uv = _rounded(w_uv.reshape(-1, c.kv_rank), bits).view_as(w_uv)
        return {**found, "kv_b_proj": torch.cat([w_uk, w_uv], 1).view_as(part.kv_b_proj)}

    def moe(part: MoeParameters) -> MoeParameters:
        def some(weight: Tensor | None) -> Tensor | None:
            return None if weight is None else _rounded(weight, bits)

        shared = None if part.shared is None else replace(part.shared, **matrices(part.shared))
        experts = {
            name: tuple(_rounded(w, bits) for w in getattr(part, name))
            for name in ("w1", "w3", "w2")
        }
        return replace(
            part,
            latent_down=some(part.latent_down),
            latent_up=some(part.latent_up),
            shared=shared,
            **experts,
        )

    def layer(part: LayerParameters) -> LayerParameters:
        attention, mlp = part.attention, part.mlp
        own = matrices(attention) if isinstance(attention, KdaParameters) else mla(attention)
        return replace(
            part,
            attention=replace(attention, **own),
            mlp=moe(mlp) if isinstance(mlp, MoeParameters) else replace(mlp, **matrices(mlp)),
        )

    return replace(
        model,
        layers=tuple(layer(part) for part in model.layers),
        lm_head=_rounded(model.lm_head, bits),
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trunk", INTEGERS)
def test_it_is_the_model_of_the_rounded_weights(
    request: pytest.FixtureRequest, family: str, trunk: TrunkWeights
) -> None:
    directory: Path = request.getfixturevalue(family)
    llm = LLM(directory, _engine(trunk))
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(llm.model_config.vocab_size, (24,), generator=source)
    with torch.no_grad():
        found = llm.teacher_forced(ids[:12].tolist(), ids[12:].tolist())
        model = CheckpointReader(directory).load_model()
        made = _rounded_model(model, llm.model_config, 8 if trunk == "int8" else 4)

        def reference(parameters: ModelParameters) -> Tensor:
            state = RequestState.new(llm.model_config, ROUNDED)
            return forward(parameters, llm.model_config, ids, state, ROUNDED)[11:-1].float()

        wanted, released = reference(made), reference(model)
    distances = [
        ((found - logits).norm(dim=-1) / logits.norm(dim=-1)).median()
        for logits in (wanted, released)
    ]
    # Rounding of bf16 between two right engines; an expert that changes place moves single rows.
    assert distances[0] < 0.04
    # 8 bits cost about what rounding to bf16 costs, 4 bits far more.
    assert distances[1] > (1.1 if trunk == "int8" else 3) * distances[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trunk", INTEGERS)
def test_what_is_rounded(request: pytest.FixtureRequest, family: str, trunk: TrunkWeights) -> None:
    reader = CheckpointReader(request.getfixturevalue(family))
    kind = "int8_tiles" if trunk == "int8" else "int4_tiles"
    packed = pack_model(reader, kind)
    assert outline_bytes(packed) == outline_bytes(outline_model(reader.config, kind))
    kda, mla = packed.layers[1].attention, packed.layers[3].attention
    dense, moe = packed.layers[0].mlp, packed.layers[1].mlp
    assert isinstance(kda, PackedKda)
    assert isinstance(mla, PackedMla)
    assert isinstance(dense, PackedMlp)
    assert isinstance(moe, PackedMoe)
    rounded = (packed.head, kda.in_proj, kda.o_proj, mla.w_uk, mla.w_uv, dense.gate_up, dense.down)
    assert {matrix.format for matrix in rounded} == {kind}
    assert moe.router.format == "tiles"
    assert packed.embed.dtype == torch.bfloat16
    is_mxfp4 = reader.config.moe.expert_format == "mxfp4"
    assert moe.experts[0].down.format == ("mxfp4_tiles" if is_mxfp4 else kind)


def test_only_the_backend_with_kernels_has_it() -> None:
    with pytest.raises(ConfigError, match=r"'int8' and decode_backend 'auto'.*differ"):
        EngineConfig(trunk_format="int8")
    with pytest.raises(ConfigError, match="must be one of bf16, int8, int4"):
        EngineConfig(decode_backend="latency_specialized", trunk_format="int3")  # type: ignore[arg-type]


def test_it_is_told_wherever_the_engine_is_described(
    mini_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LLM(mini_checkpoint, _engine("int8")).resolved_config()
    assert config["trunk_format"] == "int8"
    assert config["weights_differ_from_checkpoint"] is True
    plan, size = describe_plan(ModelConfig.from_checkpoint(mini_checkpoint), _engine("int4"), 1)
    exact = describe_plan(ModelConfig.from_checkpoint(mini_checkpoint), _engine("bf16"), 1)
    assert any("differ" in note for note in plan.notes)
    assert size < exact[1]
    common = ["--trunk-format", "int8", "--threads", "1"]
    backend = ["--decode-backend", "latency_specialized"]
    words = ["generate", str(mini_checkpoint), "--prompt", "a", "--max-tokens", "2"]
    assert main([*words, *common, *backend]) == 0
    assert "WEIGHTS DIFFER FROM THE CHECKPOINT" in capsys.readouterr().err
    assert main(["check", str(mini_checkpoint), "--json", "--steps", "2", *common]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["divergence"]["mean"] < 1
    assert found["weights_differ_from_checkpoint"] is True


def test_it_is_never_compared(mini_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = ["--arm-a", "latency_specialized", "--arm-b", "latency_specialized"]
    assert main(["compare", str(mini_checkpoint), "--trunk-format", "int8", *arms]) == 2
    assert "never part of a comparison" in capsys.readouterr().err


def _engine(trunk: TrunkWeights) -> EngineConfig:
    return EngineConfig(
        decode_backend="latency_specialized",
        trunk_format=trunk,
        num_threads=1,
        max_context_tokens=64,
        max_requests=2,
    )
