"""The standard forward through `torch.compile`, as an arm beside the same forward as it is.

Owns the check that has to pass before it is timed: on the work that will be timed, its choices
follow those of the forward that is not compiled, by the rule for two backends (docs/numerics.md).
What can be compiled is the engine's to know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kdecode.bench.agreement import AgreementStep, NearTie
from kdecode.bench.decode_speed import Window
from kdecode.bench.llama_cpp import PeerError
from kdecode.bench.peer_arms import KdecodeArm, Work
from kdecode.config import CompileForm
from kdecode.engine.engine import LLM
from kdecode.engine.request import RequestError, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

# Steps that are compared, of all requests together, however short the timed replies are.
LEAST_POSITIONS = 16


@dataclass(frozen=True)
class Drift:
    """Logits behind the same tokens, of two forwards. rms_ratio: of the differences to the spread.

    near_ties, real: positions with another choice, by `agreement.NearTie`. worst_margin: of them.
    """

    positions: int
    near_ties: int
    real: int
    worst_margin: float
    rms_ratio: float


class CompiledArm(KdecodeArm):
    """Decode steps of as many requests as the work has go through `torch.compile`.

    Raises CompileError where they cannot, and PeerError where what comes out is something else.
    """

    def __init__(self, llm: LLM, form: CompileForm, near_tie: NearTie, work: Work) -> None:
        super().__init__(llm, work)
        self.name += f", torch.compile {form}"
        prompts = work.prompts(llm.tokenizer.num_base)
        params = SamplingParams(max_tokens=checked_tokens(work), ignore_eos=True)
        replies = [output.token_ids for output in llm.generate(prompts, params)]
        wanted = _decoded(follow(llm, prompts, replies))
        self.compile_s = llm.compile_decode(work.rows, form)
        self.near_tie = near_tie
        self.drift = drift(wanted, _decoded(follow(llm, prompts, replies)), near_tie)
        if self.drift.real:
            raise PeerError(
                f"{self.drift.real} of {self.drift.positions} choices are not those of the same "
                f"forward without it, by up to {self.drift.worst_margin:.2f} of a logit; logits "
                f"differ by {self.drift.rms_ratio:.1%} of their spread"
            )
        self.settings: Mapping[str, Any] = {
            **self.settings,
            "compiled in": f"{self.compile_s:.0f} s",
            "drift": f"{self.drift.rms_ratio:.1%} of the logits' spread, "
            f"{self.drift.near_ties} near-ties (up to {near_tie.rtol:g} of the largest logit) and "
            f"no other difference in {self.drift.positions} positions",
        }

    def decoded(self) -> Window:
        """Raises PeerError where steps that count were not the compiled ones."""
        before = self._llm.stats()["compiled_steps"]
        window = super().decoded()
        steps = self._llm.stats()["compiled_steps"] - before
        if steps * self._work.rows < window.tokens:
            raise PeerError(
                f"{self.name}: {window.tokens} tokens were timed, and {steps} steps of "
                f"{self._work.rows} rows ran compiled."
            )
        return window

    def facts(self) -> dict[str, Any]:
        """For a report."""
        return {
            "compile_s": self.compile_s,
            "near_tie": asdict(self.near_tie),
            "drift": asdict(self.drift),
        }


def checked_tokens(work: Work) -> int:
    """Tokens of each reply that the check follows: those of the work, or more of a short one."""
    # The first token of a reply comes from its prompt, by a step that is not compiled.
    return max(work.output_tokens, 1 - (-LEAST_POSITIONS // work.rows))


def follow(
    llm: LLM, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]
) -> list[list[Tensor]]:
    """Logits in front of every token of the replies, all requests decoded together.

    They are bf16 values, and are kept as such.
    """
    numbers = [
        llm.add_request(
            prompt, SamplingParams(max_tokens=len(reply), ignore_eos=True), forced_ids=tuple(reply)
        )
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    found: dict[int, list[Tensor]] = {number: [] for number in numbers}
    while llm.loop.scheduler.has_work:
        for event in llm.loop.step():
            if event.logits is not None:
                found[event.number].append(event.logits.bfloat16())
    errors = [error for number in numbers if (error := llm.loop.collect(number).error)]
    if errors:
        raise RequestError(f"A reply could not be followed: {errors[0]}")
    return list(found.values())


def drift(
    wanted: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Tensor]], near_tie: NearTie
) -> Drift:
    """How far ``found`` is from ``wanted``, request by request and position by position."""
    pairs = [
        (a.double(), b.double())
        for lines, others in zip(wanted, found, strict=True)
        for a, b in zip(lines, others, strict=True)
    ]
    steps = []
    for a, b in pairs:
        choice, best = int(a.argmax()), int(b.argmax())
        if choice != best:
            top = float(b[best])
            steps.append(AgreementStep(best, top - float(b[choice]), top))
    classes = [near_tie.classify(step) for step in steps]
    error = sum(float((a - b).square().sum()) for a, b in pairs)
    spread = sum(float((a - a.mean()).square().sum()) for a, _ in pairs)
    return Drift(
        positions=len(pairs),
        near_ties=classes.count("near-tie"),
        real=classes.count("real"),
        worst_margin=max((step.margin for step in steps), default=0.0),
        rms_ratio=math.sqrt(error / spread),
    )


def _decoded(lines: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Without the logits behind each prompt, which no decode step has made."""
    return [line[1:] for line in lines]
