"""attn_join in CuTe DSL against the reference stages that it covers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from join_cases import LAYERS, cute_chain, join_use
from triton_cases import Case, decode_step, k3_config, linear_config, make_case, verify_step

from kdecode.kernels.common.cute_tiles import CuteTile
from kdecode.kernels.table import implementation
from kdecode.parallel.ranks import Ranks

pytestmark = pytest.mark.usefixtures("cute_launches")

CONTEXTS = [5, 0, 17, 3, 2, 9, 1, 4]


@pytest.fixture(scope="module")
def k3() -> Case:
    return make_case(k3_config())


@pytest.fixture(scope="module")
def linear() -> Case:
    return make_case(linear_config())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_values(k3: Case, rows: int, layer: int) -> None:
    """Layers that push a snapshot, and layers that do not."""
    made = cute_chain(k3, join_use(k3, "attn_join", layer), rows)
    made.check(decode_step(CONTEXTS[:rows]))
    made.check(decode_step(CONTEXTS[::-1][:rows], turn=1))


@pytest.mark.parametrize("tile", [(1, 1, 1, 1), (2, 2, 2, 4), (3, 4, 8, 1)])
def test_tiles(k3: Case, tile: tuple[int, ...]) -> None:
    for layer in (1, 2):
        made = cute_chain(k3, join_use(k3, "attn_join", layer), 3, tile=CuteTile(*tile))
        made.check(decode_step(CONTEXTS[:3]))


@pytest.mark.parametrize("rows", [1, 4])
def test_without_attention_residuals(linear: Case, rows: int) -> None:
    cute_chain(linear, join_use(linear, "attn_join", 3), rows).check(decode_step(CONTEXTS[:rows]))


def test_rows_of_a_verify_step(k3: Case) -> None:
    cute_chain(k3, join_use(k3, "attn_join", 1), 8, each=4).check(verify_step([6, 3], 4))


def test_what_it_refuses(k3: Case) -> None:
    module = implementation("attn_join", "cute")
    problem = k3.problem(1, 8)
    assert module.refuse(problem) == []
    (reason,) = module.refuse(replace(problem, rows=64))
    assert "take 1 to 8 rows, as many as one instruction; this has 64" in reason
    (reason,) = module.refuse(replace(problem, ranks=Ranks(1, 4)))
    assert "exchanges nothing, and there are 4 ranks" in reason
