"""The standard forward against the rounded reference: logits, states and cache rows.

Every slot and page that a request does not own is poisoned with NaN, and so is the unwritten rest
of its own pages. A single token's logits may be far off where a rounding fell the other way early;
what is bounded tightly is the error over all tokens of a test, and over all numbers of a state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from auto_cases import (
    FP8_SCALE,
    PAGE_TOKENS,
    Model,
    Oracle,
    Request,
    Session,
    make_model,
    tokens_of,
)
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.decode import all_reference
from kdecode.decode.verify import check_steps, copy_caches
from kdecode.kernels.contract import Tolerance
from kdecode.model import reference
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import is_poison, poison_

LOGITS = Tolerance(rtol=0.0, atol=0.5, rms_ratio=2e-2)
# An E4M3 step is 16 bf16 steps.
FP8_LOGITS = Tolerance(rtol=0.0, atol=0.5, rms_ratio=6e-2)
STATE = Tolerance(rtol=0.0, atol=0.25, rms_ratio=1.5e-2)
# Over 16 prompts the ratio of the deepest layer's rows has a median of 0.005 and reaches 0.023,
# where a rounding decides which expert is chosen.
ROWS = Tolerance(rtol=0.0, atol=0.4, rms_ratio=2.5e-2)
FP8_ROWS = Tolerance(rtol=0.13, atol=0.4, rms_ratio=5e-2)
PROMPT = 70


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors; the machine's other work does not disturb one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], Model]:
    return {
        (form, trunk): make_model(form, trunk)
        for form in ("k3", "linear")
        for trunk in ("rows", "tiles")
    }


def cached_rows(session: Session, request: Request, layer: int) -> Tensor:
    """A request's cache rows [num_tokens, width], dequantised."""
    pages, scale = session.caches.pages[layer], session.caches.scales[layer]
    rows = pages[list(request.pages)].flatten(0, 1)[: request.num_tokens]
    return reference.load_rows(rows, reference.ROUNDED, scale)


def assert_state(session: Session, request: Request, oracle: Oracle) -> None:
    caches, state = session.caches, oracle.state
    assert state.num_tokens == request.num_tokens
    for layer, gold in state.recurrent.items():
        assert_close(caches.recurrent[layer][request.slot], gold, STATE, f"recurrent {layer}")
        window = caches.conv[layer][request.slot]
        assert_close(window, state.windows[layer], ROWS, f"window {layer}")
    for layer, stored in state.rows.items():
        gold = reference.load_rows(stored, reference.ROUNDED, FP8_SCALE)
        tolerance = FP8_ROWS if session.cache_dtype == "fp8" else ROWS
        assert_close(cached_rows(session, request, layer), gold, tolerance, f"rows {layer}")


@pytest.mark.parametrize("trunk", ["rows", "tiles"])
@pytest.mark.parametrize("form", ["k3", "linear"])
@pytest.mark.parametrize("chunk", [1, 63, 64, 65, PROMPT])
def test_prefill_in_chunks(
    models: dict[tuple[str, str], Model], form: str, trunk: str, chunk: int
) -> None:
    """Logits at every chunk's end, then the state: the same for any chunk size."""
    session, oracle = Session(models[form, trunk]), Oracle(models[form, trunk])
    request, tokens = session.start(skip_pages=2), tokens_of(PROMPT, seed=1)
    gold = oracle.run(tokens)
    ends = [*range(chunk, PROMPT, chunk), PROMPT]
    logits = [
        session.run((request, tokens[begin:end]))
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
    assert_close(torch.cat(logits), gold[[end - 1 for end in ends]], LOGITS, "logits")
    assert_state(session, request, oracle)


@pytest.mark.parametrize("form", ["k3", "linear"])
@pytest.mark.parametrize("trunk", ["rows", "tiles"])
def test_fp8_cache(models: dict[tuple[str, str], Model], form: str, trunk: str) -> None:
    """Prefill and decode over scattered fp8 pages."""
    model = models[form, trunk]
    session, oracle = Session(model, "fp8"), Oracle(model, "fp8")
    other = session.start(max_tokens=PAGE_TOKENS)
    request, tokens = session.start(skip_pages=1), tokens_of(100, seed=2)
    request.pages = request.pages[::-1]
    session.run((other, tokens[:5]))
    gold = oracle.run(tokens)
    logits = [session.run((request, tokens[:90]))[0]]
    for position in range(90, 100):
        logits.append(session.run((other, [5]), (request, [tokens[position]]))[1])
    assert_close(torch.stack(logits), gold[89:], FP8_LOGITS, "logits")
    assert_state(session, request, oracle)


@pytest.mark.parametrize("form", ["k3", "linear"])
@pytest.mark.parametrize("trunk", ["rows", "tiles"])
def test_mixed_batches_equal_requests_alone(
    models: dict[tuple[str, str], Model], form: str, trunk: str
) -> None:
    """Decode rows, first and later chunks, and chunks of one token, of uneven lengths, in one step.

    The order of the requests changes from step to step.
    """
    model = models[form, trunk]
    session = Session(model)
    requests = [session.start(max_tokens=96, skip_pages=gap) for gap in (0, 3, 1, 0)]
    streams = [tokens_of(60, seed=10 + i) for i in range(4)]
    oracles = [Oracle(model) for _ in requests]
    golds = [oracle.run(stream) for oracle, stream in zip(oracles, streams, strict=True)]
    steps = [
        ((0, 17),),
        ((0, 1), (1, 1)),  # a decode row beside a first chunk of one token
        ((2, 33), (0, 1), (1, 20), (3, 2)),
        ((1, 1), (3, 31), (2, 1), (0, 1)),
        ((3, 1), (2, 1), (1, 1), (0, 1)),
        ((0, 39), (3, 26), (1, 37), (2, 25)),
    ]
    actual, expected = [], []
    for step in steps:
        shares = []
        for index, count in step:
            request = requests[index]
            begin = request.num_tokens
            shares.append((request, streams[index][begin : begin + count]))
        actual.append(session.run(*shares))
        expected += [golds[index][requests[index].num_tokens - 1] for index, _ in step]
    assert_close(torch.cat(actual), torch.stack(expected), LOGITS, "logits")
    for request, oracle in zip(requests, oracles, strict=True):
        assert request.num_tokens == 60
        assert_state(session, request, oracle)


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("shares", [(1,), (40,), (1, 20)])
def test_memory_of_others_keeps_every_bit(
    models: dict[tuple[str, str], Model], cache_dtype: str, shares: tuple[int, ...]
) -> None:
    session = Session(models["k3", "rows"], cache_dtype)
    bystander = session.start(max_tokens=64)
    session.run((bystander, tokens_of(30, seed=3)))
    requests = [session.start(max_tokens=64, skip_pages=2) for _ in shares]
    before = [pool.clone() for pool in session.pools]
    session.run(
        *((request, tokens_of(n, seed=4)) for request, n in zip(requests, shares, strict=True))
    )
    slots = [request.slot for request in requests]
    pages = [page for request in requests for page in request.pages]
    for pool, old in zip(session.pools, before, strict=True):
        own = slots if pool.shape[0] == session.num_slots else pages
        others = [place for place in range(pool.shape[0]) if place not in own]
        bit_equal(pool[others], old[others], "a slot or page of nobody in the step")
    for request, tokens in zip(requests, shares, strict=True):
        for layer in session.caches.pages:
            rows = session.caches.pages[layer][list(request.pages)].flatten(0, 1)
            assert not is_poison(rows[:tokens]).any()
            assert is_poison(rows[tokens:]).all()


def test_a_prompt_of_one_token_starts_from_a_cleared_slot(
    models: dict[tuple[str, str], Model],
) -> None:
    """The slot's last owner left a state behind; one token is no decode step."""
    model = models["k3", "rows"]
    session = Session(model, num_slots=1)
    first = session.start(max_tokens=64)
    session.run((first, tokens_of(50, seed=5)))
    session.caches.free_slot(first.slot)
    session.caches.free_pages(first.pages)
    request, oracle = session.start(max_tokens=64), Oracle(model)
    assert request.slot == first.slot
    gold = oracle.run([7, 8])
    assert_close(session.run((request, [7]))[0], gold[0], LOGITS, "first token")
    assert_close(session.run((request, [8]))[0], gold[1], LOGITS, "second token")
    assert_state(session, request, oracle)


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_a_random_schedule_meets_no_poison(
    models: dict[tuple[str, str], Model], cache_dtype: str
) -> None:
    """Requests come and go; what they leave is poisoned; every logit is finite."""
    session = Session(models["k3", "rows"], cache_dtype, num_slots=3, num_pages=12)
    draw, running, finished = random.Random(0), list[Request](), 0
    while finished < 12:
        if session.caches.slot_pool.num_free and draw.random() < 0.6:
            running.append(session.start(max_tokens=4 * PAGE_TOKENS))
        chosen = [request for request in running if draw.random() < 0.7]
        shares = []
        for request in draw.sample(chosen, len(chosen)):
            room = 4 * PAGE_TOKENS - request.num_tokens
            count = min(room, draw.choice((1, 1, 1, 2, 17, 40)))
            shares.append((request, tokens_of(count, seed=draw.randrange(1000))))
        if shares:
            assert bool(torch.isfinite(session.run(*shares)).all())
        for request in [r for r in running if r.num_tokens >= 4 * PAGE_TOKENS]:
            running.remove(request)
            session.caches.free_slot(request.slot)
            session.caches.free_pages(request.pages)
            for pool in session.pools:
                is_slots = pool.shape[0] == session.num_slots
                for place in (request.slot,) if is_slots else request.pages:
                    poison_(pool[place])
            finished += 1


def test_long_chunks_expand_keys_and_values(models: dict[tuple[str, str], Model]) -> None:
    """Lengths on both sides of the choice between absorbed and expanded attention."""
    for form, trunk in (("k3", "rows"), ("k3", "tiles"), ("linear", "rows")):
        model = models[form, trunk]
        session, oracle = Session(model), Oracle(model)
        request, tokens = session.start(), tokens_of(220, seed=6)
        gold = oracle.run(tokens)
        logits = [session.run((request, tokens[a:b])) for a, b in ((0, 80), (80, 215), (215, 220))]
        assert_close(torch.cat(logits), gold[[79, 214, 219]], LOGITS, f"{form} {trunk}")
        assert_state(session, request, oracle)


@pytest.mark.parametrize("trunk", ["rows", "tiles"])
@pytest.mark.parametrize("form", ["k3", "linear"])
@pytest.mark.parametrize(("start", "chunk"), [(0, 20), (0, 60), (30, 20), (30, 60)])
def test_a_token_does_not_see_later_ones(
    models: dict[tuple[str, str], Model], form: str, trunk: str, start: int, chunk: int
) -> None:
    """Other tokens from one position on leave the cache rows of all positions before it alone.

    The chunks are on both sides of the choice of expanded attention. One key too many among dozens
    moves a row by less than the tolerances of the comparisons with the oracle.
    """
    tokens, changed = tokens_of(start + chunk, seed=7), start + chunk // 2
    runs = []
    for stream in (tokens, [*tokens[:changed], *tokens_of(len(tokens) - changed, seed=8)]):
        session = Session(models[form, trunk])
        request = session.start()
        if start:
            session.run((request, stream[:start]))
        session.run((request, stream[start:]))
        runs.append({layer: cached_rows(session, request, layer) for layer in session.caches.pages})
    for layer, rows in runs[0].items():
        other = runs[1][layer]
        # A row's products may sum in another order when other rows choose other experts.
        limit = Tolerance(rtol=8e-3, atol=1e-3, rms_ratio=1e-4)
        assert_close(other[:changed], rows[:changed], limit, f"rows {layer}")
        assert not torch.equal(other[changed:], rows[changed:])


@pytest.mark.parametrize("form", ["k3", "linear"])
def test_errors_are_those_of_the_rounding_points(
    models: dict[tuple[str, str], Model], form: str
) -> None:
    """Against fp64 without roundings, the forward is as near as the reference with them."""
    model, tokens = models[form, "rows"], tokens_of(60, seed=1)
    session, oracle = Session(model), Oracle(model)
    request = session.start()
    logits = torch.cat([session.run((request, [token])) for token in tokens])
    state = reference.RequestState.new(model.config, reference.GOLD)
    ids = torch.tensor(tokens)
    gold = reference.forward(model.parameters, model.config, ids, state, reference.GOLD)
    rounded = oracle.run(tokens)
    assert rms(logits - gold) < 1.1 * rms(rounded - gold)


@pytest.mark.parametrize("trunk", ["rows", "tiles"])
@pytest.mark.parametrize("form", ["k3", "linear"])
def test_every_buffer_is_within_its_ops_contract(
    models: dict[tuple[str, str], Model], form: str, trunk: str
) -> None:
    """Step by step against the reference plan: decode rows, then a chunk beside a decode row."""
    model = models[form, trunk]
    session, other = Session(model), Session(model)
    requests = session.start(), session.start()
    session.run((requests[0], tokens_of(20, seed=1)), (requests[1], tokens_of(9, seed=2)))
    copy_caches(session.caches, other.caches)
    oracle = all_reference.build(
        model.parameters, model.config, other.caches, page_tokens=PAGE_TOKENS
    )
    for counts in ((1, 1), (10, 1)):
        shares = zip(requests, counts, strict=True)
        batch = StepBatch(tuple(r.take(tokens_of(n, seed=n)) for r, n in shares))
        checks = list(check_steps(session.plan, oracle, batch, model.parameters))
        assert [str(check) for check in checks if not check.is_within] == []
        copy_caches(session.caches, other.caches)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
