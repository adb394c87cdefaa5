"""What several ranks cannot run is refused when an engine is asked for, with every reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdecode import cli
from kdecode.config import ConfigError, EngineConfig
from kdecode.decode.latency_specialized import BackendRefusedError
from kdecode.engine.engine import LLM
from kdecode.parallel.ranks import RankError, Ranks

SMALL = {"max_context_tokens": 64, "max_requests": 1, "page_tokens": 16}


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """None stands for a call that must not happen."""
    monkeypatch.setattr("kdecode.engine.worker.pack_model", None)
    monkeypatch.setattr("kdecode.parallel.launch.start", None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be from 1 to 128"),
        ({"tensor_parallel_size": 129}, "tensor_parallel_size is 129; it must be from 1 to 128"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "decode_context_parallel_size is 2 and tensor_parallel_size 4",
        ),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s is 0.0; it must be above 0"),
        ({"rank_timeout_s": 1e300}, "it must be above 0 and below 86400.0"),
        ({"context_interleave_tokens": 0}, "context_interleave_tokens is 0"),
    ],
)
def test_numbers_of_ranks_that_nothing_has(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)


def test_every_part_that_cannot_be_divided_is_named(mini_16_checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        LLM(mini_16_checkpoint, tensor_parallel_size=32, **SMALL)
    text = str(raised.value)
    assert "16 KDA heads cannot be divided among 32 ranks." in text
    assert "16 MLA heads cannot be divided among 32 ranks." in text
    assert "512 columns of an expert cannot be divided among 32 ranks in groups of 32." in text


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_a_gpu_by_its_number_is_one_ranks(mini_16_checkpoint: Path, backend: Any) -> None:
    with pytest.raises((ConfigError, BackendRefusedError)) as raised:
        LLM(
            mini_16_checkpoint,
            decode_backend=backend,
            device="cuda:1",
            tensor_parallel_size=2,
            **SMALL,
        )
    assert "tensor_parallel_size is 2 and device 'cuda:1'; each rank has a GPU of its own" in (
        str(raised.value)
    )


def test_integers_of_a_part_are_not_those_of_the_whole(mini_16_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="integers of a rank's part are not those of the whole"):
        LLM(
            mini_16_checkpoint,
            decode_backend="latency_specialized",
            trunk_format="int8",
            tensor_parallel_size=2,
            **SMALL,
        )


def test_budgets_are_those_of_a_rank(mini_16_checkpoint: Path) -> None:
    """What one rank cannot hold two can, because each has half of the heads."""
    from kdecode.cache.budget import slot_bytes
    from kdecode.config import ModelConfig
    from kdecode.engine.preflight import check_description

    config = ModelConfig.from_checkpoint(mini_16_checkpoint)
    settings = {**SMALL, "cache_budget_bytes": slot_bytes(config)}
    with pytest.raises(ConfigError, match="The cache budget is"):
        check_description(config, EngineConfig(**settings))
    check_description(config, EngineConfig(**settings, tensor_parallel_size=2))


def test_the_command_refuses_before_it_starts_anything(
    mini_16_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(mini_16_checkpoint), "--prompt", "a", "--max-tokens", "2", "-tp", "3"]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert "16 KDA heads cannot be divided among 3 ranks." in error
    assert "32 experts of a layer, whose router is divided, cannot be divided" in error


def test_a_plan_of_several_ranks_is_described(
    mini_16_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank's, without starting any."""
    argv = ["plan", "--config", str(mini_16_checkpoint), "--decode-backend", "latency_specialized"]
    sizes = []
    for size in ("1", "4"):
        assert cli.main([*argv, "-tp", size]) == 0
        text = capsys.readouterr().out
        (line,) = (line for line in text.splitlines() if line.startswith("all packed weights"))
        sizes.append(float(line.split()[4]))
    assert sizes[1] < 0.5 * sizes[0]


def test_a_rank_that_is_lost_at_the_start_is_no_traceback(
    mini_16_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: object, **settings: object) -> None:
        raise RankError(1, "of 2 died with signal 9")

    monkeypatch.setattr("kdecode.parallel.launch.start", start)
    argv = ["generate", str(mini_16_checkpoint), "--prompt", "a", "--max-tokens", "2", "-tp", "2"]
    assert cli.main(argv) == 1
    error = capsys.readouterr().err
    assert "kdecode generate: error: Rank 1 of 2 died with signal 9" in error
    assert "Traceback" not in error


class LostLeader:
    """Of a group whose other rank has died while this one packs."""

    ranks = Ranks(0, 2)
    device = "cpu"
    is_closed = False

    def check(self) -> None:
        raise RankError(1, "of 2 died with signal 9")

    def close(self) -> None:
        self.is_closed = True


def test_packing_ends_when_a_rank_is_lost(
    mini_16_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With large models it takes minutes, for nothing then."""
    leader = LostLeader()
    told: list[int] = []

    def pack(reader: object, trunk: object, progress: Any, *rest: object) -> None:
        for done in range(1, 6):
            told.append(done)
            progress(done, 5)

    monkeypatch.setattr("kdecode.engine.leader.start_ranks", lambda *given: leader)
    monkeypatch.setattr("kdecode.engine.worker.pack_model", pack)
    with pytest.raises(RankError, match="Rank 1 of 2 died with signal 9"):
        LLM(mini_16_checkpoint, tensor_parallel_size=2, **SMALL)
    assert told == [1]
    assert leader.is_closed
