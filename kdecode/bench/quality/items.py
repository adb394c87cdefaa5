"""Tasks: questions with known answers, from files that the user has, or made from a seed.

Owns the formats, the prompts and the version of each task, which is a part of every score's key.
Data sets are not shipped: AIME25 and GPQA-Diamond are others' to give out.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdecode.bench.quality import scorers
from kdecode.config_json import read_regular

MAX_FILE_BYTES = 2 << 30
_CHOICES = "ABCD"
_GPQA_PROMPT = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
    "step by step before answering.\n\n{question}\n\nA) {A}\nB) {B}\nC) {C}\nD) {D}"
)


class TaskError(ValueError):
    """A task or a file of one that cannot be used; the message says where and why."""


@dataclass(frozen=True)
class Item:
    """One question. grade: of a reply's text, from 0 to 1."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    grade: Callable[[str], float]


@dataclass(frozen=True)
class Task:
    """version: what the prompts and the rule are; scores of two versions are never compared.

    is_graded_in_steps: grades lie between 0 and 1, too, so that they cannot be counted as right.
    """

    name: str
    version: str
    items: tuple[Item, ...]
    is_graded_in_steps: bool = False


def load_task(text: str, seed: int, limit: int | None = None) -> Task:
    """NAME=FILE, or `mrcr` alone for made items. Raises TaskError."""
    name, equals, path = text.partition("=")
    if name == "mrcr" and not equals:
        return Task("mrcr", "made/1", tuple(made_mrcr(limit or 20, seed)), True)
    loaders: dict[str, tuple[str, Callable[..., Iterator[Item]], bool]] = {
        "aime25": ("lm-eval-0.4.13", _aime, False),
        "gpqa-diamond": ("simple-evals", _gpqa, False),
        "mrcr": ("openai-2025-12-05", _mrcr, True),
    }
    if name not in loaders or not path:
        raise TaskError(f"{text!r} is no task; it is one of {', '.join(loaders)}, then =FILE.")
    version, loader, in_steps = loaders[name]
    entries = _entries(Path(path))[:limit]
    if not entries:
        raise TaskError(f"{path} has no entries.")
    return Task(name, version, tuple(loader(entries, seed)), in_steps)


def _entries(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a CSV, JSON or JSON-lines file."""
    try:
        text = read_regular(path, TaskError, MAX_FILE_BYTES).decode("utf-8")
        if path.suffix == ".csv":
            return list(csv.DictReader(io.StringIO(text)))
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (UnicodeDecodeError, ValueError, csv.Error) as error:
        if isinstance(error, TaskError):
            raise
        raise TaskError(f"{path} cannot be read: {error}") from error


def _field(entry: Mapping[str, Any], place: int, *names: str) -> str:
    for name in names:
        if entry.get(name) not in (None, ""):
            return str(entry[name])
    raise TaskError(f"Entry {place + 1} has no {' or '.join(names)}.")


def _user(text: str) -> tuple[Mapping[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _aime(entries: Sequence[Mapping[str, Any]], seed: int) -> Iterator[Item]:
    for place, entry in enumerate(entries):
        problem = _field(entry, place, "problem", "question")
        answer = _field(entry, place, "answer")
        yield Item(
            f"aime{place}",
            _user(f"Question: {problem}\nAnswer:"),
            lambda reply, answer=answer: scorers.aime(reply, answer),  # type: ignore[misc]
        )


def _gpqa(entries: Sequence[Mapping[str, Any]], seed: int) -> Iterator[Item]:
    """Choices in an order that is the item's own, whatever was drawn before it."""
    for place, entry in enumerate(entries):
        question = _field(entry, place, "Question")
        right = _field(entry, place, "Correct Answer")
        wrong = [_field(entry, place, f"Incorrect Answer {number}") for number in (1, 2, 3)]
        order = sorted(
            range(4), key=lambda i: hashlib.sha256(f"{seed}/{place}/{i}".encode()).digest()
        )
        choices = [([right, *wrong])[i] for i in order]
        letter = _CHOICES[order.index(0)]
        prompt = _GPQA_PROMPT.format(question=question, **dict(zip(_CHOICES, choices, strict=True)))
        yield Item(
            f"gpqa{place}",
            _user(prompt),
            lambda reply, letter=letter: scorers.multiple_choice(reply, letter),  # type: ignore[misc]
        )


def _mrcr(entries: Sequence[Mapping[str, Any]], seed: int) -> Iterator[Item]:
    for place, entry in enumerate(entries):
        prompt = entry.get("prompt")
        try:
            messages = json.loads(prompt) if isinstance(prompt, str) else prompt
        except ValueError:
            raise TaskError(f"Entry {place + 1}: prompt is not JSON.") from None
        if not isinstance(messages, list) or not messages:
            raise TaskError(f"Entry {place + 1}: prompt has no messages.")
        answer = _field(entry, place, "answer")
        prefix = _field(entry, place, "random_string_to_prepend")
        yield _needle(f"mrcr{place}", messages, answer, prefix)


def _needle(name: str, messages: Sequence[Any], answer: str, prefix: str) -> Item:
    return Item(name, tuple(messages), lambda reply: scorers.mrcr(reply, answer, prefix))


def made_mrcr(number: int, seed: int, turns: int = 12, needles: int = 2) -> Iterator[Item]:
    """Items of MRCR's form: several texts on one subject among others, and one of them wanted."""
    subjects = ("rivers", "clocks", "apples", "trains", "letters", "winters", "bridges", "songs")
    for place in range(number):
        draw = _draws(f"{seed}/mrcr/{place}")
        wanted = subjects[next(draw) % len(subjects)]
        others = [subject for subject in subjects if subject != wanted]
        # The places of the needles among the turns, in their order.
        spots = sorted(sorted(range(turns), key=lambda _: next(draw))[:needles])
        chosen = next(draw) % needles
        messages: list[Mapping[str, Any]] = []
        answer = ""
        for turn in range(turns):
            subject = wanted if turn in spots else others[next(draw) % len(others)]
            text = " ".join(f"{subject} {next(draw) % 1000:03d}" for _ in range(12))
            messages += [
                {"role": "user", "content": f"write a poem about {subject}"},
                {"role": "assistant", "content": text},
            ]
            if turn == spots[chosen]:
                answer = text
        prefix = f"{next(draw):08x}"
        nth = ("first", "second", "third", "fourth")[chosen]
        messages.append(
            {
                "role": "user",
                "content": f"Prepend {prefix} to the {nth} poem about {wanted}. Do not include "
                "any other text in your response.",
            }
        )
        yield _needle(f"mrcr{place}", messages, prefix + answer, prefix)


def _draws(name: str) -> Iterator[int]:
    """Numbers from SHA-256, the same everywhere."""
    counter = 0
    while True:
        digest = hashlib.sha256(f"{name}/{counter}".encode()).digest()
        yield from (int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4))
        counter += 1
