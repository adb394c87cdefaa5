"""How one engine speculates, with vLLM's names, from the JSON of ``--speculative-config``.

Owns the settings, which of them go together, and the acceptance rates of the synthetic method. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from kdecode.config import ConfigError, check_choice, check_int, check_number
from kdecode.config_draft import TapStream
from kdecode.config_json import named, parse_json_object, shown

SpeculativeMethod = Literal["dspark"]
DraftSampleMethod = Literal["greedy", "probabilistic"]
RejectionSampleMethod = Literal["standard", "block", "synthetic"]

MAX_DRAFTS = 8


@dataclass(frozen=True)
class SpeculativeConfig:
    """Every value is checked when the object is made.

    model: directory of the draft's checkpoint. num_speculative_tokens: drafts of one step.
    draft_sample_method: greedy drafts are the draft's first choices, and verification takes them
    as given; probabilistic ones are drawn from its distribution, at the request's temperature.
    rejection_sample_method: standard and block keep the target's distribution; synthetic accepts at
    stated rates whatever the drafts are, so that its text is no answer of the model.
    synthetic_acceptance_length: mean tokens of a step, the target's own one included.
    tap_stream: what the draft reads of the target; None for what its layout was trained on.
    enable_adaptive_verification: only drafts that pay are verified, by the draft's confidence and
    by costs measured when the engine is built.
    synthetic_acceptance_rates: for each draft, how often it and all before it are accepted.
    """

    model: str
    num_speculative_tokens: int
    method: SpeculativeMethod = "dspark"
    draft_sample_method: DraftSampleMethod = "greedy"
    rejection_sample_method: RejectionSampleMethod = "standard"
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    tap_stream: TapStream | None = None
    enable_adaptive_verification: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model is {shown(self.model)}; it must be the directory of a draft's checkpoint."
            )
        check_choice("method", self.method, get_args(SpeculativeMethod))
        check_int(
            "num_speculative_tokens", self.num_speculative_tokens, at_least=1, at_most=MAX_DRAFTS
        )
        check_choice("draft_sample_method", self.draft_sample_method, get_args(DraftSampleMethod))
        check_choice(
            "rejection_sample_method",
            self.rejection_sample_method,
            get_args(RejectionSampleMethod),
        )
        if self.tap_stream is not None:
            check_choice("tap_stream", self.tap_stream, get_args(TapStream))
        if not isinstance(self.enable_adaptive_verification, bool):
            raise ConfigError(
                f"enable_adaptive_verification is {self.enable_adaptive_verification!r}; it must "
                "be true or false."
            )
        if self.enable_adaptive_verification and self.is_synthetic:
            raise ConfigError(
                "enable_adaptive_verification is set, but rejection_sample_method is 'synthetic', "
                "whose rates do not follow any confidence."
            )
        self._check_synthetic()

    def _check_synthetic(self) -> None:
        length, rates = self.synthetic_acceptance_length, self.synthetic_acceptance_rates
        given = [
            f"synthetic_acceptance_{name} is {value!r}"
            for name, value in (("length", length), ("rates", rates))
            if value is not None
        ]
        if not self.is_synthetic:
            if given:
                raise ConfigError(
                    f"{given[0]}, but rejection_sample_method is "
                    f"{self.rejection_sample_method!r}; only 'synthetic' has acceptance rates."
                )
            return
        if len(given) != 1:
            found = " and ".join(given) or "neither is set"
            raise ConfigError(
                "rejection_sample_method is 'synthetic', which needs either "
                "synthetic_acceptance_length or synthetic_acceptance_rates, not both; "
                f"{found}."
            )
        if length is not None:
            _check_length(length, self.num_speculative_tokens)
        if rates is not None:
            _check_rates(rates, self.num_speculative_tokens)

    @property
    def is_synthetic(self) -> bool:
        return self.rejection_sample_method == "synthetic"

    def acceptance_rates(self) -> tuple[float, ...]:
        """Of the synthetic method: for each draft, how often it and all before it are accepted."""
        if self.synthetic_acceptance_rates is not None:
            return self.synthetic_acceptance_rates
        if self.synthetic_acceptance_length is None:
            raise ConfigError(
                f"rejection_sample_method is {self.rejection_sample_method!r}; only 'synthetic' "
                "has acceptance rates."
            )
        return schedule(self.synthetic_acceptance_length, self.num_speculative_tokens)

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> SpeculativeConfig:
        """The settings as JSON text or decoded. Raises ConfigError for one that is unknown."""
        document = _decode(source) if isinstance(source, str) else source
        known = [field.name for field in fields(cls)]
        for name, value in document.items():
            if name not in known:
                raise ConfigError(
                    f"{named(name)} is {shown(value)}, which is no setting of speculative "
                    "decoding; the "
                    f"settings are {', '.join(known)}."
                )
        for name in ("model", "num_speculative_tokens"):
            if name not in document:
                raise ConfigError(f"{name} is missing from the speculative configuration.")
        settings = dict(document)
        if isinstance(settings.get("synthetic_acceptance_rates"), list):
            settings["synthetic_acceptance_rates"] = tuple(settings["synthetic_acceptance_rates"])
        return cls(**settings)


def schedule(length: float, num_drafts: int) -> tuple[float, ...]:
    """Rates with a mean of ``length`` tokens a step, and the least variance that this mean allows.

    Ones, then the fraction, then zeros: every step has the whole number of tokens below or above.
    """
    _check_length(length, num_drafts)
    whole = math.floor(length - 1)
    rates = [1.0] * whole + [length - 1 - whole] + [0.0] * num_drafts
    return tuple(rates[:num_drafts])


def _check_length(length: float, num_drafts: int) -> None:
    check_number("synthetic_acceptance_length", length)
    if not 1 <= length <= num_drafts + 1:
        raise ConfigError(
            f"synthetic_acceptance_length is {length}; it counts the target's own token, so with "
            f"{num_drafts} drafts it must be from 1 to {num_drafts + 1}."
        )


def _check_rates(rates: tuple[float, ...], num_drafts: int) -> None:
    name = "synthetic_acceptance_rates"
    if not isinstance(rates, tuple) or len(rates) != num_drafts:
        raise ConfigError(
            f"{name} is {shown(rates)}; it must be a list of {num_drafts} numbers, one for each of "
            "num_speculative_tokens."
        )
    for place, rate in enumerate(rates):
        check_number(f"{name}[{place}]", rate)
        if not 0 <= rate <= 1:
            raise ConfigError(f"{name}[{place}] is {rate}; it must be from 0 to 1.")
        if place and rate > rates[place - 1]:
            raise ConfigError(
                f"{name}[{place}] is {rate}, above {rates[place - 1]} before it; a draft is "
                "accepted only after all before it, so the rates must not increase."
            )


def _decode(text: str) -> Mapping[str, Any]:
    return parse_json_object(text, "The speculative configuration", ConfigError)
