"""Functions as operators of torch: a compiler calls them and does not look into them.

For what is no graph of torch's operators: native products, and whatever depends on numbers that
only a running step has. Knows no op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor


class OpaqueOperators:
    """The operators of one compiled plan; torch forgets them when this is gone."""

    def __init__(self) -> None:
        # A name of its own, because a process has one list of operators.
        self._name = f"kdecode_{uuid4().hex}"
        # torch has no annotations for it.
        library: Any = torch.library.Library
        self._library = library(self._name, "FRAGMENT")
        self._count = 0

    def define(
        self, num_inputs: int, run: Callable[..., Tensor], outline: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """``run`` (tensors -> a new tensor, no input changed) as an operator.

        outline: of the same inputs without data, a tensor of the shape and dtype that comes out.
        """
        name = f"op{self._count}"
        self._count += 1
        inputs = ", ".join(f"Tensor x{number}" for number in range(num_inputs))
        self._library.define(f"{name}({inputs}) -> Tensor")
        self._library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self._name}::{name}", outline, lib=self._library)
        packet = getattr(getattr(torch.ops, self._name), name)
        operator: Callable[..., Tensor] = packet.default
        return operator
