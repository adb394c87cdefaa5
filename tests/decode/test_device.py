"""The standard forward on a device that is not the default one, as far as it shows without a GPU.

Every tensor of the run is on the pretended device (`pretend_device.py`), where products take the
torch operators that a GPU takes. The logits are compared with the native path's on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from auto_cases import PAGE_TOKENS, Model, Session, make_model, tokens_of
from pretend_device import MixedDevicesError, PretendTensor, host, pretend_cuda
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.config import ConfigError
from kdecode.decode import all_reference
from kdecode.decode.verify import check_steps, copy_caches
from kdecode.engine.preflight import check_device
from kdecode.engine.request import SamplingParams
from kdecode.engine.sampling import Draw, sample
from kdecode.kernels.common.activation import torch_gated
from kdecode.kernels.contract import Tolerance
from kdecode.kernels.experts import torch_impl as experts
from kdecode.kernels.kda_conv import torch_impl as conv
from kdecode.kernels.kda_recurrence import torch_impl as recurrence
from kdecode.kernels.mla_attention import torch_impl as attention
from kdecode.kernels.mlp import torch_impl as mlp
from kdecode.model.layout import to_device
from kdecode.testing.compare import assert_close, bit_equal

LOGITS = Tolerance(rtol=0.0, atol=0.5, rms_ratio=2e-2)
STATE = Tolerance(rtol=0.0, atol=0.25, rms_ratio=1.5e-2)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The number of head groups of a CPU's attention follows the threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _run(model: Model, device: str, cache_dtype: str) -> tuple[Session, list[Tensor]]:
    """Chunks in both forms of attention, a mixed step, decode steps; one request's pages apart."""
    session = Session(model, cache_dtype, device=device)
    first, second = session.start(max_tokens=64, skip_pages=2), session.start(max_tokens=128)
    assert second.pages[:3] == (0, 1, 6)
    ids = tokens_of(160, seed=3)
    logits = [
        session.run((second, ids[:40])),
        session.run((second, ids[40:80])),
        session.run((second, ids[80:90])),
        session.run((first, ids[90:110]), (second, ids[110:111])),
        session.run((first, ids[111:112]), (second, ids[112:113])),
        session.run((first, ids[113:114])),
    ]
    return session, [host(rows) for rows in logits]


def _leave_out_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU takes the torch operators that another device takes, for a model in "rows"."""
    monkeypatch.setattr(conv, "_native_convolution", lambda taps: None)
    monkeypatch.setattr(recurrence, "_is_native", lambda states: False)
    monkeypatch.setattr(attention, "_is_native", lambda mla, pages: False)
    for module in (experts, mlp):
        monkeypatch.setattr(
            module, "make_gated", lambda activation, matrix, isa: torch_gated(activation, "rows")
        )


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("trunk", ["rows", "tiles"])
@pytest.mark.parametrize("form", ["k3", "linear"])
def test_standard_forward_on_another_device(
    form: str, trunk: str, cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(form, trunk)
    if (form, trunk) == ("linear", "rows"):
        _leave_out_native_code(monkeypatch)
    on_cpu, gold = _run(model, "cpu", cache_dtype)
    with pretend_cuda():
        moved = replace(model, packed=to_device(model.packed, "cuda"))
        session, logits = _run(moved, "cuda", cache_dtype)
    for name, buffer in session.plan.buffers.items():
        assert isinstance(buffer, PretendTensor), name
    pools = zip(session.pools, on_cpu.pools, strict=True)
    if (form, trunk) == ("linear", "rows"):
        # Torch's operators on both sides: only the place differs.
        for ours, wanted in zip(logits, gold, strict=True):
            bit_equal(ours, wanted, "logits")
        for ours, wanted in pools:
            bit_equal(host(ours).view(torch.uint8), wanted.view(torch.uint8), "cache")
        return
    assert_close(torch.cat(logits), torch.cat(gold), LOGITS, "logits")
    for layer, wanted in on_cpu.caches.recurrent.items():
        assert_close(host(session.caches.recurrent[layer])[:2], wanted[:2], STATE, f"state {layer}")


def test_a_plan_on_another_device_is_checked_on_the_host() -> None:
    model = make_model("k3")
    twin = Session(model)
    oracle = all_reference.build(
        model.parameters, model.config, twin.caches, page_tokens=PAGE_TOKENS
    )
    with pretend_cuda():
        session = Session(replace(model, packed=to_device(model.packed, "cuda")), device="cuda")
        request = session.start()
        session.run((request, tokens_of(20, seed=1)))
        copy_caches(session.caches, twin.caches)
        request.is_decode = True
        batch = StepBatch((request.take([5]),))
        checks = list(check_steps(session.plan, oracle, batch, model.parameters))
    assert {check.op for check in checks} >= {"experts", "mla_attention", "kda_recurrence"}
    assert [check for check in checks if not check.is_within] == []


def test_sampling_draws_the_same_token_on_another_device() -> None:
    logits = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    draws = [
        Draw(SamplingParams(temperature=temperature, top_p=0.9), seed=5, position=2, banned_ids=ids)
        for temperature, ids in ((0.0, ()), (1.0, ()), (0.0, (3, int(logits[2].argmax()))))
    ]
    gold = sample(logits, draws)
    with pretend_cuda():
        assert sample(logits.to("cuda"), draws) == gold


def test_the_pretended_device_finds_a_tensor_that_was_made_without_its_device() -> None:
    with pretend_cuda():
        x = torch.ones(3, device="cuda")
        assert str(x.device) == "cuda:0"
        assert (x + 1).tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(MixedDevicesError, match="add mixes"):
            x + torch.ones(3)
        with pytest.raises(MixedDevicesError, match="index_select"):
            x.index_select(0, torch.tensor([1]))


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device is 'cuda:1', but torch .* finds no CUDA device"):
        check_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1")
    check_device("cuda")
    with pytest.raises(ConfigError, match="device is 'cuda:2'; there are 2 CUDA devices"):
        check_device("cuda:2")
