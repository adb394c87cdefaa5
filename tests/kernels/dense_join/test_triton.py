"""dense_up and dense_join in Triton against the reference of a layer without experts."""

from __future__ import annotations

import pytest
from join_cases import chain, join_use, mix_norm_use
from triton_cases import Use, decode_step, k3_config, linear_config, make_case

CONFIGS = {"k3": k3_config, "linear": linear_config}
CONTEXTS = [5, 0, 17, 3, 2, 9, 1, 4]


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("rows", [1, 2])
def test_with_the_mix_behind_it(form: str, rows: int) -> None:
    case = make_case(CONFIGS[form]())
    made = chain(case, [Use("dense_up", 0), join_use(case, "dense_join", 0, "attn")], rows)
    made.check(decode_step(CONTEXTS[:rows]))
    made.check(decode_step(CONTEXTS[::-1][:rows], turn=1))


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_with_the_mix_in_a_launch_of_its_own(form: str, rows: int) -> None:
    case = make_case(CONFIGS[form]())
    join = join_use(case, "dense_join", 0, None)
    made = chain(case, [Use("dense_up", 0), join, mix_norm_use(case, "attn", 0)], rows)
    made.check(decode_step([CONTEXTS[row % 4] for row in range(rows)]))
