"""Graded tasks: rules against the harnesses they are from, statistics, two servers."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from mock_server import CONFIG, MockServer
from simulated import simulate

from kdecode import cli
from kdecode.bench.quality import scorers
from kdecode.bench.quality.items import Task, TaskError, load_task, made_mrcr
from kdecode.bench.quality.paired import GradedReply, mcnemar, pair, score
from kdecode.bench.quality.run import (
    Asking,
    NoGradesError,
    QualityComparison,
    compare_quality,
    render,
)
from kdecode.bench.serving.client import Client
from kdecode.bench.serving.http import HttpError, Target
from kdecode.commands import compare_servers

# Replies with the grades that lm-eval's own code gave them.
LM_EVAL = json.loads((Path(__file__).parent / "lm_eval_aime_grades.json").read_text())["rows"]

# Replies with the grades that the code of simple-evals gave them, and one of its prompts.
SIMPLE_EVALS = json.loads((Path(__file__).parent / "simple_evals_gpqa_grades.json").read_text())


def test_aime_is_graded_as_lm_eval_grades_it() -> None:
    assert len(LM_EVAL) > 300
    assert 0 < sum(grade for _, _, grade in LM_EVAL) < len(LM_EVAL)
    for reply, answer, grade in LM_EVAL:
        assert scorers.aime(reply, answer) == grade, reply


def test_letters_are_graded_as_simple_evals_grades_them() -> None:
    rows = SIMPLE_EVALS["rows"]
    assert len(rows) > 700
    assert 50 < sum(grade for _, _, grade in rows) < len(rows) / 2
    for reply, answer, grade in rows:
        assert scorers.multiple_choice(reply, answer) == grade, reply
    # Not the last one counts, but the first; and a small letter is none.
    assert scorers.multiple_choice("Answer: A\nAnswer: B", "B") == 0
    assert scorers.multiple_choice("Answer: b", "B") == 0


def test_questions_are_asked_as_simple_evals_asks_them(tmp_path: Path) -> None:
    row = {**GPQA, "Question": "q0", "Incorrect Answer 3": "w3"}
    (item,) = load_task(f"gpqa-diamond={write(tmp_path / 'gpqa.csv', [row])}", 0).items
    theirs, ours = (
        text.split("\n") for text in (SIMPLE_EVALS["prompt"], item.messages[0]["content"])
    )
    # The choices have another order there; all else is the same.
    assert ours[:-4] == theirs[:-4]
    assert [line[:3] for line in ours[-4:]] == ["A) ", "B) ", "C) ", "D) "]
    assert sorted(line[3:] for line in ours[-4:]) == sorted(line[3:] for line in theirs[-4:])


def test_mrcr_needs_the_prefix_and_counts_likeness() -> None:
    assert scorers.mrcr("abc the text", "abc the text", "abc ") == 1
    assert scorers.mrcr(" abc the text", "abc the text", "abc ") == 0
    assert scorers.mrcr("abc the", "abc the text", "abc ") == pytest.approx(2 * 3 / 11)
    assert scorers.mrcr("", "abc", "abc") == 0


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


GPQA = {
    "Question": "which",
    "Correct Answer": "right",
    "Incorrect Answer 1": "w1",
    "Incorrect Answer 2": "w2",
    "Incorrect Answer 3": "w3",
}


def test_choices_have_an_order_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "gpqa.csv", [GPQA] * 30)
    task = load_task(f"gpqa-diamond={path}", 0)
    right = set()
    for item in task.items:
        text = item.messages[0]["content"]
        (letter,) = [letter for letter in "ABCD" if f"\n{letter}) right" in text]
        assert item.grade(f"Answer: {letter}") == 1
        right.add(letter)
    assert right == set("ABCD")
    # Not what was drawn before an item, but the item decides.
    few = load_task(f"gpqa-diamond={path}", 0, limit=5)
    assert [item.messages for item in few.items] == [item.messages for item in task.items[:5]]
    assert load_task(f"gpqa-diamond={path}", 1).items[0:9] != task.items[0:9]


def test_files_of_tasks(tmp_path: Path) -> None:
    aime = load_task(f"aime25={write(tmp_path / 'a.jsonl', [{'problem': '1+1', 'answer': 2}])}", 0)
    assert aime.items[0].messages[0]["content"] == "Question: 1+1\nAnswer:"
    assert aime.items[0].grade("\\boxed{2}") == 1
    rows = [
        {
            "prompt": json.dumps([{"role": "user", "content": "x"}]),
            "answer": "Zqthe text",
            "random_string_to_prepend": "Zq",
        }
    ]
    found = load_task(f"mrcr={write(tmp_path / 'm.jsonl', rows)}", 0)
    assert found.is_graded_in_steps
    assert found.items[0].grade("Zqthe text") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mmlu=x", "is no task"),
        ("aime25", "is no task"),
        ("aime25=/no/such/file", "does not exist"),
    ],
)
def test_bad_tasks(text: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_task(text, 0)


def test_bad_files_of_tasks(tmp_path: Path) -> None:
    for row, message in (({"problem": "x"}, "no answer"), ({"answer": "x"}, "no problem or")):
        with pytest.raises(TaskError, match=message):
            load_task(f"aime25={write(tmp_path / 'a.jsonl', [row])}", 0)
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(TaskError, match="cannot be read"):
        load_task(f"aime25={tmp_path / 'a.jsonl'}", 0)


def test_made_needles_have_one_answer_among_others() -> None:
    items = list(made_mrcr(5, seed=3))
    assert [i.messages for i in items] == [i.messages for i in made_mrcr(5, seed=3)]
    for item in items:
        *before, last = item.messages
        prefix = last["content"].split()[1]
        said = [m["content"] for m in before if m["role"] == "assistant"]
        grades = [item.grade(prefix + text) for text in said]
        assert max(grades) == 1
        assert grades.count(1) == 1
        subject = last["content"].split("poem about ")[1].split(".")[0]
        alike = [m for m in before if m["content"] == f"write a poem about {subject}"]
        assert len(alike) == 2
        assert item.grade(said[0]) == 0


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (1, 5, 2 * 7 / 64), (0, 6, 2 / 64), (0, 1, 1.0), (10, 2, 0.03857)],
)
def test_mcnemar_by_hand(a: int, b: int, p: float) -> None:
    assert mcnemar(a, b) == pytest.approx(min(p, 1.0), rel=1e-3)
    assert mcnemar(a, b) == mcnemar(b, a)


def graded(grades: list[float], repeat: int = 0, **changes: Any) -> list[GradedReply]:
    return [
        GradedReply(
            f"i{i}", repeat, grade, **{"is_truncated": False, "output_tokens": 1, **changes}
        )
        for i, grade in enumerate(grades)
    ]


def test_scores_and_pairs() -> None:
    a, b = graded([1.0, 0.0, 1.0, 1.0]), graded([1.0, 1.0, 0.0, 0.0])
    found = score(a)
    assert (found.mean, found.items, found.truncated) == (0.75, 4, 0)
    assert found.error == pytest.approx(0.25)
    paired = pair(a, b, in_steps=False, seed=0)
    assert (paired.only_a, paired.only_b, paired.pairs, paired.p_value) == (2, 1, 4, 1.0)
    assert paired.difference == -0.25
    assert paired.low <= -0.25 <= paired.high
    assert pair(a, b, in_steps=True, seed=0).only_a is None
    assert math.isnan(score(graded([1.0])).error)
    with pytest.raises(ValueError, match="the same items"):
        pair(a, b[:2], in_steps=False, seed=0)


def test_repetitions_of_an_item_are_one_item() -> None:
    """avg@2: the error comes from the items, not from twice as many replies."""
    once = graded([1.0, 0.0, 1.0, 0.0])
    twice = once + graded([1.0, 0.0, 1.0, 0.0], repeat=1)
    assert score(twice).error == score(once).error
    assert score(twice).items == 4


def compared(
    folder: Path, a: MockServer, b: MockServer, task: Task, **changes: Any
) -> QualityComparison:
    async def main() -> QualityComparison:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(server.running()) for server in (a, b)]
            clients = [
                Client(s.name, Target.from_url(u)) for s, u in zip((a, b), urls, strict=True)
            ]
            asking = Asking(**{"max_tokens": 8, **changes})
            return await compare_quality(clients[0], clients[1], [task], asking)

    found: QualityComparison = simulate(folder, main())
    return found


def aime_task(folder: Path, number: int = 10) -> Task:
    rows = [{"problem": f"{i}", "answer": 70} for i in range(number)]
    return load_task(f"aime25={write(folder / 'aime.jsonl', rows)}", 0)


RIGHT = {"words": {0: "\\boxed{70}"}, "max_output": 3}


def test_servers_that_answer_alike_and_not(tmp_path: Path) -> None:
    task = aime_task(tmp_path)
    server = MockServer("a", **RIGHT)
    same = compared(tmp_path, server, MockServer("b", **RIGHT), task)
    assert not same.differs
    assert same.results[0].scores[0].mean == 1
    assert "ignore_eos" not in server.log[0]
    wrong = {"words": {0: "\\boxed{71}"}, "max_output": 3}
    other = compared(tmp_path, MockServer("a", **RIGHT), MockServer("b", **wrong), task)
    assert other.differs
    assert (other.results[0].paired.only_a, other.results[0].paired.only_b) == (10, 0)
    text = render(other)
    assert "right in a alone: 10, in b alone: 0, of 10 pairs" in text
    assert "aime25 (lm-eval-0.4.13), /v1/chat/completions, max_tokens 8, temperature 0" in text
    assert "grades: differ" in text


def test_cut_replies_are_counted_apart(tmp_path: Path) -> None:
    task = aime_task(tmp_path, 4)
    # All reasoning and no answer, up to the limit.
    thinking = MockServer("b", channel="reasoning", words=RIGHT["words"])
    found = compared(tmp_path, MockServer("a", **RIGHT), thinking, task)
    assert [one.truncated for one in found.results[0].scores] == [0, 4]
    assert [one.mean for one in found.results[0].scores] == [1, 0]
    assert "the arms were cut differently often" in render(found)


def test_made_up_replies_are_not_graded(tmp_path: Path) -> None:
    task = aime_task(tmp_path, 2)
    speculative = {"method": "dspark", "synthetic_acceptance_rates": [0.5]}
    config = {**CONFIG, "speculative": speculative, "outputs_valid": False}
    with pytest.raises(NoGradesError, match="nothing to grade"):
        compared(tmp_path, MockServer("a"), MockServer("b", config=config), task)
    with pytest.raises(NoGradesError, match="no answers of its model"):
        compared(tmp_path, MockServer("a"), MockServer("b", outputs_valid=False), task)
    with pytest.raises(HttpError, match="gives no reply to aime0"):
        compared(tmp_path, MockServer("a", fail_every=1), MockServer("b"), task)


def test_repetitions_have_seeds(tmp_path: Path) -> None:
    server = MockServer("a", **RIGHT)
    asking = {"repeats": 3, "temperature": 0.6, "concurrency": 4}
    found = compared(tmp_path, server, MockServer("b", **RIGHT), aime_task(tmp_path, 2), **asking)
    assert sorted(body["seed"] for body in server.log) == [0, 0, 1, 1, 2, 2]
    assert {body["temperature"] for body in server.log} == {0.6}
    assert found.results[0].key.repeats == 3
    with pytest.raises(ValueError, match="ask once"):
        Asking(max_tokens=1, repeats=2)


@pytest.mark.parametrize(("words", "code"), [({0: "\\boxed{70}"}, 0), ({0: "no"}, 4)])
def test_from_the_command_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: dict[int, str],
    code: int,
) -> None:
    rows = [{"problem": f"{i}", "answer": 70} for i in range(8)]
    path = write(tmp_path / "aime.jsonl", rows)

    def in_simulation(main: Coroutine[Any, Any, Any]) -> Any:
        async def with_servers() -> Any:
            other = MockServer("b", words=words, max_output=2)
            async with MockServer("a", **RIGHT).running(80), other.running(80):
                return await main

        return simulate(tmp_path, with_servers())

    monkeypatch.setattr(compare_servers, "run_loop", in_simulation)
    out = tmp_path / "grades.json"
    flags = ["--url-a", "a", "--url-b", "b", "--task", f"aime25={path}", "--json", str(out)]
    assert cli.main(["compare", *flags, "--task-max-tokens", "9"]) == code
    assert "aime25" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["results"][0]["key"]["max_tokens"] == 9
    assert len(document["results"][0]["replies"][0]) == 8
