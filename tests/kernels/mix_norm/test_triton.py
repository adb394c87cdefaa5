"""mix_norm in Triton against the reference's mix and norm, before each kind of block."""

from __future__ import annotations

import pytest
from join_cases import chain, mix_norm_use
from triton_cases import Case, decode_step, k3_config, linear_config, make_case

from kdecode.kernels.common.mix_norm import Place


@pytest.fixture(scope="module")
def k3() -> Case:
    return make_case(k3_config())


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(
    ("place", "layer"), [("mlp", 0), ("attn", 0), ("mlp", 2), ("attn", 2), ("final", 4)]
)
def test_values(k3: Case, place: Place, layer: int, rows: int) -> None:
    made = chain(k3, [mix_norm_use(k3, place, layer)], rows)
    made.check(decode_step([5, 0, 17, 3, 2, 9, 1, 4][:rows]))
    made.check(decode_step([1, 2, 3, 7, 6, 5, 4, 3][:rows], turn=1))


@pytest.mark.parametrize("place", ["mlp", "attn", "final"])
def test_without_attention_residuals(place: Place) -> None:
    case = make_case(linear_config())
    chain(case, [mix_norm_use(case, place, 3 if place == "final" else 1)], 3).check(
        decode_step([5, 0, 17])
    )


def test_sixty_four_rows(k3: Case) -> None:
    chain(k3, [mix_norm_use(k3, "mlp", 3)], 64).check(decode_step([1] * 64))
