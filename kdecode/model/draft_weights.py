"""Reading a draft's checkpoint: canonical parameters, every tensor checked and accounted for.

The headers are checked whole before any data is read, as for the target (`model/weights.py`).
Matrices are views of the mapped file.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from kdecode.config import MlaConfig
from kdecode.config_draft import DraftConfig
from kdecode.model.draft_parameters import (
    ConfidenceParameters,
    DraftLayerParameters,
    DraftParameters,
    GqaParameters,
)
from kdecode.model.draft_roster import draft_slots
from kdecode.model.parameters import MlaParameters, MlpParameters
from kdecode.model.roster import Slots
from kdecode.model.shards import CheckpointError, Shard
from kdecode.model.weights import check_entry, open_shards


def load_draft(directory: str | Path, config: DraftConfig | None = None) -> DraftParameters:
    """The draft of a directory. Raises CheckpointError for a tensor too many, missing or odd.

    config: None for the directory's own.
    """
    directory = Path(directory)
    config = DraftConfig.from_checkpoint(directory) if config is None else config
    return _Reader(directory, config).load()


class _Reader:
    def __init__(self, directory: Path, config: DraftConfig) -> None:
        self._config = config
        self._slots: Slots = draft_slots(config)
        self._shard_of: dict[str, Shard] = open_shards(directory)[1]
        expected = {spec.name: spec for spec in self._slots.values()}
        for name, shard in self._shard_of.items():
            if name not in expected:
                raise CheckpointError(
                    f"{shard.path}, tensor {name}: the draft's configuration has no such tensor."
                )
            check_entry(shard, expected[name])
        for name, spec in expected.items():
            if name not in self._shard_of and not spec.is_optional:
                raise CheckpointError(
                    f"{directory} has no tensor {name}; the draft's configuration asks for "
                    f"{spec.dtype} of shape {list(spec.shape)}."
                )

    def load(self) -> DraftParameters:
        config = self._config
        tap_norms = None
        if config.has_tap_norms:
            places = range(len(config.taps))
            tap_norms = tuple(self._take(f"tap_norm.{place}") for place in places)
        return DraftParameters(
            embed=self._take("embed") if config.has_embed else None,
            lm_head=self._take("lm_head") if config.has_head else None,
            tap_norms=tap_norms,
            context_proj=self._take("context_proj"),
            context_norm=self._take("context_norm"),
            layers=tuple(self._layer(f"layers.{n}.") for n in range(config.num_layers)),
            norm=self._take("norm"),
            markov_in=self._take("markov_in"),
            markov_out=self._take("markov_out"),
            confidence=self._confidence() if config.has_confidence else None,
        )

    def _take(self, slot: str) -> Tensor:
        name = self._slots[slot].name
        return self._shard_of[name].tensor(name)

    def _layer(self, start: str) -> DraftLayerParameters:
        parts = ("gate_proj", "up_proj", "down_proj")
        is_mla = isinstance(self._config.attention, MlaConfig)
        attention = f"{start}attention."
        return DraftLayerParameters(
            input_norm=self._take(f"{start}input_norm"),
            post_norm=self._take(f"{start}post_norm"),
            attention=self._mla(attention) if is_mla else self._gqa(attention),
            mlp=MlpParameters(*(self._take(f"{start}mlp.{part}") for part in parts)),
        )

    def _mla(self, start: str) -> MlaParameters:
        return MlaParameters(
            q_proj=None,
            q_a_proj=self._take(f"{start}q_a_proj"),
            q_a_norm=self._take(f"{start}q_a_norm"),
            q_b_proj=self._take(f"{start}q_b_proj"),
            kv_a_proj=self._take(f"{start}kv_a_proj"),
            kv_a_norm=self._take(f"{start}kv_a_norm"),
            kv_b_proj=self._take(f"{start}kv_b_proj"),
            g_proj=None,
            o_proj=self._take(f"{start}o_proj"),
            k_scale=None,
        )

    def _gqa(self, start: str) -> GqaParameters:
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        return GqaParameters(*(self._take(f"{start}{name}") for name in names))

    def _confidence(self) -> ConfidenceParameters:
        return ConfidenceParameters(
            self._take("confidence.proj").view(-1), self._take("confidence.bias")
        )
