"""Grades of single answers, from 0 to 1, each by the rule of the harness that people compare with.

Owns the rules: AIME as lm-eval grades it, multiple choice as simple-evals does, MRCR as OpenAI's
data set says. Does not know servers or where items are from.
"""

from __future__ import annotations

import difflib
import re

_LETTER = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")


def aime(reply: str, answer: str) -> float:
    """1 where the last boxed value, or else what stands between the first and last dollar sign, or
    else the whole reply, is the answer."""
    return float(_plain_number(_final_value(reply)) == _plain_number(answer))


def multiple_choice(reply: str, answer: str) -> float:
    """1 where the first `Answer: X` of the reply names the right letter, which is a capital."""
    found = _LETTER.search(reply)
    return float(found is not None and found[1] == answer)


def mrcr(reply: str, answer: str, prefix: str) -> float:
    """0 unless the reply begins with the prefix, else how alike the rest and the answer are."""
    if not reply.startswith(prefix):
        return 0.0
    texts = reply.removeprefix(prefix), answer.removeprefix(prefix)
    return difflib.SequenceMatcher(None, *texts).ratio()


def _final_value(reply: str) -> str:
    boxed = _last_boxed(reply)
    if boxed is not None:
        return boxed
    begin, end = reply.find("$"), reply.rfind("$")
    return reply[begin + 1 : end] if begin != end else reply


def _last_boxed(reply: str) -> str | None:
    """What the last \\boxed holds; None where there is none that ends."""
    if "\\boxed " in reply:
        return reply.split("\\boxed ")[-1].split("$")[0]
    begin = reply.rfind("\\boxed")
    if begin < 0 or not reply.startswith("\\boxed{", begin):
        return None
    depth = 0
    for place in range(begin, len(reply)):
        depth += (reply[place] == "{") - (reply[place] == "}")
        if reply[place] == "}" and depth == 0:
            return reply[begin + len("\\boxed{") : place]
    return None


def _plain_number(text: str) -> str:
    """A value without what does not change it: blanks, degrees, dollars, a unit, `x =`."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    for mark in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(mark, "")
    before, unit, after = text.partition("\\text{ ")
    text = before if unit and "\\text{ " not in after else text
    text = text.replace("\\%", "")
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    return text.replace(" ", "")
