"""A draft's weights for plans: its stack as a small model, and what stands around it.

Owns the view of a draft's stack as a model (`plan_config`), so that the fused ops of the target
serve it, and the packing. Knows no plan. Grouped-query attention has such a view on CUDA only; see
`refuse_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.config import (
    Activation,
    GqaConfig,
    KdaConfig,
    LayerKind,
    MlaConfig,
    MlpKind,
    ModelConfig,
    MoeConfig,
)
from kdecode.config_draft import DraftConfig
from kdecode.kernels.common.matrix import Matrix, pack_rows
from kdecode.model.draft_parameters import DraftLayerParameters, DraftParameters, GqaParameters
from kdecode.model.layout import (
    PackedGqa,
    PackedLayer,
    PackedMlp,
    PackedModel,
    TrunkFormat,
    pack_layer,
    pack_matrix,
)
from kdecode.model.outline import outline_model
from kdecode.model.parameters import LayerParameters


@dataclass(frozen=True)
class DraftPlanWeights:
    """embed and head: the draft's own, or None."""

    config: ModelConfig
    embed: Tensor | None  # [vocab, M]
    head: Matrix | None  # [vocab, M]
    layers: tuple[PackedLayer, ...]
    norm: Tensor  # [M] fp32
    context_proj: Matrix  # [M, taps*M]
    context_norm: Tensor  # [M] fp32
    tap_norms: Tensor | None  # [taps, M] fp32
    markov_in: Tensor  # [vocab, R] bf16
    markov_out: Matrix  # [vocab, R]
    confidence: tuple[Tensor, Tensor] | None  # [M + R] and [1], fp32

    def model(self, target: PackedModel) -> PackedModel:
        """The stack, with the target's embedding and head where it has none of its own."""
        embed = target.embed if self.embed is None else self.embed
        head = target.head if self.head is None else self.head
        return PackedModel(self.config, embed, self.layers, None, self.norm, head)


def refuse_layout(config: DraftConfig, *, is_cuda: bool) -> list[str]:
    """Every reason why a draft's stack is none that the plans of a device have ops for."""
    is_mla, is_paired = isinstance(config.attention, MlaConfig), config.rope.is_interleaved
    reasons = []
    if not is_mla and not is_cuda:
        reasons.append(
            "A draft's plan on a CPU has latent attention; this draft's is grouped-query attention."
        )
    elif is_mla != is_paired:
        kind = "latent" if is_mla else "grouped-query"
        pairs = ("neighbours", "halves") if is_mla else ("halves", "neighbours")
        reasons.append(
            f"A draft's plan of {kind} attention rotates {pairs[0]}; this draft's pairs are "
            f"{pairs[1]}."
        )
    if config.is_causal and not is_cuda:
        reasons.append(
            "The rows of a planned block see each other on a CPU; this draft's are causal."
        )
    if config.window is not None and (is_mla or not is_cuda):
        where = "latent attention" if is_cuda else "a CPU"
        reasons.append(
            f"A draft's plan of {where} reads all of the context; this draft's window is "
            f"{config.window} tokens."
        )
    return reasons


def plan_config(config: DraftConfig) -> ModelConfig:
    """The draft's stack as a model: plain residuals, one kind of attention, dense MLPs."""
    attention = config.attention
    gqa = attention if isinstance(attention, GqaConfig) else None
    # Of what there are no layers of, the sizes are none.
    mla = attention if isinstance(attention, MlaConfig) else _NO_MLA
    mixer: LayerKind = "mla" if gqa is None else "gqa"
    mlp: MlpKind = "dense"
    value_dim = mla.v_dim if gqa is None else gqa.head_dim
    return ModelConfig(
        model_type="kimi_linear",
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layer_kinds=(mixer,) * config.num_layers,
        mlp_kinds=(mlp,) * config.num_layers,
        dense_width=config.mlp_width,
        activation=Activation("silu"),
        rms_eps=config.rms_eps,
        attn_res_block=None,
        # There are no such layers; the width of the heads is that of the attention's output.
        kda=KdaConfig(attention.num_heads, value_dim, 4, None, is_gate_full_rank=True),
        mla=mla,
        moe=MoeConfig(0, 0, 0, 0, None, False, False, 1.0, "bf16"),
        max_positions=0,
        bos_id=0,
        eos_id=0,
        pad_id=0,
        gqa=gqa,
    )


_NO_MLA = MlaConfig(0, None, 0, 0, 0, 0, has_output_gate=False, latent_norm_eps=0.0)


def pack_draft_plan(
    p: DraftParameters,
    config: DraftConfig,
    trunk_format: TrunkFormat,
    isa: str | None,
) -> DraftPlanWeights:
    """Copies a draft out of its mapped file, into this format."""
    model_config = plan_config(config)
    norms = None if p.tap_norms is None else torch.stack([norm.float() for norm in p.tap_norms])
    confidence = None
    if p.confidence is not None:
        confidence = p.confidence.weight.float(), p.confidence.bias.float()
    return DraftPlanWeights(
        config=model_config,
        embed=None if p.embed is None else p.embed.clone(),
        head=None if p.lm_head is None else pack_matrix(p.lm_head, trunk_format, isa),
        layers=tuple(_packed_layer(layer, model_config, trunk_format, isa) for layer in p.layers),
        norm=p.norm.float(),
        context_proj=pack_matrix(p.context_proj, trunk_format, isa),
        context_norm=p.context_norm.float(),
        tap_norms=norms,
        markov_in=p.markov_in.clone(),
        markov_out=pack_matrix(p.markov_out, trunk_format, isa),
        confidence=confidence,
    )


def _packed_layer(
    layer: DraftLayerParameters,
    config: ModelConfig,
    trunk_format: TrunkFormat,
    isa: str | None,
) -> PackedLayer:
    attention = layer.attention
    if isinstance(attention, GqaParameters):
        if trunk_format != "rows":
            raise ValueError(
                f"Layers of grouped-query attention are packed in rows; {trunk_format} was asked "
                "for."
            )
        return _packed_gqa_layer(layer, attention)
    parameters = LayerParameters(
        input_norm=layer.input_norm,
        post_norm=layer.post_norm,
        attn_mix=None,
        mlp_mix=None,
        attention=attention,
        mlp=layer.mlp,
    )
    return pack_layer(parameters, config, trunk_format, isa)


def _packed_gqa_layer(layer: DraftLayerParameters, p: GqaParameters) -> PackedLayer:
    mlp = layer.mlp
    return PackedLayer(
        input_norm=layer.input_norm.float(),
        post_norm=layer.post_norm.float(),
        attn_mix=None,
        mlp_mix=None,
        attention=PackedGqa(
            in_proj=pack_rows([p.q_proj, p.k_proj, p.v_proj]),
            q_norm=p.q_norm.float(),
            k_norm=p.k_norm.float(),
            o_proj=pack_rows([p.o_proj]),
        ),
        mlp=PackedMlp(pack_rows([mlp.gate_proj, mlp.up_proj]), pack_rows([mlp.down_proj])),
    )


def outline_draft_plan(config: DraftConfig, trunk_format: TrunkFormat) -> PackedModel:
    """The stack's shapes, for a plan that is only described."""
    return outline_model(plan_config(config), trunk_format)


def outline_draft_weights(config: DraftConfig, stack: PackedModel) -> DraftPlanWeights:
    """What stands around a stack in "rows", without data. stack: `outline_draft_plan`'s."""
    width, rank, vocab = config.hidden_size, config.markov_rank, config.vocab_size
    columns = len(config.taps) * width
    return DraftPlanWeights(
        config=stack.config,
        embed=None,
        head=None,
        layers=stack.layers,
        norm=stack.norm,
        context_proj=Matrix("rows", width, columns, _outline((width, columns), torch.bfloat16)),
        context_norm=_outline((width,)),
        tap_norms=_outline((len(config.taps), width)) if config.has_tap_norms else None,
        markov_in=_outline((vocab, rank), torch.bfloat16),
        markov_out=Matrix("rows", vocab, rank, _outline((vocab, rank), torch.bfloat16)),
        confidence=(_outline((width + rank,)), _outline((1,))) if config.has_confidence else None,
    )


def _outline(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
