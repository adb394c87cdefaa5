"""Comparison by the numerics policy (docs/numerics.md): bounds come from an op's `Tolerance`.

Owns how two tensors, two states or two token choices are compared and what a failure says. Knows
no op and no bound of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.kernels.contract import Tolerance

_SPECIAL = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """How far ``actual`` is from ``gold``.

    ratio: largest error over its bound, the finite elements only; at most 1 is within. index: of
    that element. rms_ratio: RMS of the errors over RMS of gold.
    """

    ratio: float
    index: tuple[int, ...]
    actual: float
    gold: float
    bound: float
    rms_ratio: float


def difference(actual: Tensor, gold: Tensor, tolerance: Tolerance) -> Difference:
    """Measures, in fp64; the finite elements of ``gold`` only. Shapes must be equal."""
    a, g = _wide(actual), _wide(gold)
    is_finite = torch.isfinite(g) & torch.isfinite(a)
    zero = torch.zeros((), dtype=torch.float64)
    error = torch.where(is_finite, (a - g).abs(), zero)
    size = torch.where(is_finite, g.abs(), zero)
    bound = tolerance.atol + tolerance.rtol * size
    # A bound of 0 asks for equality: 0/0 is within, anything else is not.
    over = torch.where(error == 0, zero, error / bound)
    if over.numel() == 0:
        return Difference(0.0, (), 0.0, 0.0, 0.0, 0.0)
    worst = int(over.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), a.shape))
    total = float(error.square().sum().sqrt())
    norm = float(size.square().sum().sqrt())
    rms_ratio = 0.0 if total == 0 else (total / norm if norm > 0 else float("inf"))
    return Difference(
        float(over[index]), index, float(a[index]), float(g[index]), float(bound[index]), rms_ratio
    )


def assert_close(actual: Tensor, gold: Tensor, tolerance: Tolerance, name: str) -> Difference:
    """Raises AssertionError unless ``actual`` is within ``tolerance`` of ``gold`` in three ways.

    Every element within ``atol + rtol * |gold|``; RMS error over RMS of gold at most
    ``rms_ratio``; NaN and infinities (with their signs) in the same places. Returns what was
    measured.
    """
    if actual.shape != gold.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, wanted {tuple(gold.shape)}.")
    _assert_same_special(actual, gold, name)
    found = difference(actual, gold, tolerance)
    where = (
        f"the worst element {found.index} is {found.actual!r}, wanted {found.gold!r} within "
        f"{found.bound:.3g}"
    )
    if not found.ratio <= 1.0:
        raise AssertionError(
            f"{name}: {where}, off by {abs(found.actual - found.gold):.3g} "
            f"({found.ratio:.3g} times the bound); RMS-error ratio {found.rms_ratio:.3g}, limit "
            f"{tolerance.rms_ratio:.3g}."
        )
    if not found.rms_ratio <= tolerance.rms_ratio:
        raise AssertionError(
            f"{name}: RMS-error ratio {found.rms_ratio:.3g}, limit {tolerance.rms_ratio:.3g}; "
            f"{where}."
        )
    return found


def bit_equal(actual: Tensor, gold: Tensor, name: str) -> None:
    """Raises AssertionError unless dtype, shape and every bit agree (NaN payloads, -0 included)."""
    if actual.dtype != gold.dtype or actual.shape != gold.shape:
        raise AssertionError(
            f"{name}: {actual.dtype} {tuple(actual.shape)}, wanted {gold.dtype} "
            f"{tuple(gold.shape)}."
        )
    is_different = _bits(actual) != _bits(gold)
    count = int(is_different.sum())
    if count:
        index = tuple(int(i) for i in is_different.nonzero()[0])
        raise AssertionError(
            f"{name}: {count} of {actual.numel()} elements differ in their bits; the first, "
            f"{index}, is {_wide(actual)[index].item()!r}, wanted {_wide(gold)[index].item()!r}."
        )


def near_tie(logits: Tensor, chosen: int, tolerance: float) -> float:
    """How far the chosen token's logit lies below the largest of ``logits`` [vocab].

    Raises AssertionError above ``tolerance``, the most that two correct backends may differ by:
    a token mismatch is allowed as a near-tie only, and the caller counts it.
    """
    values = _wide(logits)
    if not bool(torch.isfinite(values).all()):
        raise AssertionError("near_tie: the logits have NaN or infinities.")
    best = int(values.argmax())
    margin = float(values[best] - values[chosen])
    if not margin <= tolerance:
        raise AssertionError(
            f"near_tie: token {chosen} (logit {float(values[chosen]):.6g}) lies {margin:.3g} below "
            f"token {best} (logit {float(values[best]):.6g}); the limit is {tolerance:.3g}."
        )
    return margin


def state_close(
    actual: Mapping[str, Tensor],
    gold: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
    name: str,
) -> None:
    """`assert_close` for every tensor of a cached state; the same keys are required on both sides.

    ``tolerances`` has a bound for each key's kind, the part of it before the first dot
    ("recurrent.3" -> "recurrent").
    """
    if actual.keys() != gold.keys():
        raise AssertionError(
            f"{name}: tensors {sorted(actual.keys())}, wanted {sorted(gold.keys())}."
        )
    for key in gold:
        assert_close(actual[key], gold[key], tolerances[key.split(".")[0]], f"{name}.{key}")


def has_same_special(actual: Tensor, gold: Tensor) -> bool:
    """Whether NaN and both infinities are in the same places."""
    a, g = _wide(actual), _wide(gold)
    return all(torch.equal(test(a), test(g)) for test in _SPECIAL.values())


def _assert_same_special(actual: Tensor, gold: Tensor, name: str) -> None:
    a, g = _wide(actual), _wide(gold)
    for kind, test in _SPECIAL.items():
        is_different = test(a) != test(g)
        if bool(is_different.any()):
            index = tuple(int(i) for i in is_different.nonzero()[0])
            raise AssertionError(
                f"{name}: {kind} positions differ in {int(is_different.sum())} of {a.numel()} "
                f"elements; the first, {index}, is {a[index].item()!r}, wanted "
                f"{g[index].item()!r}."
            )


def _wide(x: Tensor) -> Tensor:
    return x.detach().cpu().to(torch.float64)


def _bits(x: Tensor) -> Tensor:
    x = x.detach().cpu().contiguous()
    return x if x.dtype == torch.bool else x.view(_INTEGER_OF_SIZE[x.element_size()])
