"""Model and engine configuration: frozen dataclasses, no torch.

Owns what the maths and the engine can be told, and the limits of every value. The released
``config.json`` is translated in `config_checkpoint`. This is the only module that reads environment
variables.
"""

from __future__ import annotations

import math
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kdecode.config_json import shown

if TYPE_CHECKING:
    from kdecode.config_speculative import SpeculativeConfig

# "gqa" only of the stack of a draft.
LayerKind = Literal["kda", "mla", "gqa"]
MlpKind = Literal["dense", "moe"]
DecodeBackend = Literal["auto", "latency_specialized"]
Isa = Literal["avx512", "avx2", "portable"]
LosslessPacking = Literal["auto", "on", "off"]
TrunkWeights = Literal["bf16", "int8", "int4"]
CacheDtype = Literal["bf16", "fp8"]
GpuKernels = Literal["triton", "cute"]
# How `torch.compile` treats weights in the arm of `kdecode bench peers` that goes through it: as
# inputs, or as constants, which it packs for its products.
CompileForm = Literal["default", "freezing"]
GpuExchange = Literal["auto", "nccl", "symmetric"]
SharedExperts = Literal["inside", "stream"]
WeightPrefetch = Literal["off", "l2"]
ExpertProducts = Literal["exact", "scaled"]

# Input columns that share one scale of an MXFP4 weight.
MXFP4_GROUP = 32

# Ranks that share one model: more than any released model has heads for.
MAX_RANKS = 128
# Exclusive: a day, of which every clock here can hold many times as much.
MAX_RANK_TIMEOUT_S = 86_400.0

# A request takes whole pages, so that a larger one would only waste memory.
MAX_PAGE_TOKENS = 65_536

# E4M3 stores 448 at most, and below 2^-6 with ever fewer bits. What a latent cache holds is of size
# one (it is RMS-normalised): with a scale outside of this it would be cut off, or be rounded away.
MIN_CACHE_SCALE, MAX_CACHE_SCALE = 1 / 448, 64.0


class ConfigError(ValueError):
    """A configuration that cannot be run; the message has the setting, its value and the limit."""


@dataclass(frozen=True)
class Activation:
    """Gated activation: ``silu(g) * u``, or SiTU with its two bounds."""

    kind: Literal["silu", "situ"]
    beta: float | None = None
    linear_beta: float | None = None


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention: H heads of K = V = head_dim channels."""

    num_heads: int
    head_dim: int
    conv_width: int
    # None selects the softplus gate; a value (K3: -5.0) the sigmoid gate with that lower bound.
    gate_lower_bound: float | None
    is_gate_full_rank: bool

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention without rotation; cache row = kv_rank + rope_dim numbers."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    has_output_gate: bool
    latent_norm_eps: float

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cache_width(self) -> int:
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class GqaConfig:
    """Grouped-query attention: query heads that share a key and value head stand together.

    cache row = rotated keys, then values, of all of their heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def cache_width(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts; ``latent_width`` None means the experts work at the model width."""

    num_experts: int
    top_k: int
    expert_width: int
    num_shared: int
    latent_width: int | None
    has_latent_norm: bool
    is_renormalized: bool
    routed_scaling: float
    expert_format: Literal["mxfp4", "bf16"]

    @property
    def shared_width(self) -> int:
        return self.num_shared * self.expert_width


@dataclass(frozen=True)
class ModelConfig:
    """Everything the maths of one model needs. Layer numbers are 0-based."""

    model_type: Literal["kimi_k3", "kimi_linear"]
    hidden_size: int
    vocab_size: int
    layer_kinds: tuple[LayerKind, ...]
    mlp_kinds: tuple[MlpKind, ...]
    dense_width: int
    activation: Activation
    rms_eps: float
    # A residual snapshot is pushed before layers 0, n, 2n, ...; None: plain pre-norm residual.
    attn_res_block: int | None
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    max_positions: int
    bos_id: int
    eos_id: int
    pad_id: int
    # Of the stack of a draft whose layers are "gqa".
    gqa: GqaConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def num_snapshots(self) -> int:
        """Snapshots of the attention residuals after the last layer (K3: 8)."""
        return self.snapshots_before(self.num_layers)

    def snapshots_before(self, layer: int) -> int:
        """Snapshots that the layers below this one have pushed: what its attention mix sees.

        Its MLP mix sees those before layer + 1, as its own attention may just have pushed one.
        """
        return 0 if self.attn_res_block is None else -(-layer // self.attn_res_block)

    def is_snapshot_layer(self, layer: int) -> bool:
        return self.attn_res_block is not None and layer % self.attn_res_block == 0

    @property
    def rotated_dim(self) -> int:
        """Channels of a head that turn by position, in a stack whose attention is rotated."""
        return self.mla.rope_dim if self.gqa is None else self.gqa.head_dim

    @classmethod
    def from_checkpoint(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """A released ``config.json``: the file, its directory, or its decoded content.

        Raises ConfigError for a missing, impossible or unknown setting.
        """
        from kdecode.config_checkpoint import parse_model, read_json

        return parse_model(source if isinstance(source, Mapping) else read_json(Path(source)))


# Settings that only plans of latency_specialized on a GPU have: what the CPU, and `auto`, lack.
_LACKING = {
    "shared_experts": ("streams", "steps"),
    "weight_prefetch": ("streams", "steps"),
    "expert_products": ("scaled products", "products"),
}


@dataclass(frozen=True)
class EngineConfig:
    """How one engine runs a model. Every value is checked when the object is made.

    device: "cpu", "cuda" or "cuda:N"; whether it exists is known to the engine, not here.
    num_threads: None for every core the process may use. isa: None for the best one there is.
    lossless_packing: whether latency_specialized keeps bf16 weights at 12 bits, of the same value
    bit by bit; "auto" where its kernels are faster then. trunk_format: what bf16 matrices are kept
    in; integers are other weights than the checkpoint's. gpu_kernels: "cute" for CuTe DSL in the
    steps of latency_specialized on CUDA that it has kernels for, in place of Triton's. Of its plans
    for one GPU also shared_experts: "stream" for launches of their own beside the others, and
    weight_prefetch: "l2" for weights that are asked for ahead; of those for any number of GPUs
    expert_products: "scaled" for MXFP4 experts by the products with scales that tensor cores of
    Blackwell have. cache_scale: scale of an fp8 latent cache (stored = x / scale) for checkpoints
    without one. max_step_tokens: tokens of a step, i.e. the largest chunk of a prompt.
    cache_budget_bytes: memory of pages and slots, None for what max_requests requests of
    max_context_tokens need. speculative: the draft model, if there is one.

    enable_prefix_caching: prefixes of prompts that are in the caches are not computed again.
    state_interval_tokens: where they can end, on its multiples; prompts are cut there with and
    without the cache, None for what a step takes. state_cache_bytes: host memory for the KDA states
    behind prefixes, None for those of four times max_requests.

    tensor_parallel_size: processes (ranks) that share the model; threads and budgets are then those
    of each. gpu_exchange: how their GPUs exchange values, by NCCL or by symmetric memory; "auto" is
    symmetric memory where all of them have it. decode_context_parallel_size: ranks that share the
    positions of the latent cache, 1 or all of them, each context_interleave_tokens positions in
    turn; page_tokens are then the rows of a page on each (see page_positions). rank_timeout_s: how
    long a rank may give no sign of life. check_ranks: after every step the ranks compare what they
    have, for debugging.
    """

    decode_backend: DecodeBackend = "auto"
    device: str = "cpu"
    num_threads: int | None = None
    isa: Isa | None = None
    lossless_packing: LosslessPacking = "auto"
    trunk_format: TrunkWeights = "bf16"
    gpu_kernels: GpuKernels = "triton"
    shared_experts: SharedExperts = "inside"
    weight_prefetch: WeightPrefetch = "off"
    expert_products: ExpertProducts = "exact"
    cache_dtype: CacheDtype = "bf16"
    cache_scale: float | None = None
    page_tokens: int = 64
    max_context_tokens: int = 4096
    max_requests: int = 8
    max_step_tokens: int = 512
    cache_budget_bytes: int | None = None
    seed: int = 0
    speculative: SpeculativeConfig | None = None
    enable_prefix_caching: bool = False
    state_interval_tokens: int | None = None
    state_cache_bytes: int | None = None
    tensor_parallel_size: int = 1
    gpu_exchange: GpuExchange = "auto"
    decode_context_parallel_size: int = 1
    context_interleave_tokens: int = 1
    rank_timeout_s: float = 5.0
    check_ranks: bool = False

    def __post_init__(self) -> None:
        check_choice("decode_backend", self.decode_backend, get_args(DecodeBackend))
        check_device_name(self.device)
        check_choice("cache_dtype", self.cache_dtype, get_args(CacheDtype))
        check_choice("lossless_packing", self.lossless_packing, get_args(LosslessPacking))
        check_choice("trunk_format", self.trunk_format, get_args(TrunkWeights))
        check_choice("gpu_kernels", self.gpu_kernels, get_args(GpuKernels))
        check_choice("shared_experts", self.shared_experts, get_args(SharedExperts))
        check_choice("weight_prefetch", self.weight_prefetch, get_args(WeightPrefetch))
        check_choice("expert_products", self.expert_products, get_args(ExpertProducts))
        if self.trunk_format != "bf16" and self.decode_backend != "latency_specialized":
            raise ConfigError(
                f"trunk_format is {self.trunk_format!r} and decode_backend "
                f"{self.decode_backend!r}; only latency_specialized has kernels for it. Its "
                "weights differ from the checkpoint's: no comparison of backends has it."
            )
        if self.device != "cpu":
            self._check_packing()
        self._check_gpu()
        if self.isa is not None:
            check_choice("isa", self.isa, get_args(Isa))
        check_int("page_tokens", self.page_tokens, at_least=1, at_most=MAX_PAGE_TOKENS)
        for name in ("max_context_tokens", "max_requests", "max_step_tokens"):
            check_int(name, getattr(self, name), at_least=1)
        for name in (
            "num_threads",
            "cache_budget_bytes",
            "state_interval_tokens",
            "state_cache_bytes",
        ):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        check_int("seed", self.seed, at_least=0)
        self._check_ranks()
        if self.cache_scale is not None:
            if self.cache_dtype != "fp8":
                raise ConfigError(
                    f"cache_scale is {self.cache_scale!r} but cache_dtype is {self.cache_dtype!r}; "
                    "only an fp8 cache has a scale."
                )
            check_cache_scale("cache_scale", self.cache_scale)

    def _check_gpu(self) -> None:
        """Raises ConfigError for what only a GPU has, and of it only latency_specialized."""
        if self.device == "cpu" and self.gpu_kernels != "triton":
            raise ConfigError(
                f"gpu_kernels is {self.gpu_kernels!r} and device {self.device!r}; they are kernels "
                "for a GPU: set gpu_kernels to 'triton', or device to 'cuda'."
            )
        for name, (lacking, kind) in _LACKING.items():
            value, plain = getattr(self, name), OF_GPU_PLANS[name]
            if value != plain and self.device == "cpu":
                raise ConfigError(
                    f"{name} is {value!r} and device {self.device!r}; only a GPU has {lacking}: "
                    f"set {name} to {plain!r}, or device to 'cuda'."
                )
            if value != plain and self.decode_backend == "auto":
                raise ConfigError(
                    f"{name} is {value!r} and decode_backend {self.decode_backend!r}; only plans "
                    f"of latency_specialized have such {kind}: set {name} to {plain!r}, or "
                    "decode_backend to 'latency_specialized'."
                )

    def _check_packing(self) -> None:
        """Raises ConfigError for formats of weights that only the kernels of the CPU read."""
        for name, plain in (("trunk_format", ("bf16",)), ("lossless_packing", ("auto", "off"))):
            if getattr(self, name) not in plain:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r} and device {self.device!r}; only the "
                    f"kernels of the CPU read such weights: set {name} to {plain[0]!r}."
                )

    def _check_ranks(self) -> None:
        """Raises ConfigError for numbers of ranks that no model could have."""
        size, parts = self.tensor_parallel_size, self.decode_context_parallel_size
        check_int("tensor_parallel_size", size, at_least=1, at_most=MAX_RANKS)
        check_int("decode_context_parallel_size", parts, at_least=1)
        check_choice("gpu_exchange", self.gpu_exchange, get_args(GpuExchange))
        if parts not in (1, size):
            raise ConfigError(
                f"decode_context_parallel_size is {parts} and tensor_parallel_size {size}; either "
                "every rank has all positions (1), or all ranks share them."
            )
        interleave = self.context_interleave_tokens
        check_int("context_interleave_tokens", interleave, at_least=1)
        if parts == 1 and interleave > 1:
            raise ConfigError(
                f"context_interleave_tokens is {interleave} and decode_context_parallel_size 1; "
                "only ranks that share positions take them in turn."
            )
        if parts > 1 and self.page_tokens % interleave:
            raise ConfigError(
                f"context_interleave_tokens is {interleave} and page_tokens {self.page_tokens}; a "
                "rank's page must hold whole turns, so that pages of all ranks end together."
            )
        if self.gpu_exchange != "auto" and (size == 1 or self.device == "cpu"):
            raise ConfigError(
                f"gpu_exchange is {self.gpu_exchange!r}, tensor_parallel_size {size} and device "
                f"{self.device!r}; it is how the GPUs of several ranks exchange values: set it to "
                "'auto', or device to 'cuda' and more ranks than one."
            )
        check_number("rank_timeout_s", self.rank_timeout_s, above=0, below=MAX_RANK_TIMEOUT_S)

    @property
    def page_positions(self) -> int:
        """Positions of a request that one page covers: page_tokens on each rank that has some."""
        return self.page_tokens * self.decode_context_parallel_size

    @property
    def changes_weights(self) -> bool:
        """Whether the engine's weights are others than the checkpoint's."""
        return self.trunk_format != "bf16"

    def resolved_threads(self) -> int:
        """Threads of one rank: as set, else its share of the cores this process may run on."""
        cores = len(os.sched_getaffinity(0))
        return self.num_threads or max(1, cores // self.tensor_parallel_size)

    def layer_cache_scale(self, layer: int, checkpoint_scale: float | None) -> float:
        """The scale of a layer's latent cache; 1 for bf16. The checkpoint's own comes first.

        Raises ConfigError for an fp8 cache that nobody has given a scale (guessing 1 costs accuracy
        in a way that no error shows), and for a scale outside its limits.
        """
        if self.cache_dtype == "bf16":
            return 1.0
        scale = checkpoint_scale if checkpoint_scale is not None else self.cache_scale
        if scale is None:
            raise ConfigError(
                f"cache_dtype is 'fp8', but the checkpoint has no k_scale for layer {layer} and "
                "cache_scale is not set. Set cache_scale to the scale of the latent cache "
                "(stored = x / scale), or cache_dtype to 'bf16'."
            )
        return check_cache_scale(f"the scale of layer {layer}'s cache", scale)


# The same settings, with what every other deployment has: their defaults.
OF_GPU_PLANS: Mapping[str, Any] = {name: getattr(EngineConfig, name) for name in _LACKING}


@dataclass(frozen=True)
class Environment:
    """What kdecode takes from the environment of the process."""

    # Where generated models are kept: KDECODE_CACHE_DIR, else XDG_CACHE_HOME/kdecode, else
    # ~/.cache/kdecode. Absolute.
    cache_dir: Path


def environment() -> Environment:
    """Reads the environment variables; nothing else in kdecode does. One that is empty is unset.

    Raises ConfigError where none of them names a place and the user has no home.
    """
    return Environment(_cache_dir())


@dataclass(frozen=True)
class TorchRun:
    """What torchrun, or whoever takes its place, tells each process that it starts.

    host: names the host that the process is on. address, port: where the processes meet.
    interface: of the network, None for the one by which the address is reached. local_rank: which
    of the processes of this host, local_size of them; None where that is not told.
    """

    rank: int
    size: int
    host: str
    address: str
    port: int
    interface: str | None
    local_rank: int | None = None
    local_size: int | None = None


def torch_run() -> TorchRun | None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; None where RANK or WORLD_SIZE is not set.

    LOCAL_RANK and LOCAL_WORLD_SIZE may be missing. Raises ConfigError where the others are, or for
    what is no number.
    """
    values = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    if not values["RANK"] or not values["WORLD_SIZE"]:
        return None
    address = os.environ.get("MASTER_ADDR", "")
    for name, value in values.items():
        if not re.fullmatch(r"[0-9]{1,9}", value):
            raise ConfigError(f"{name} is {shown(value)}; torchrun sets it to a whole number.")
    if not address:
        raise ConfigError("MASTER_ADDR is not set; torchrun sets it where it sets RANK.")
    # GROUP_RANK numbers the hosts; those who set the other four by hand do not have it.
    host = os.environ.get("GROUP_RANK") or os.uname().nodename
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or None
    rank, size, port = (int(value) for value in values.values())
    local = {name: os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    for name, value in local.items():
        if value and not re.fullmatch(r"[0-9]{1,9}", value):
            raise ConfigError(f"{name} is {shown(value)}; torchrun sets it to a whole number.")
    local_rank, local_size = (int(value) if value else None for value in local.values())
    return TorchRun(rank, size, host, address, port, interface, local_rank, local_size)


@contextmanager
def nccl_without_watchdog() -> Iterator[None]:
    """Groups of NCCL that are made in the block have no thread of torch's that watches them.

    It would end the process where an exchange fails or takes long, before anybody can say whose
    fault that is. It is set by a variable, which is read when a group is made.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def terminal_draws() -> bool:
    """TERM: whether the terminal, if there is one, can draw over a line."""
    return os.environ.get("TERM", "") not in ("", "dumb")


def _cache_dir() -> Path:
    own = os.environ.get("KDECODE_CACHE_DIR")
    if own:
        is_home = own == "~" or own.startswith("~/")
        return Path(_home() + own[1:] if is_home else own).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # By its specification a relative one is to be ignored.
    return Path(shared if os.path.isabs(shared) else f"{_home()}/.cache", "kdecode")


def _home() -> str:
    """HOME, or what the system has for the user where that is no absolute path."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            raise ConfigError(
                f"HOME is {home!r} and the system knows no home of user {os.getuid()}; name a "
                "folder for generated models with KDECODE_CACHE_DIR."
            ) from None
    return home


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {shown(value)}; it must be one of {', '.join(choices)}.")


def check_device_name(device: object) -> None:
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]*))?", device):
        raise ConfigError(f"device is {shown(device)}; it must be cpu, cuda or cuda:N.")


def check_int(name: str, value: object, *, at_least: int, at_most: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}; it must be a whole number.")
    if value < at_least or (at_most is not None and value > at_most):
        limit = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ConfigError(f"{name} is {shown(value)}; it must be {limit}.")
    return value


def check_number(
    name: str, value: object, *, above: float = -math.inf, below: float = math.inf
) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not _is_finite(value):
        raise ConfigError(f"{name} is {shown(value)}; it must be a finite number.")
    if not above < value < below:
        raise ConfigError(f"{name} is {shown(value)}; it must be above {above} and below {below}.")
    return float(value)


def _is_finite(value: int | float) -> bool:
    """Also False for a whole number that no float holds."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_cache_scale(name: str, scale: object) -> float:
    value = check_number(name, scale)
    if not MIN_CACHE_SCALE <= value <= MAX_CACHE_SCALE:
        raise ConfigError(
            f"{name} is {value}; it must be from 1/448 ({MIN_CACHE_SCALE:.6f}) to "
            f"{MAX_CACHE_SCALE:g}, so that numbers of size one are normal ones in E4M3."
        )
    return value
