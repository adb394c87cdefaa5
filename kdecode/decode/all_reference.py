"""The `all_reference` backend, for developers: one step a stage, each the reference's own function.

The oracle of `verify.check_steps`: it runs any step, in plain torch, on the same kind of caches as
the other backends, and writes every buffer. Rounding points are those of the `Rounding` it is built
with. Owns nothing but the walk from stages to reference functions and the loop over requests in the
stages that have state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import CacheDtype, ModelConfig
from kdecode.decode.buffers import value_buffers
from kdecode.decode.plan import Buffer, DecodePlan, Step
from kdecode.kernels.contract import Buffers, Tolerance
from kdecode.model import reference
from kdecode.model.parameters import (
    KdaParameters,
    LayerParameters,
    MixParameters,
    MlaParameters,
    MlpParameters,
    ModelParameters,
    MoeParameters,
)
from kdecode.model.reference import ROUNDED, Rounding
from kdecode.model.stages import layer_stages

EXACT = Tolerance(rtol=0.0, atol=0.0, rms_ratio=0.0)

# What a stage reads and writes, by buffer name. `snapshots` is left out where the model has none.
STAGE_BUFFERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "embed": ((), ("prefix",)),
    "attn_mix": (("prefix", "snapshots"), ("attn_mix",)),
    "attn_norm": (("attn_mix",), ("attn_in",)),
    "kda_in_proj": (("attn_in",), ("kda_proj",)),
    "kda_conv": (("kda_proj",), ("kda_qkv",)),
    "kda_gate": (("kda_proj",), ("kda_decay", "kda_beta")),
    "kda_step": (("kda_qkv", "kda_decay", "kda_beta"), ("kda_out",)),
    "kda_out_norm": (("kda_out", "kda_proj"), ("attn_out",)),
    "mla_in_proj": (("attn_in",), ("mla_proj",)),
    "mla_query": (("mla_proj",), ("mla_query",)),
    "mla_insert": (("mla_proj",), ()),
    "mla_attend": (("mla_query",), ("mla_latent",)),
    "mla_value": (("mla_latent", "mla_proj"), ("attn_out",)),
    "attn_out_proj": (("attn_out",), ("attn_delta",)),
    "attn_residual": (("attn_delta", "prefix"), ("prefix", "snapshots")),
    "mlp_mix": (("prefix", "snapshots"), ("mlp_mix",)),
    "mlp_norm": (("mlp_mix",), ("mlp_in",)),
    "dense_mlp": (("mlp_in",), ("mlp_delta",)),
    "route": (("mlp_in",), ("route_ids", "route_weights")),
    "latent_down": (("mlp_in",), ("latent",)),
    "experts": (("route_ids", "route_weights"), ("expert_sum",)),
    "latent_up": (("expert_sum",), ("routed",)),
    "shared_mlp": (("mlp_in",), ("shared",)),
    "mlp_residual": (("prefix",), ("prefix",)),
    "final_mix": (("prefix", "snapshots"), ("final_mix",)),
    "head_norm": (("final_mix",), ("head_in",)),
    "head": (("head_in",), ("logits",)),
}


def build(
    parameters: ModelParameters,
    config: ModelConfig,
    caches: Caches,
    *,
    page_tokens: int,
    rounding: Rounding = ROUNDED,
) -> DecodePlan:
    """A plan of any number of rows. Set ``plan.buffers.batch`` before each run."""
    specs = value_buffers(config, "T")
    buffers = Buffers()
    buffers.caches = caches
    stages = _Stages(parameters, config, buffers, page_tokens, rounding)
    steps = [_step(stages, None, "embed", specs)]
    for layer in range(config.num_layers):
        steps += [_step(stages, layer, stage, specs) for stage in layer_stages(config, layer)]
    steps += [_step(stages, None, stage, specs) for stage in ("final_mix", "head_norm", "head")]
    return DecodePlan(
        backend="all_reference",
        config=config,
        rows=None,
        rows_per_request=1,
        steps=tuple(steps),
        buffer_specs=specs,
        buffers=buffers,
    )


def _step(stages: _Stages, layer: int | None, stage: str, specs: tuple[Buffer, ...]) -> Step:
    names = {spec.name for spec in specs}
    reads, writes = STAGE_BUFFERS[stage]
    reads += _layer_reads(stages.config, layer, stage)
    # Before the first layer no snapshot exists; the mix of none is the prefix.
    has_snapshots = layer is None or layer > 0 or stage.startswith("mlp")
    skipped = set() if has_snapshots else {"snapshots"}
    return Step(
        layers=(layer,),
        covers=(stage,),
        op=stage,
        impl="reference",
        reads=tuple(name for name in reads if name in names and name not in skipped),
        writes=tuple(name for name in writes if name in names),
        run=stages.run_of(layer, stage),
        tolerance=EXACT,
    )


def _layer_reads(config: ModelConfig, layer: int | None, stage: str) -> tuple[str, ...]:
    """What a stage reads besides `STAGE_BUFFERS`, by the kind of the layer's MLP."""
    is_latent = config.moe.latent_width is not None
    if stage == "experts":
        return ("latent",) if is_latent else ("mlp_in",)
    if stage != "mlp_residual" or layer is None:
        return ()
    if config.mlp_kinds[layer] == "dense":
        return ("mlp_delta",)
    return ("routed" if is_latent else "expert_sum", "shared")


@dataclass(frozen=True)
class _Stages:
    """The stages as functions of the buffers. A method is named after the stage it runs."""

    parameters: ModelParameters
    config: ModelConfig
    buffers: Buffers
    page_tokens: int
    rounding: Rounding

    def run_of(self, layer: int | None, stage: str) -> Callable[[], None]:
        method = getattr(self, stage)
        return method if layer is None else lambda: method(layer)

    def embed(self) -> None:
        batch: StepBatch = self.buffers.batch
        ids = torch.tensor([t for request in batch.requests for t in request.token_ids])
        vocab = self.config.vocab_size
        if bool(((ids < 0) | (ids >= vocab)).any()):
            raise ValueError(f"a token id of {ids.tolist()} is outside the vocabulary of {vocab}")
        self.buffers["prefix"] = reference.embed(self.parameters, ids, self.rounding)
        self.buffers["snapshots"] = torch.empty(0, len(ids), self.config.hidden_size)

    def attn_mix(self, layer: int) -> None:
        self._mix("attn_mix", self._layer(layer).attn_mix)

    def mlp_mix(self, layer: int) -> None:
        self._mix("mlp_mix", self._layer(layer).mlp_mix)

    def final_mix(self) -> None:
        self._mix("final_mix", self.parameters.final_mix)

    def attn_norm(self, layer: int) -> None:
        self._norm("attn_in", "attn_mix", self._layer(layer).input_norm)

    def mlp_norm(self, layer: int) -> None:
        self._norm("mlp_in", "mlp_mix", self._layer(layer).post_norm)

    def head_norm(self) -> None:
        self._norm("head_in", "final_mix", self.parameters.norm)

    def kda_in_proj(self, layer: int) -> None:
        b, p = self.buffers, self._kda(layer)
        b["kda_proj"] = reference.kda_in_proj(p, b["attn_in"], self.rounding)

    def kda_conv(self, layer: int) -> None:
        b, p, windows = self.buffers, self._kda(layer), self.buffers.caches.conv[layer]
        outs = []
        for request, rows in self._requests():
            window = windows[request.slot]
            out, moved = reference.kda_conv(p, b["kda_proj"][rows], window, self.rounding)
            window.copy_(moved)
            outs.append(out)
        b["kda_qkv"] = torch.cat(outs)

    def kda_gate(self, layer: int) -> None:
        b, p, kda = self.buffers, self._kda(layer), self.config.kda
        gates = reference.kda_gate(p, kda, b["kda_proj"], self.rounding)
        b["kda_decay"], b["kda_beta"] = gates

    def kda_step(self, layer: int) -> None:
        b, states = self.buffers, self.buffers.caches.recurrent[layer]
        outs = []
        for request, rows in self._requests():
            inputs = (b["kda_qkv"][rows], b["kda_decay"][rows], b["kda_beta"][rows])
            state = states[request.slot]
            out, moved = reference.kda_step(self.config.kda, *inputs, state, self.rounding)
            state.copy_(moved)
            outs.append(out)
        b["kda_out"] = torch.cat(outs)

    def kda_out_norm(self, layer: int) -> None:
        b, p, eps = self.buffers, self._kda(layer), self.config.rms_eps
        b["attn_out"] = reference.kda_out_norm(p, b["kda_out"], b["kda_proj"], eps, self.rounding)

    def mla_in_proj(self, layer: int) -> None:
        b, p = self.buffers, self._mla(layer)
        b["mla_proj"] = reference.mla_in_proj(p, b["attn_in"], self.rounding)

    def mla_query(self, layer: int) -> None:
        b, p, mla = self.buffers, self._mla(layer), self.config.mla
        b["mla_query"] = reference.mla_query(p, mla, b["mla_proj"], self.rounding)

    def mla_insert(self, layer: int) -> None:
        b, p, mla = self.buffers, self._mla(layer), self.config.mla
        rows = reference.mla_insert(p, mla, b["mla_proj"], self.rounding)
        pages, scale = b.caches.pages[layer], b.caches.scales[layer]
        dtype: CacheDtype = "bf16" if pages.dtype == torch.bfloat16 else "fp8"
        for request, span in self._requests():
            stored = reference.store_rows(rows[span], dtype, scale)
            for offset, row in enumerate(stored):
                page, place = divmod(request.start + offset, self.page_tokens)
                pages[request.pages[page], place] = row

    def mla_attend(self, layer: int) -> None:
        b, mla = self.buffers, self.config.mla
        pages, scale = b.caches.pages[layer], b.caches.scales[layer]
        outs = []
        for request, span in self._requests():
            stored = pages[list(request.pages)].flatten(0, 1)
            end = request.start + len(request.token_ids)
            rows = reference.load_rows(stored[:end], self.rounding, scale)
            query = b["mla_query"][span]
            outs.append(reference.mla_attend(mla, query, rows, request.start, self.rounding))
        b["mla_latent"] = torch.cat(outs)

    def mla_value(self, layer: int) -> None:
        b, p, mla = self.buffers, self._mla(layer), self.config.mla
        inputs = (b["mla_latent"], b["mla_proj"])
        b["attn_out"] = reference.mla_value(p, mla, *inputs, self.rounding)

    def attn_out_proj(self, layer: int) -> None:
        b, p = self.buffers, self._layer(layer).attention
        b["attn_delta"] = reference.attn_out_proj(p, b["attn_out"], self.rounding)

    def attn_residual(self, layer: int) -> None:
        b, is_push = self.buffers, self.config.is_snapshot_layer(layer)
        inputs = (b["prefix"], b["snapshots"], b["attn_delta"], is_push)
        b["prefix"], b["snapshots"] = reference.attn_residual(*inputs, self.rounding)

    def dense_mlp(self, layer: int) -> None:
        p = self._layer(layer).mlp
        assert isinstance(p, MlpParameters)
        b, activation = self.buffers, self.config.activation
        b["mlp_delta"] = reference.dense_mlp(b["mlp_in"], p, activation, self.rounding)

    def route(self, layer: int) -> None:
        b, p = self.buffers, self._moe(layer)
        routed = reference.route(p, self.config.moe, b["mlp_in"], self.rounding)
        b["route_ids"], b["route_weights"] = routed

    def latent_down(self, layer: int) -> None:
        b, p = self.buffers, self._moe(layer)
        b["latent"] = reference.latent_down(p, b["mlp_in"], self.rounding)

    def experts(self, layer: int) -> None:
        b, p, activation = self.buffers, self._moe(layer), self.config.activation
        expert_in = b["mlp_in"] if p.latent_down is None else b["latent"]
        routing = (b["route_ids"], b["route_weights"])
        summed = reference.experts(p, activation, expert_in, *routing, self.rounding)
        b["expert_sum"] = summed

    def latent_up(self, layer: int) -> None:
        b, p, eps = self.buffers, self._moe(layer), self.config.rms_eps
        b["routed"] = reference.latent_up(p, b["expert_sum"], eps, self.rounding)

    def shared_mlp(self, layer: int) -> None:
        b, p, activation = self.buffers, self._moe(layer), self.config.activation
        b["shared"] = reference.shared_mlp(p, activation, b["mlp_in"], self.rounding)

    def mlp_residual(self, layer: int) -> None:
        b, p = self.buffers, self._layer(layer).mlp
        shared = None
        if isinstance(p, MlpParameters):
            delta = b["mlp_delta"]
        else:
            delta = b["expert_sum"] if p.latent_up is None else b["routed"]
            shared = None if p.shared is None else b["shared"]
            # A dense layer's; here the sum with the shared experts has no name of its own.
            b.pop("mlp_delta", None)
        b["prefix"] = reference.mlp_residual(b["prefix"], delta, shared, self.rounding)

    def head(self) -> None:
        b = self.buffers
        wanted = [
            row
            for request, rows in self._requests()
            if request.needs_logits
            for row in (range(rows.start, rows.stop) if request.all_logits else [rows.stop - 1])
        ]
        logits = reference.head(self.parameters, b["head_in"][wanted], self.rounding)
        b["logits"] = logits.float()

    def _mix(self, name: str, weights: MixParameters | None) -> None:
        b, eps = self.buffers, self.config.rms_eps
        b[name] = reference.mix(weights, b["prefix"], b["snapshots"], eps, self.rounding)

    def _norm(self, name: str, source: str, weight: Tensor) -> None:
        b, eps = self.buffers, self.config.rms_eps
        b[name] = reference.rms_norm(b[source], weight, eps, self.rounding)

    def _requests(self) -> Iterator[tuple[StepRequest, slice]]:
        """Each request of the step with its rows."""
        begin = 0
        for request in self.buffers.batch.requests:
            end = begin + len(request.token_ids)
            yield request, slice(begin, end)
            begin = end

    def _layer(self, layer: int) -> LayerParameters:
        return self.parameters.layers[layer]

    def _kda(self, layer: int) -> KdaParameters:
        p = self._layer(layer).attention
        assert isinstance(p, KdaParameters)
        return p

    def _mla(self, layer: int) -> MlaParameters:
        p = self._layer(layer).attention
        assert isinstance(p, MlaParameters)
        return p

    def _moe(self, layer: int) -> MoeParameters:
        p = self._layer(layer).mlp
        assert isinstance(p, MoeParameters)
        return p
