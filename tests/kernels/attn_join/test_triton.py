"""attn_join in Triton against the reference stages that it covers."""

from __future__ import annotations

import pytest
import torch
from join_cases import LAYERS, chain, join_use, mix_norm_use
from triton_cases import Case, Chain, decode_step, k3_config, linear_config, make_case

from kdecode.kernels.table import implementation

CONTEXTS = [5, 0, 17, 3, 2, 9, 1, 4]


@pytest.fixture(scope="module")
def k3() -> Case:
    return make_case(k3_config())


@pytest.fixture(scope="module")
def linear() -> Case:
    return make_case(linear_config())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_with_the_mix_behind_it(k3: Case, rows: int, layer: int) -> None:
    made = chain(k3, [join_use(k3, "attn_join", layer), mix_norm_use(k3, "mlp", layer)], rows)
    made.check(decode_step(CONTEXTS[:rows]))
    made.check(decode_step(CONTEXTS[::-1][:rows], turn=1))


@pytest.mark.parametrize("rows", [1, 4])
def test_without_attention_residuals(linear: Case, rows: int) -> None:
    made = chain(linear, [join_use(linear, "attn_join", 3), mix_norm_use(linear, "mlp", 3)], rows)
    made.check(decode_step(CONTEXTS[:rows]))


def test_sixty_four_rows(k3: Case) -> None:
    uses = [join_use(k3, "attn_join", 2), mix_norm_use(k3, "mlp", 2)]
    chain(k3, uses, 64).check(decode_step([1] * 64))


def test_the_tiles_of_a_plan(k3: Case) -> None:
    Chain(k3, [join_use(k3, "attn_join", 0)], 1).check(decode_step([5]))


def test_rows_and_formats_that_it_refuses(k3: Case) -> None:
    module = implementation("attn_join", "triton")
    assert module.refuse(k3.problem(1, 64)) == []
    (reason,) = module.refuse(k3.problem(1, 65))
    assert "1 to 64 rows; this has 65" in reason
    made = Chain(k3, [join_use(k3, "attn_join", 1)], 2)
    made.buffers["attn_out"] = torch.empty(2, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"attn_out is torch.bfloat16 \[2, 3\]"):
        module.prepare(k3.problem(1, 2), k3.packed.layers[1], made.buffers)
