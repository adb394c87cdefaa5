"""The target model in a form that trains: batched, chunked, differentiable.

Owns the forward pass over slots, the names of `kdecode.model.roster`, so that export is a copy.
The maths is that of `kdecode.model.reference`, against which tests compare it, with experts stacked
[E, out, in] and rounded to MXFP4 as the release stores them (gradients pass straight through).
Knows no optimiser, no data and no files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kdecode.config import MXFP4_GROUP, ModelConfig
from kdecode.kernels.common.matrix import E2M1_MAGNITUDES
from kdecode.model.reference_kda import L2_EPS
from kdecode.model.reference_moe import ROUTER_EPS
from kdecode.model.roster import default_prefix, layer_slots, model_slots

# Decay is bounded by 5 nats a token, so that exp(5 * 16) is still far inside fp32.
CHUNK_TOKENS = 16
_HALF_LIFE_DECADES = 3.0


class Target:
    """Parameters by slot, ``layers.N.`` before those of a layer, and the forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        self.config, self.device = config, device
        # dtype of products and activations; parameters are fp32.
        self.dtype = dtype
        self.parameters: dict[str, Tensor] = {}
        self.router_bias: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        for slot, shape in slot_shapes(config).items():
            value = _initial(config, slot, shape, generator).to(device)
            if slot.endswith("router_bias"):
                self.router_bias[slot] = value
            else:
                self.parameters[slot] = value.requires_grad_()

    def state(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.router_bias}

    def load(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for slot, tensor in self.state().items():
                tensor.copy_(state[slot])

    def __call__(self, ids: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        """ids [B, T], one document or many, from an empty state."""
        return _Pass(self, self._weights()).run(ids, taps)

    def _weights(self) -> dict[str, Tensor]:
        """Parameters as the forward pass uses them: experts rounded, matrices in `dtype`."""
        weights = {}
        for slot, tensor in self.parameters.items():
            if is_expert(slot):
                tensor = round_mxfp4(tensor)
            weights[slot] = tensor.to(self.dtype) if is_matrix(slot, tensor) else tensor
        return weights


@dataclass
class Forward:
    """What a pass gives: hidden [B, T, M] before the head, taps by layer, tokens by expert."""

    hidden: Tensor
    lm_head: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[str, Tensor] = field(default_factory=dict)

    def logits(self, hidden: Tensor | None = None) -> Tensor:
        rows = self.hidden if hidden is None else hidden
        return F.linear(rows, self.lm_head)


def is_expert(slot: str) -> bool:
    return slot.rsplit(".", 1)[-1] in ("w1", "w2", "w3")


def is_matrix(slot: str, tensor: Tensor) -> bool:
    """What the release stores in bf16 and multiplies by; not norms, convolutions or mixes."""
    return tensor.dim() >= 2 and not slot.endswith(("_conv", "_mix.proj"))


def slot_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape by slot; experts are one stack, a padded a_log is cut, vectors are flat."""
    prefix = default_prefix(config)
    moe, kda = config.moe, config.kda
    shapes: dict[str, tuple[int, ...]] = {
        slot: spec.shape for slot, spec in model_slots(config, prefix).items()
    }
    inner = moe.latent_width or config.hidden_size
    stacked = {
        "mlp.w1": (moe.num_experts, moe.expert_width, inner),
        "mlp.w2": (moe.num_experts, inner, moe.expert_width),
        "mlp.w3": (moe.num_experts, moe.expert_width, inner),
    }
    for layer in range(config.num_layers):
        start = f"layers.{layer}."
        slots = layer_slots(config, layer, prefix)
        for slot, spec in slots.items():
            if spec.is_optional or slot.startswith(tuple(f"{name}." for name in stacked)):
                continue
            shape = (kda.num_heads,) if slot.endswith("a_log") else spec.shape
            shapes[start + slot] = shape
        if config.mlp_kinds[layer] == "moe":
            shapes |= {start + slot: shape for slot, shape in stacked.items()}
    return {s: shape[1:] if s.endswith("_mix.proj") else shape for s, shape in shapes.items()}


def _initial(
    config: ModelConfig, slot: str, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    name = slot.rsplit(".", 1)[-1]
    if name == "a_log":
        return torch.zeros(shape)
    if name == "dt_bias":
        return _decay_bias(config, shape, generator)
    if name in ("router_bias",) or slot.endswith("_mix.proj"):
        return torch.zeros(shape)
    if name.endswith("_conv"):
        taps = torch.zeros(shape)
        taps[..., -1] = 1.0
        return taps + 0.1 * torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return torch.ones(shape)
    if name == "embed":
        return torch.randn(shape, generator=generator)
    spread = 1 / math.sqrt(shape[-1])
    if name == "lm_head":
        spread *= 0.1
    elif name in ("o_proj", "down_proj", "latent_up"):
        spread /= math.sqrt(2 * config.num_layers)
    return spread * torch.randn(shape, generator=generator)


def _decay_bias(config: ModelConfig, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Half-lives from 1 to 1000 tokens, evenly in log scale."""
    bound = config.kda.gate_lower_bound
    assert bound is not None
    half_life = 10 ** (torch.rand(shape, generator=generator) * _HALF_LIFE_DECADES)
    share = math.log(2) / half_life / -bound
    return torch.log(share / (1 - share))


def round_mxfp4(weight: Tensor) -> Tensor:
    """Nearest MXFP4 numbers as `kdecode.model.mxfp4.pack` chooses them; the gradient is 1."""
    with torch.no_grad():
        groups = weight.detach().unflatten(-1, (-1, MXFP4_GROUP))
        mantissa, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - 3 + (mantissa > 0.75))
        size = (groups / scale).abs()
        # Half steps below 2, whole ones below 4, then 4 and 6; `round` takes ties to even codes.
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        rounded = ((size / step).round() * step).clamp_max(E2M1_MAGNITUDES[-1])
        rounded = (rounded.copysign(groups) * scale).flatten(-2)
    return weight + (rounded - weight).detach()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, bound: float) -> Tensor:
    gate, up = gate.float(), up.float()
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (bound * torch.tanh(up / bound))


class _Pass:
    """One forward pass; w: weights by slot."""

    def __init__(self, target: Target, w: dict[str, Tensor]) -> None:
        self.config, self.dtype, self.w = target.config, target.dtype, w
        self.router_bias = target.router_bias

    def run(self, ids: Tensor, taps: tuple[int, ...]) -> Forward:
        config = self.config
        result = Forward(hidden=ids, lm_head=self.w["lm_head"])
        prefix = F.embedding(ids, self.w["embed"]).to(self.dtype)
        snapshots: list[Tensor] = []
        for layer in range(config.num_layers):
            start = f"layers.{layer}."
            mixed = self.mix(f"{start}attn_mix", prefix, snapshots)
            h = rms_norm(mixed, self.w[f"{start}input_norm"], config.rms_eps)
            is_kda = config.layer_kinds[layer] == "kda"
            attend = self.kda if is_kda else self.mla
            delta = attend(f"{start}attention.", h)
            if config.is_snapshot_layer(layer):
                snapshots.append(prefix)
                prefix = delta
            else:
                prefix = prefix + delta
            mixed = self.mix(f"{start}mlp_mix", prefix, snapshots)
            h = rms_norm(mixed, self.w[f"{start}post_norm"], config.rms_eps)
            prefix = prefix + self.mlp(f"{start}mlp", layer, h, result)
            if layer in taps:
                result.taps[layer] = prefix
        mixed = self.mix("final_mix", prefix, snapshots)
        result.hidden = rms_norm(mixed, self.w["norm"], config.rms_eps)
        return result

    def mix(self, slot: str, prefix: Tensor, snapshots: list[Tensor]) -> Tensor:
        if not snapshots:
            return prefix
        folded = self.w[f"{slot}.norm"] * self.w[f"{slot}.proj"]
        sources = [*snapshots, prefix]
        scores = []
        for source in sources:
            wide = source.float()
            scale = torch.rsqrt(wide.square().mean(-1) + self.config.rms_eps)
            scores.append((wide @ folded) * scale)
        weights = torch.softmax(torch.stack(scores), dim=0).to(self.dtype)
        return sum(
            (
                weight.unsqueeze(-1) * source
                for weight, source in zip(weights, sources, strict=True)
            ),
            start=torch.zeros_like(prefix),
        )

    def kda(self, start: str, h: Tensor) -> Tensor:
        kda, w = self.config.kda, self.w
        heads, dim = kda.num_heads, kda.head_dim
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
        joined = torch.cat([w[start + name] for name in names])
        proj = F.linear(h, joined)
        sizes = [3 * kda.width, kda.width, dim, heads]
        raw, gate, low, beta = torch.split(proj, sizes, dim=-1)
        taps = torch.cat([w[f"{start}{part}_conv"] for part in "qkv"])
        qkv = F.silu(causal_conv(raw, taps.squeeze(1)))
        q, k, v = qkv.unflatten(-1, (3, heads, dim)).unbind(-3)  # [B, T, H, K]
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
        f = F.linear(low, w[f"{start}f_b_proj"]).float() + w[f"{start}dt_bias"]
        amplitude = w[f"{start}a_log"].exp().unsqueeze(-1)
        assert kda.gate_lower_bound is not None
        g = kda.gate_lower_bound * torch.sigmoid(amplitude * f.unflatten(-1, (heads, dim)))
        out = delta_rule(q, k, v, g, torch.sigmoid(beta.float()))
        out = F.rms_norm(out, (dim,), w[f"{start}o_norm"], self.config.rms_eps)
        out = (out.flatten(-2) * torch.sigmoid(gate.float())).to(self.dtype)
        return F.linear(out, w[f"{start}o_proj"])

    def mla(self, start: str, h: Tensor) -> Tensor:
        mla, w = self.config.mla, self.w
        heads, eps = mla.num_heads, mla.latent_norm_eps
        low = rms_norm(F.linear(h, w[f"{start}q_a_proj"]), w[f"{start}q_a_norm"], eps)
        query = F.linear(low, w[f"{start}q_b_proj"]).unflatten(-1, (heads, mla.qk_dim))
        latent, rest = torch.split(
            F.linear(h, w[f"{start}kv_a_proj"]), [mla.kv_rank, mla.rope_dim], dim=-1
        )
        latent = rms_norm(latent, w[f"{start}kv_a_norm"], eps)
        up = F.linear(latent, w[f"{start}kv_b_proj"]).unflatten(-1, (heads, -1))
        nope, value = torch.split(up, [mla.nope_dim, mla.v_dim], dim=-1)
        rest = rest.unsqueeze(-2).expand(*nope.shape[:-1], mla.rope_dim)
        key = torch.cat([nope, rest], dim=-1)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=mla.qk_dim**-0.5,
        )
        out = out.transpose(1, 2).flatten(-2).float()
        out = out * torch.sigmoid(F.linear(h, w[f"{start}g_proj"]).float())
        return F.linear(out.to(self.dtype), w[f"{start}o_proj"])

    def mlp(self, slot: str, layer: int, h: Tensor, result: Forward) -> Tensor:
        if self.config.mlp_kinds[layer] == "dense":
            return self.gated(slot, h)
        return self.experts(slot, h, result) + self.gated(f"{slot}.shared", h)

    def gated(self, slot: str, h: Tensor) -> Tensor:
        w = self.w
        gate = F.linear(h, w[f"{slot}.gate_proj"])
        up = F.linear(h, w[f"{slot}.up_proj"])
        return F.linear(self.activate(gate, up), w[f"{slot}.down_proj"])

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        activation = self.config.activation
        assert activation.beta is not None
        assert activation.linear_beta is not None
        return situ(gate, up, activation.beta, activation.linear_beta).to(self.dtype)

    def experts(self, slot: str, h: Tensor, result: Forward) -> Tensor:
        """Rows are sorted by expert, so that every expert is three products."""
        w, moe = self.w, self.config.moe
        rows = h.flatten(0, -2)
        scores = torch.sigmoid(rows.float() @ w[f"{slot}.router"].float().T)
        chosen = (scores.detach() + self.router_bias[f"{slot}.router_bias"]).topk(moe.top_k).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + ROUTER_EPS) * moe.routed_scaling
        order = chosen.flatten().argsort(stable=True)
        loads = chosen.flatten().bincount(minlength=moe.num_experts)
        result.loads[slot] = loads
        latent = F.linear(rows, w[f"{slot}.latent_down"])
        row_of = order // moe.top_k
        parts = latent[row_of].split(loads.tolist())
        # `unbind`, because the gradient of an index would be as large as the whole stack.
        stacks = (w[f"{slot}.{name}"].unbind(0) for name in ("w1", "w3", "w2"))
        outputs = [
            F.linear(self.activate(F.linear(x, w1), F.linear(x, w3)), w2)
            for x, w1, w3, w2 in zip(parts, *stacks, strict=True)
        ]
        weighted = torch.cat(outputs).float() * weights.flatten()[order].unsqueeze(-1)
        summed = torch.zeros_like(latent, dtype=torch.float32).index_add(0, row_of, weighted)
        normed = rms_norm(summed.to(self.dtype), w[f"{slot}.latent_norm"], self.config.rms_eps)
        return F.linear(normed, w[f"{slot}.latent_up"]).view_as(h)


def causal_conv(x: Tensor, taps: Tensor) -> Tensor:
    """x [B, T, D], taps [D, W], the last for the newest sample -> [B, T, D] fp32."""
    width, tokens = taps.shape[1], x.shape[1]
    padded = F.pad(x.float(), (0, 0, width - 1, 0))
    return sum(
        (padded[:, j : j + tokens] * taps[:, j] for j in range(width)),
        start=torch.zeros_like(padded[:, :tokens]),
    )


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule from an empty state, in chunks of `CHUNK_TOKENS`.

    q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], all fp32 -> [B, T, H, V]. Pairs within a
    chunk come from products with exp(total) and exp(-total), which the gate's bound keeps finite.
    """
    tokens = q.shape[1]
    missing = -tokens % CHUNK_TOKENS
    if missing:
        # Tokens behind the last change no output before them.
        q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, 0, 0, missing))

    def chunks(x: Tensor) -> Tensor:  # -> [B, H, N, C, K]
        return x.unflatten(1, (-1, CHUNK_TOKENS)).permute(0, 3, 1, 2, 4)

    q, k, v, g = (chunks(x) for x in (q, k, v, g))
    beta = chunks(beta.unsqueeze(-1))
    total = g.cumsum(-2)
    grown, shrunk = total.exp(), (-total).exp()
    q_now, k_now, k_then = q * grown, k * grown, k * shrunk
    lower = (beta * (k_now @ k_then.mT)).tril(-1)
    identity = torch.eye(CHUNK_TOKENS, dtype=q.dtype, device=q.device)
    rhs = torch.cat([beta * v, beta * k_now], dim=-1)
    solved = torch.linalg.solve_triangular(identity + lower, rhs, upper=False, unitriangular=True)
    own, read = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    last = total[..., -1:, :]
    k_end = (k * (last - total).exp()).mT  # [B, H, N, K, C]
    kept = last.exp().mT  # [B, H, N, K, 1]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    states, corrections = [], []
    for n in range(q.shape[2]):
        states.append(state)
        u = own[:, :, n] - read[:, :, n] @ state
        corrections.append(u)
        state = kept[:, :, n] * state + k_end[:, :, n] @ u
    out = q_now @ torch.stack(states, 2) + (q_now @ k_then.mT).tril() @ torch.stack(corrections, 2)
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens]
