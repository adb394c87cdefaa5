"""projection in CuTe DSL against the reference: inputs of attention, and the head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from join_cases import PROJECTIONS, cute_chain, projection_use
from triton_cases import Case, Chain, decode_step, k3_config, make_case, verify_step

from kdecode.kernels.common.cute_tiles import CuteTile
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.projection.op import ProjectionWeights
from kdecode.kernels.table import implementation
from kdecode.parallel.ranks import Ranks

pytestmark = pytest.mark.usefixtures("cute_launches")

CONTEXTS = [5, 0, 17, 3, 2, 9, 1, 4]


@pytest.fixture(scope="module")
def k3() -> Case:
    return make_case(k3_config())


@pytest.mark.parametrize("stage", PROJECTIONS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_values(k3: Case, stage: str, rows: int) -> None:
    made = cute_chain(k3, projection_use(k3, stage), rows)
    made.check(decode_step(CONTEXTS[:rows]))
    made.check(decode_step(CONTEXTS[::-1][:rows], turn=1))


@pytest.mark.parametrize("tile", [(1, 1, 1, 1), (2, 2, 2, 4), (3, 4, 8, 1), (1, 3, 1, 16)])
def test_tiles(k3: Case, tile: tuple[int, ...]) -> None:
    made = cute_chain(k3, projection_use(k3, "mla_in_proj"), 3, tile=CuteTile(*tile))
    made.check(decode_step(CONTEXTS[:3]))
    made.check(decode_step(CONTEXTS[::-1][:3], turn=1))


def test_logits_are_bf16_values(k3: Case) -> None:
    made = cute_chain(k3, projection_use(k3, "head"), 2)
    made.check(decode_step([5, 0]))
    logits = made.buffers["logits"]
    assert torch.equal(logits, logits.bfloat16().float())


def test_rows_of_a_verify_step(k3: Case) -> None:
    use = projection_use(k3, "kda_in_proj")
    cute_chain(k3, use, 4, each=4).check(verify_step([6], 4))


def test_what_it_refuses(k3: Case) -> None:
    module = implementation("projection", "cute")
    problem = k3.problem(1, 8)
    assert module.refuse(problem) == []
    (reason,) = module.refuse(replace(problem, rows=9))
    assert "take 1 to 8 rows, as many as one instruction; this has 9" in reason
    (reason,) = module.refuse(replace(problem, config=replace(k3.config, hidden_size=164)))
    assert "load 8 input columns at a time; there are 164" in reason
    # Of the inputs of attention each rank has columns of its own.
    ranks = Ranks(0, 2)
    assert module.refuse(replace(problem, ranks=ranks)) == []
    (reason,) = module.refuse(replace(problem, layer=None, ranks=ranks))
    assert "exchanges nothing, and there are 2 ranks" in reason


def test_matrices_that_it_cannot_read_are_an_error(k3: Case) -> None:
    module, use = implementation("projection", "cute"), projection_use(k3, "head")
    made, matrix = Chain(k3, [use], 1), use.weights.matrix
    tiles = Matrix("tiles", matrix.rows, matrix.cols, matrix.data)
    # Rows that begin 2 bytes behind a multiple of 16.
    memory = torch.zeros(matrix.data.numel() + 1, dtype=torch.bfloat16, device=matrix.data.device)
    shifted = replace(matrix, data=memory[1:].view(matrix.rows, matrix.cols))
    for wrong, words in ((tiles, "is in tiles"), (shifted, "begins 2 bytes into its memory")):
        weights = ProjectionWeights(wrong, "head_in", "logits", is_head=True)
        with pytest.raises(ValueError, match=words):
            module.prepare(k3.problem(None, 1), weights, made.buffers)
