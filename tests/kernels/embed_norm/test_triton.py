"""embed_norm in Triton against the reference, and rows of a token that does not exist."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton_cases import (
    DEVICE,
    Case,
    Chain,
    Use,
    decode_step,
    k3_config,
    linear_config,
    make_case,
    verify_step,
)

from kdecode.kernels.common.mix_norm import mix_norm_of
from kdecode.kernels.embed_norm.op import EmbedWeights
from kdecode.kernels.table import implementation

CONFIGS = {"k3": k3_config, "linear": linear_config}


def weights_of(case: Case) -> EmbedWeights:
    then = mix_norm_of(case.config, "attn", 0, case.packed.layers[0])
    return EmbedWeights(case.packed.embed, then)


def use_of(case: Case) -> Use:
    stages = ((None, "embed"), (0, "attn_mix"), (0, "attn_norm"))
    return Use("embed_norm", 0, weights_of(case), stages)


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_values(form: str, rows: int) -> None:
    case = make_case(CONFIGS[form]())
    Chain(case, [use_of(case)], rows).check(decode_step([row % 5 for row in range(rows)]))


def test_rows_of_a_verify_step() -> None:
    case = make_case(k3_config())
    Chain(case, [use_of(case)], 8, each=4).check(verify_step([3, 9], 4))


def test_an_unknown_token_is_nan_in_its_row_only() -> None:
    case = make_case(k3_config())
    made = Chain(case, [use_of(case)], 3)
    tokens = torch.tensor([1, case.config.vocab_size, -1], dtype=torch.int32)
    made.buffers["row_token"].copy_(tokens.to(DEVICE))
    made.prepared[0].run()
    for name in ("prefix", "attn_mix", "attn_in"):
        assert made.buffers[name].isnan().all(dim=1).tolist() == [False, True, True]
        assert not made.buffers[name][0].isnan().any()


def test_snapshots_before_the_first_layer_are_a_mistake() -> None:
    case = make_case(k3_config())
    made, weights = Chain(case, [use_of(case)], 1), weights_of(case)
    then = replace(weights.then, num_snapshots=1)
    module = implementation("embed_norm", "triton")
    with pytest.raises(ValueError, match="1 snapshots before the first layer"):
        module.prepare(case.problem(0, 1), EmbedWeights(weights.table, then), made.buffers)
