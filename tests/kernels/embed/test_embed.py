"""The native embedding: a copy, and what becomes of an id that is not in the vocabulary."""

from __future__ import annotations

import pytest
import torch
from mlp_cases import make_buffers, make_case, plain_config, prepare

from kdecode.kernels.embed.cpu import refuse
from kdecode.model import reference
from kdecode.testing.compare import bit_equal

CASE = make_case(plain_config())


def run(tokens, pool, isa):
    buffers = make_buffers(CASE.config, len(tokens), pool)
    buffers["row_token"].copy_(torch.tensor(tokens, dtype=torch.int32))
    prepare(CASE, "embed", None, buffers, isa).run()
    return buffers["prefix"]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows_are_copied(rows, pool, isa):
    tokens = [76, 0, 5, 5, 1, 2, 75, 40][:rows]
    expected = reference.embed(CASE.parameters, torch.tensor(tokens), reference.ROUNDED)
    bit_equal(run(tokens, pool, isa), expected, "prefix")


def test_an_id_outside_the_vocabulary_reads_nothing_and_is_nan(pool, isa):
    prefix = run([3, 77, -1, 2**31 - 1, 4], pool, isa)
    assert prefix[1:4].isnan().all()
    bit_equal(prefix[[0, 4]], CASE.parameters.embed[[3, 4]], "the other rows")


def test_refuses_other_numbers_of_rows():
    assert refuse(CASE.problem(None, 64, "portable")) == []
    for rows in (0, 65):
        (reason,) = refuse(CASE.problem(None, rows, "portable"))
        assert f"has {rows}" in reason
    (reason,) = refuse(CASE.problem(None, None, "portable"))
    assert "any number" in reason
