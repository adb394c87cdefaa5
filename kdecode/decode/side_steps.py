"""Steps of a CUDA plan beside its own stream: shared experts, and weights that are asked for ahead.

A plan has them where `EngineConfig` asks for them (``shared_experts``, ``weight_prefetch``), on one
GPU. Owns what they are, where each forks from the plan's stream and where that waits for it, and
why a deployment cannot have them. `latency_cuda` has the steps between them, `streams` the waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kdecode.config import OF_GPU_PLANS
from kdecode.decode.cuda_use import Use
from kdecode.decode.deployment import Deployment
from kdecode.decode.streams import MAIN
from kdecode.kernels import table
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.mix_norm import Place
from kdecode.kernels.dense_up.op import UpWeights
from kdecode.kernels.moe_join.op import MADE_CONTRACT, SharedMade
from kdecode.kernels.prefetch.op import PrefetchUse, most_bytes, refuse_arch, spans
from kdecode.kernels.projection.op import ProjectionWeights
from kdecode.model.layout import PackedKda, PackedMla, PackedMlp, PackedModel

# Each has a stream of its own: what is asked for ahead may be late, and nobody waits for it.
SHARED, PREFETCH = "shared", "prefetch"


def refuse(deployment: Deployment) -> list[str]:
    """Every reason why the steps that were asked for cannot be there."""
    moe, reasons = deployment.config.moe, []
    asked = {
        "shared_experts": deployment.shared_experts,
        "weight_prefetch": deployment.weight_prefetch,
    }
    if not deployment.ranks.is_alone:
        reasons += [
            f"{name} is {value!r} and tensor_parallel_size {deployment.ranks.size}; a plan of "
            f"several ranks has one stream: set {name} to {OF_GPU_PLANS[name]!r}."
            for name, value in asked.items()
            if value != OF_GPU_PLANS[name]
        ]
    has_shared = "moe" in deployment.config.mlp_kinds and moe.num_shared > 0
    if deployment.shared_experts == "stream" and not has_shared:
        reasons.append(
            "shared_experts is 'stream' and the model has no shared experts: set shared_experts to "
            "'inside'."
        )
    if deployment.weight_prefetch == "l2":
        reasons += refuse_arch(deployment.arch)
    return reasons


def ops(deployment: Deployment) -> tuple[str, ...]:
    """Beside those of any plan."""
    shared = ("shared_up", "shared_down") if deployment.shared_experts == "stream" else ()
    return (*shared, "prefetch") if deployment.weight_prefetch == "l2" else shared


def notes(deployment: Deployment, uses: Sequence[Use]) -> tuple[str, ...]:
    """What a plan says of them."""
    found = []
    if deployment.shared_experts == "stream":
        found.append("the shared experts have launches and a stream of their own, up to moe_join")
    asked = [use.weights for use in uses if isinstance(use.weights, PrefetchUse)]
    if asked:
        total = sum(size for use in asked for _, size in spans(use, deployment.arch))
        found.append(
            f"{len(asked)} launches ask for {total:,} bytes of weights ahead, each for at most "
            f"{most_bytes(deployment.arch):,}"
        )
    return tuple(found)


@dataclass(frozen=True)
class SideSteps:
    """Of one model. Without either setting a plan gets nothing from here and stays as it is."""

    packed: PackedModel
    has_shared: bool
    has_prefetch: bool

    @staticmethod
    def of(deployment: Deployment, packed: PackedModel) -> SideSteps:
        shared, prefetch = deployment.shared_experts, deployment.weight_prefetch
        return SideSteps(packed, shared == "stream", prefetch == "l2")

    def before_mix(self, place: Place, layer: int | None) -> Iterator[Use]:
        """Beside a mix and norm: what the block reads that begins with them."""
        if layer is None:
            yield from self._ask(None, self.packed.head)
            return
        entry = self.packed.layers[layer]
        if place == "attn":
            weights = entry.attention
            more: tuple[Matrix | None, ...] = ()
            if isinstance(weights, PackedKda):
                more = (weights.f_b, weights.g_b)
            elif isinstance(weights, PackedMla):
                more = (weights.q_b, weights.w_uk, weights.w_uv)
            yield from self._ask(layer, weights.in_proj, *more)
        elif isinstance(entry.mlp, PackedMlp):
            yield from self._ask(layer, entry.mlp.gate_up, entry.mlp.down)
        else:
            shared = entry.mlp.shared
            gate_up = None if shared is None else shared.gate_up
            yield from self._ask(layer, entry.mlp.router, entry.mlp.latent_down, gate_up)

    def before_core(self, layer: int) -> Iterator[Use]:
        """Beside the attention itself: what its output goes through."""
        yield from self._ask(layer, self.packed.layers[layer].attention.o_proj)

    def before_gate(self, layer: int) -> Iterator[Use]:
        """Beside the choice of experts: what comes behind them; and the shared ones."""
        mixture = self.packed.layers[layer].mlp
        assert not isinstance(mixture, PackedMlp)
        shared = mixture.shared
        # Of their own launches that product begins at once.
        down = None if shared is None or self.has_shared else shared.down
        yield from self._ask(layer, mixture.latent_up, down)
        if self.has_shared and shared is not None:
            yield from _shared_experts(layer, shared)

    def gate(self, use: Use) -> Use:
        """moe_gate, without the shared experts where they are beside it."""
        if not self.has_shared:
            return use
        config = self.packed.config
        writes = tuple(name for name in use.contract.writes if name != "shared_product")
        return replace(
            use,
            contract=replace(use.contract, writes=writes),
            matrices=use.matrices[:-1],
            config=replace(config, moe=replace(config.moe, num_shared=0)),
        )

    def join(self, use: Use) -> Use:
        """The end of a block; where the shared experts are beside it, moe_join waits for them."""
        if use.contract.name != "moe_join" or not self.has_shared:
            return use
        return replace(
            use,
            contract=MADE_CONTRACT,
            weights=SharedMade(use.weights),
            matrices=use.matrices[:-1],
            waits_for=(SHARED,),
        )

    def _ask(self, layer: int | None, *matrices: Matrix | None) -> Iterator[Use]:
        """Behind what the plan's stream was given so far, and so beside what it is given next."""
        found = tuple(matrix for matrix in matrices if matrix is not None)
        if self.has_prefetch and found:
            contract, weights = table.contract("prefetch"), PrefetchUse(found)
            yield Use(contract, layer, weights, (), stream=PREFETCH, waits_for=(MAIN,))


def _shared_experts(layer: int, shared: PackedMlp) -> Iterator[Use]:
    """Their product and their value, one after the other from a layer's mix on."""
    product, value = "shared_product", "shared"
    up = replace(table.contract("dense_up"), name="shared_up", writes=(product,))
    weights = UpWeights(shared.gate_up, product)
    yield Use(up, layer, weights, (), (shared.gate_up,), stream=SHARED, waits_for=(MAIN,))
    contract = table.contract("projection")
    down = replace(contract, name="shared_down", reads=(product,), writes=(value,))
    # Its scratch is that of projections, none of which runs between the mix and moe_join.
    matrix = ProjectionWeights(shared.down, product, value)
    yield Use(down, layer, matrix, (), (shared.down,), stream=SHARED)
