"""Products of a rank's part of a matrix, with the exchange that makes the result whole.

Of one rank they are the products themselves. Which exchange a matrix needs is the caller's to know.
"""

from __future__ import annotations

import torch

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Buffers, Exchange, Problem
from kdecode.kernels.linear.product import Linear, make_linear


def exchange_of(buffers: Buffers) -> Exchange:
    """What a plan's steps exchange values through."""
    if buffers.exchange is None:
        raise ValueError("A plan of several ranks runs with an exchange; this one has none.")
    return buffers.exchange


def make_summed(matrix: Matrix, problem: Problem, buffers: Buffers) -> Linear:
    """[R, cols] bf16 -> [R, rows] bf16, of a matrix of which each rank has some columns.

    The ranks' parts are added in fp32 and rounded once.
    """
    if problem.ranks.is_alone:
        return make_linear(matrix, buffers.products)
    part = make_linear(matrix, buffers.products, torch.float32)
    return lambda x: exchange_of(buffers).reduce(part(x))


def make_gathered(matrix: Matrix, problem: Problem, buffers: Buffers) -> Linear:
    """[R, cols] bf16 -> [R, all rows] bf16, of one of which each rank has some rows."""
    product = make_linear(matrix, buffers.products)
    if problem.ranks.is_alone:
        return product
    return lambda x: exchange_of(buffers).gather(product(x))
