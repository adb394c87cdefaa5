"""mla_front against the reference stages that it covers."""

from __future__ import annotations

from dataclasses import replace

import attention_cases as cases
import pytest
from mla_front_cases import LAYER, Run, reference_values

from kdecode.kernels.common.native import Pool, supported_isas
from kdecode.kernels.mla_front import cpu
from kdecode.kernels.mla_front.op import CONTRACT
from kdecode.model import reference as ref
from kdecode.testing.compare import assert_close, bit_equal

ISAS = supported_isas()


@pytest.fixture(scope="module")
def pool():
    return Pool(2)


CONTEXTS = [[0], [15], [16, 0, 17, 62, 63, 64, 65, 130]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("form", "size", "positions"),
    [
        *(("k3", "small", positions) for positions in CONTEXTS),
        ("linear", "small", [5, 127, 128]),
        ("k3", "uneven", [70, 9]),
        ("linear", "uneven", [31]),
        ("k3", "wide", [100]),
    ],
)
def test_values_and_pages(isa, cache_dtype, form, size, positions, pool):
    config = cases.model(form, size)
    inputs = cases.inputs_of(config, LAYER, len(positions))
    run = Run(config, cases.Setting(isa, pool, cache_dtype), inputs, positions)
    before = run.pages.clone()
    run.run()
    values, inserted = reference_values(run, inputs)
    cases.compare(run.buffers, values, CONTRACT.tolerance)
    rope = config.mla.kv_rank
    for row in range(len(positions)):
        cached = run.cached(row)
        # The normed half may differ by a rounding, which is up to 1/8 of a number in fp8.
        limit = replace(CONTRACT.tolerance, rtol=0.13 if cache_dtype == "fp8" else 2e-2)
        assert_close(cached[:rope], inserted[row, :rope], limit, f"row {row} latent")
        columns = ref.mla_columns(run.parameters.attention, config.mla, run.buffers["mla_proj"])
        copied = ref.store_rows(columns.key_rest[row], cache_dtype, run.scale)
        bit_equal(cached[rope:], copied, f"row {row} rope part")
        cached.copy_(before[0, 0])  # so that only the others remain to be compared
        page = run.tables[row][positions[row] // 16]
        before[page, positions[row] % 16] = before[0, 0]
    bit_equal(run.pages, before, "other cache rows")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_a_long_context(isa, cache_dtype, pool):
    """Splits of two rounds, the last one incomplete."""
    config = cases.model("k3", "small")
    setting = cases.Setting(isa, pool, cache_dtype, page_tokens=64, max_context_tokens=4096)
    assert cpu.split_tokens(setting.max_context_tokens) == 128
    positions = [2047, 1999]
    inputs = cases.inputs_of(config, LAYER, len(positions))
    run = Run(config, setting, inputs, positions)
    run.run()
    cases.compare(run.buffers, reference_values(run, inputs)[0], CONTRACT.tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "positions",
    [
        # Around what is scored together, a round, a split (256 tokens), a page.
        [1, 3, 10, 11, 12, 13, 59, 60],
        [61, 127, 129, 254, 255, 256, 257, 258],
        [700, 1022, 1023, 1024, 1025, 1999, 2046, 2047],
        [8191],
        [6200, 8063],
    ],
)
def test_contexts_of_any_length(isa, cache_dtype, positions, pool):
    config = cases.model("k3", "small")
    setting = cases.Setting(isa, pool, cache_dtype, page_tokens=64, max_context_tokens=8192)
    assert cpu.split_tokens(setting.max_context_tokens) == 256
    inputs = cases.inputs_of(config, LAYER, len(positions))
    run = Run(config, setting, inputs, positions)
    run.run()
    cases.compare(run.buffers, reference_values(run, inputs)[0], CONTRACT.tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("size", "first"), [("small", 0), ("uneven", 60), ("uneven", 124), ("wide", 57)]
)
def test_rows_of_one_request_share_its_cache(isa, cache_dtype, size, first, pool):
    """Eight consecutive tokens in one pass, over the end of a round, a page and a split."""
    config = cases.model("k3", size)
    positions = list(range(first, first + 8))
    inputs = cases.inputs_of(config, LAYER, 8)
    setting = cases.Setting(isa, pool, cache_dtype, page_tokens=64, max_context_tokens=4096)
    together = Run(config, setting, inputs, positions, [0] * 8)
    pages = together.pages.clone()
    together.run()
    cases.compare(together.buffers, reference_values(together, inputs)[0], CONTRACT.tolerance)
    for row in range(8):
        one = slice(row, row + 1)
        cache = (pages, together.tables)
        alone = Run(config, setting, inputs[:, one], positions[one], cache=cache)
        alone.run()
        for name in CONTRACT.writes:
            bit_equal(together.buffers[name][row], alone.buffers[name][0], f"row {row} {name}")


@pytest.mark.parametrize("isa", ISAS)
def test_scores_of_any_size(isa, pool):
    """Scores of a few hundred: nothing overflows, and one token takes it all."""
    config = cases.model("linear", "small")
    inputs = cases.inputs_of(config, LAYER, 1)
    run = Run(config, cases.Setting(isa, pool), inputs, [90])
    run.stored[0] = run.stored[0] * 64
    for position, cached in enumerate(run.stored[0]):
        run.pages[run.tables[0][position // 16], position % 16] = cached
    run.run()
    cases.compare(run.buffers, reference_values(run, inputs)[0], CONTRACT.tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_a_row_does_not_depend_on_the_others(isa, cache_dtype, pool):
    """Eight rows, three of them consecutive tokens of one request, equal eight steps of one."""
    config = cases.model("k3", "uneven")
    positions, requests = [70, 3, 62, 63, 64, 0, 15, 16], [0, 1, 2, 2, 2, 3, 4, 5]
    inputs = cases.inputs_of(config, LAYER, 8)
    setting = cases.Setting(isa, pool, cache_dtype)
    together = Run(config, setting, inputs, positions, requests)
    pages = together.pages.clone()
    together.run()
    for row, request in enumerate(requests):
        cache = (pages, [together.tables[request]])
        one = slice(row, row + 1)
        alone = Run(config, setting, inputs[:, one], positions[one], cache=cache)
        alone.run()
        for name in CONTRACT.writes:
            bit_equal(together.buffers[name][row], alone.buffers[name][0], f"row {row} {name}")
    bit_equal(together.pages, pages, "pages")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("positions", [[200, 90], [30]])
def test_threads_do_not_change_a_bit(isa, positions, pool):
    """Nor does the number of heads that share a unit of work, which depends on the threads."""
    config = cases.model("k3", "uneven")
    inputs = cases.inputs_of(config, LAYER, len(positions))
    runs = []
    for threads in (Pool(1), pool, Pool(5, True)):
        runs.append(Run(config, cases.Setting(isa, threads), inputs, positions))
        runs[-1].run()
    for other in runs[1:]:
        for name in CONTRACT.writes:
            bit_equal(other.buffers[name], runs[0].buffers[name], name)


def test_refusals(pool):
    config = cases.model("k3", "small")
    mla = replace(config.mla, rope_dim=8, v_dim=0, kv_rank=1024, q_rank=7, nope_dim=512)
    problem = cases.Setting(ISAS[0], pool).problem(replace(config, mla=mla), LAYER, 0)
    reasons = cpu.refuse(replace(problem, device="cuda", cache_dtype="int4"))
    text = "\n".join(reasons)
    assert len(reasons) == 8
    for part in (
        "device is cuda",
        "this plan has 0",
        "rope_dim is 8",
        "v_dim is 0",
        "rank 7 is odd",
        "model's have 1032",
        "model's have 520",
        "int4 was asked for",
    ):
        assert part in text
