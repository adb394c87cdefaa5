"""dense_up and dense_join in Triton against the reference of a layer without experts."""

from __future__ import annotations

import pytest
from join_cases import chain, join_use, mix_norm_use
from triton_cases import Use, decode_step, k3_config, linear_config, make_case

CONFIGS = {"k3": k3_config, "linear": linear_config}
CONTEXTS = [5, 0, 17, 3, 2, 9, 1, 4]


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
def test_values(form: str, rows: int) -> None:
    case = make_case(CONFIGS[form]())
    join = join_use(case, "dense_join", 0)
    made = chain(case, [Use("dense_up", 0), join, mix_norm_use(case, "attn", 0)], rows)
    made.check(decode_step([CONTEXTS[row % 4] for row in range(rows)]))


def test_two_steps_of_one_plan() -> None:
    case = make_case(k3_config())
    made = chain(case, [Use("dense_up", 0), join_use(case, "dense_join", 0)], 2)
    made.check(decode_step(CONTEXTS[:2]))
    made.check(decode_step(CONTEXTS[2:4], turn=1))
