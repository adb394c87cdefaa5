"""projection in Triton against the reference: inputs of attention, and the head."""

from __future__ import annotations

import pytest
import torch
from join_cases import PROJECTIONS, chain, projection_use
from triton_cases import Case, Chain, decode_step, k3_config, make_case, verify_step

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.projection.op import ProjectionWeights
from kdecode.kernels.table import implementation

CONTEXTS = [5, 0, 17, 3, 2, 9, 1, 4]


@pytest.fixture(scope="module")
def k3() -> Case:
    return make_case(k3_config())


@pytest.mark.parametrize("stage", PROJECTIONS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_values(k3: Case, stage: str, rows: int) -> None:
    made = chain(k3, [projection_use(k3, stage)], rows)
    made.check(decode_step(CONTEXTS[:rows]))
    made.check(decode_step(CONTEXTS[::-1][:rows], turn=1))


def test_logits_are_bf16_values(k3: Case) -> None:
    made = chain(k3, [projection_use(k3, "head")], 2)
    made.check(decode_step([5, 0]))
    logits = made.buffers["logits"]
    assert torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("split", [2, 3, 4])
@pytest.mark.parametrize("rows", [2, 5])
def test_input_columns_shared_by_programs(k3: Case, rows: int, split: int) -> None:
    # 160 columns are 5 blocks of 32: the last part has fewer than the others, and of 4 there are 3.
    made = chain(k3, [projection_use(k3, "mla_in_proj")], rows, block_k=32, split=split)
    made.check(decode_step(CONTEXTS[:rows]))
    made.check(decode_step(CONTEXTS[::-1][:rows], turn=1))


def test_rows_of_a_verify_step(k3: Case) -> None:
    chain(k3, [projection_use(k3, "kda_in_proj")], 4, each=4).check(verify_step([6], 4))


def test_sixty_four_rows(k3: Case) -> None:
    chain(k3, [projection_use(k3, "kda_in_proj")], 64).check(decode_step([1] * 64))


def test_other_formats_are_an_error(k3: Case) -> None:
    made, use = Chain(k3, [projection_use(k3, "head")], 1), projection_use(k3, "head")
    tiles = Matrix("tiles", use.weights.matrix.rows, use.weights.matrix.cols, k3.packed.head.data)
    weights = ProjectionWeights(tiles, "head_in", "logits", is_head=True)
    with pytest.raises(ValueError, match="is in tiles"):
        implementation("projection", "triton").prepare(k3.problem(None, 1), weights, made.buffers)
