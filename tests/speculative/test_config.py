"""The speculative configuration: vLLM's names, and every refusal with its value and limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdecode.config import ConfigError
from kdecode.config_speculative import SpeculativeConfig

BASE: dict[str, Any] = {"model": "draft", "num_speculative_tokens": 7}
SYNTHETIC = {**BASE, "rejection_sample_method": "synthetic"}


def test_defaults_and_a_published_configuration() -> None:
    config = SpeculativeConfig.from_json(json.dumps({**BASE, "method": "dspark"}))
    assert config.draft_sample_method == "greedy"
    assert config.rejection_sample_method == "standard"
    published = SpeculativeConfig.from_json(
        {**SYNTHETIC, "draft_sample_method": "probabilistic", "synthetic_acceptance_length": 6}
    )
    assert published.is_synthetic
    assert published.acceptance_rates() == (1, 1, 1, 1, 1, 0, 0)


def test_rates_are_taken_as_given() -> None:
    rates = [1.0, 0.5, 0.5, 0.25, 0.0, 0.0, 0.0]
    config = SpeculativeConfig.from_json({**SYNTHETIC, "synthetic_acceptance_rates": rates})
    assert config.acceptance_rates() == tuple(rates)
    with pytest.raises(ConfigError, match="only 'synthetic' has acceptance rates"):
        SpeculativeConfig.from_json(BASE).acceptance_rates()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagle3"}, r"method is 'eagle3'; it must be one of dspark"),
        ({"model": ""}, r"model is ''; it must be the directory"),
        ({"model": 3}, r"model is 3; it must be the directory"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens is 0; it must be from 1 to 8"),
        ({"num_speculative_tokens": 9}, r"num_speculative_tokens is 9; it must be from 1 to 8"),
        ({"num_speculative_tokens": 2.0}, r"num_speculative_tokens is 2.0; it must be a whole"),
        ({"draft_sample_method": "beam"}, r"draft_sample_method is 'beam'; .* greedy, prob"),
        ({"rejection_sample_method": "typical"}, r"is 'typical'; .* standard, block, synthetic"),
        ({"tap_stream": "logits"}, r"tap_stream is 'logits'; it must be one of prefix, attn_res"),
        (
            {"enable_adaptive_verification": 1},
            r"adaptive_verification is 1; it must be true",
        ),
        (
            {
                "enable_adaptive_verification": True,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 2,
            },
            r"enable_adaptive_verification is set, but .* is 'synthetic'",
        ),
        # A setting that would have no effect is refused, not ignored.
        (
            {"draft_tensor_parallel_size": 2},
            r"draft_tensor_parallel_size is 2, which is no setting",
        ),
        (
            {"synthetic_acceptance_length": 4.5},
            r"length is 4.5, but rejection_sample_method is 'standard'",
        ),
        (
            {"rejection_sample_method": "block", "synthetic_acceptance_rates": [1.0] * 7},
            r"but rejection_sample_method is 'block'",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_json({**BASE, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"either synthetic_acceptance_length or .* neither is set"),
        (
            {"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [1] * 7},
            r"not both; synthetic_acceptance_length is 2 and synthetic_acceptance_rates is",
        ),
        ({"synthetic_acceptance_length": 0.9}, r"is 0.9; .* must be from 1 to 8"),
        ({"synthetic_acceptance_length": 8.1}, r"is 8.1; .* with 7 drafts it must be from 1 to 8"),
        ({"synthetic_acceptance_length": "6"}, r"is '6'; it must be a finite number"),
        ({"synthetic_acceptance_rates": [1.0] * 6}, r"must be a list of 7 numbers"),
        ({"synthetic_acceptance_rates": 0.5}, r"is 0.5; it must be a list of 7 numbers"),
        ({"synthetic_acceptance_rates": [1.2] + [0] * 6}, r"rates\[0\] is 1.2; .* from 0 to 1"),
        ({"synthetic_acceptance_rates": [0.5, 0.6] + [0] * 5}, r"rates\[1\] is 0.6, above 0.5"),
        ({"synthetic_acceptance_rates": [True] * 7}, r"rates\[0\] is True; it must be a finite"),
    ],
)
def test_synthetic_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_json({**SYNTHETIC, **changes})


@pytest.mark.parametrize("missing", ["model", "num_speculative_tokens"])
def test_required_settings(missing: str) -> None:
    document = {key: value for key, value in BASE.items() if key != missing}
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        SpeculativeConfig.from_json(document)


def test_text_that_is_no_object() -> None:
    with pytest.raises(ConfigError, match="not valid"):
        SpeculativeConfig.from_json("{")
    with pytest.raises(ConfigError, match="a list, not an object"):
        SpeculativeConfig.from_json("[7]")
