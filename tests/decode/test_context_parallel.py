"""The standard forward on ranks that share the positions of the cache, against ranks that do not.

Everything else is the same on both sides, so that roundings of the attention are all that differs.
Ranks are threads; cache rows that nobody has written are NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from standard_rank_cases import (
    CACHE_SCALE,
    FAMILIES,
    LOGITS,
    ROWS,
    STATE,
    Outcome,
    Setting,
    run_all,
)
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.testing.compare import assert_close, bit_equal

# By family, ranks and positions in turn; pages have 16 positions where that many turns fit.
SHARES = {
    "k3": [(2, 1), (2, 16), (4, 1), (4, 16), (8, 1), (8, 16)],
    "linear": [(2, 16), (4, 1), (8, 16)],
}
Batches = tuple[StepBatch, ...]
# Runs the steps on ranks that share positions, and on others; compares; returns the two.
Compare = Callable[[str, int, Setting, Batches], tuple[list[Outcome], list[Outcome]]]


def setting_of(size: int, interleave: int, cache_dtype: str = "bf16") -> Setting:
    page_tokens = max(16, size * interleave)
    return Setting(cache_dtype=cache_dtype, page_tokens=page_tokens, interleave=interleave)


@pytest.fixture(scope="module")
def compare(request: pytest.FixtureRequest) -> Compare:
    kept: dict[tuple[str, int, Setting, Batches], list[Outcome]] = {}

    def run(
        family: str, size: int, setting: Setting, batches: Batches
    ) -> tuple[list[Outcome], list[Outcome]]:
        directory = request.getfixturevalue(FAMILIES[family])
        apart = replace(setting, interleave=None)
        key = family, size, apart, batches
        if key not in kept:
            kept[key] = run_all(directory, size, apart, batches)
        shared = run_all(directory, size, setting, batches)
        check(shared, kept[key], setting)
        return shared, kept[key]

    return run


def check(shared: list[Outcome], apart: list[Outcome], setting: Setting) -> None:
    for ours, theirs in zip(shared, apart, strict=True):
        for number, gold in enumerate(theirs.logits):
            bit_equal(ours.logits[number], shared[0].logits[number], f"logits {number}")
            bit_equal(ours.prefixes[number], shared[0].prefixes[number], f"prefix {number}")
            assert_close(ours.logits[number], gold, LOGITS, f"logits of step {number}")
        for layer, gold in theirs.recurrent.items():
            assert_close(ours.recurrent[layer], gold, STATE, f"states of layer {layer}")
            assert_close(ours.conv[layer], theirs.conv[layer], ROWS, f"windows of {layer}")
    rows, scale = ROWS, 1.0
    if setting.cache_dtype == "fp8":
        # Some are on the other side of a rounding to E4M3, which is up to an eighth of a number.
        rows, scale = replace(ROWS, rms_ratio=6e-2), CACHE_SCALE
    for layer, gold in apart[0].pages.items():
        joined = joined_pages(shared, layer) * scale
        assert_close(joined, gold.float() * scale, rows, f"pages of layer {layer}")


def joined_pages(found: list[Outcome], layer: int) -> Tensor:
    """[pages, positions of a page, width] of ranks that share the positions, as fp32."""
    count, rows, width = found[0].pages[layer].shape
    joined = torch.empty(count, rows * len(found), width)
    for outcome in found:
        places = [outcome.context.position(row) for row in range(rows)]
        joined[:, places] = outcome.pages[layer].float()
    return joined


def tokens_of(count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(300, (count,), generator=generator).tolist())


@pytest.mark.parametrize(
    ("family", "size", "interleave"),
    [(family, *share) for family, shares in SHARES.items() for share in shares],
)
def test_chunks_decode_rows_and_verify_rows(
    family: str, size: int, interleave: int, compare: Compare
) -> None:
    """Alone and beside each other; rows that a verify step wrote and that do not stay."""
    compare(family, size, setting_of(size, interleave), ())


@pytest.mark.parametrize(("size", "interleave"), [(2, 16), (8, 1)])
def test_an_fp8_cache(size: int, interleave: int, compare: Compare) -> None:
    compare("k3", size, setting_of(size, interleave, "fp8"), ())


@pytest.mark.parametrize(("size", "interleave"), [(2, 4), (8, 1)])
def test_every_length_over_two_page_borders(size: int, interleave: int, compare: Compare) -> None:
    """Token by token from the first one on, when most ranks have none."""
    batches = tuple(
        StepBatch((StepRequest((token,), place, 0, (3, 1, 4), place > 0),))
        for place, token in enumerate(tokens_of(18))
    )
    compare("k3", size, replace(setting_of(size, interleave), page_tokens=8), batches)


def test_to_chunks_the_rows_come_as_they_are(compare: Compare) -> None:
    """Bit by bit what ranks have that have all of them."""
    tokens = tokens_of(100)
    batches = tuple(
        StepBatch((StepRequest(tokens[begin:end], begin, 0, tuple(range(7)), False),))
        for begin, end in ((0, 33), (33, 47), (47, 100))
    )
    shared, apart = compare("k3", 4, setting_of(4, 2), batches)
    for number, gold in enumerate(apart[0].logits):
        bit_equal(shared[0].logits[number], gold, f"logits of chunk {number}")


@pytest.mark.parametrize("interleave", [1, 4])
def test_two_requests_share_the_pages_of_a_prefix(interleave: int, compare: Compare) -> None:
    """The second begins behind two full pages of the first, and goes on elsewhere."""
    tokens = tokens_of(60)
    batches = (
        StepBatch((StepRequest(tokens[:32], 0, 0, (6, 2), False),)),
        StepBatch((StepRequest(tokens[32:41], 32, 0, (6, 2, 3), False),)),
        StepBatch((StepRequest(tokens[41:60], 32, 1, (6, 2, 7, 8), False, is_resumed=True),)),
        StepBatch(
            (
                StepRequest(tokens[5:6], 51, 1, (6, 2, 7, 8), True),
                StepRequest(tokens[6:7], 41, 0, (6, 2, 3), True),
            )
        ),
    )
    compare("k3", 4, setting_of(4, interleave), batches)
