"""The public engine: a checkpoint directory in, texts out.

Owns how prompts become requests, how their events reach the callers, and what the engine says
about itself. Scheduling, steps and sampling are its parts' business. One thread at a time may use
an `LLM`.

A request's life, in eight steps:

1. `_submit` turns ids and parameters into a `Request` and gives it a number; the scheduler checks
   that it can ever fit.
2. The scheduler admits it when a slot and pages for all of its tokens are free (`waiting` ->
   `prefill`). A prefix that is in the caches is taken over then.
3. Chunks of the rest of its prompt run through the standard forward.
4. The last chunk gives logits, and sampling its first token (`prefill` -> `decode`).
5. Every further token is one row of a decode step: the prepared plan, or the standard forward with
   the reason counted.
6. Out of pages, the request of the last rank goes back to 2 with every token it has.
7. An end token, a stop string, max_tokens, an abort or an error ends it; slot and pages are free.
8. Its `Output` is collected and the engine forgets it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdecode.config import CompileForm, EngineConfig, ModelConfig
from kdecode.decode.inspect import PlanCost
from kdecode.decode.inspect_device import plan_probe
from kdecode.decode.inspect_draft import DraftCost, inspect_draft
from kdecode.decode.plan import DecodePlan
from kdecode.engine.controls import controls_of
from kdecode.engine.loop import Event, StepLoop
from kdecode.engine.prefix_caching import (
    describe_prefix_cache,
    interval_of,
    make_prefix_cache,
)
from kdecode.engine.request import (
    FinishReason,
    Output,
    Request,
    RequestError,
    SamplingParams,
    Timing,
)
from kdecode.engine.scheduler import Scheduler, SchedulerLimits
from kdecode.engine.structured import Languages
from kdecode.engine.text import StopFilter, TextStream
from kdecode.engine.worker import Progress, Worker, no_progress, packed_bytes
from kdecode.model.chat import (
    END_OF_MSG,
    IM_END,
    JsonObject,
    ReplyStream,
    chat_format,
    encode_chat,
)
from kdecode.model.tokenizer import IncrementalDetokenizer, Tokenizer
from kdecode.parallel.ranks import RankError
from kdecode.speculative.stats import RoundStats

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Token:
    """One step of a reply as a caller sees it.

    prompt: index into the prompts of the call. token_id None: the request ended without a token.
    text: what became readable with it. finish_reason: set on the last one.
    """

    prompt: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class ChatReply:
    """A reply in its two channels; `output` has its tokens, and as text both channels and tags."""

    reasoning: str
    response: str
    output: Output


class LLM:
    """A model with its caches and its decode backend.

    Settings are an `EngineConfig`, or its fields as keywords. Raises ConfigError, CheckpointError,
    TokenizerError or BackendRefusedError, each with what is wrong and the limit.
    """

    def __init__(
        self,
        model_directory: str | Path,
        engine: EngineConfig | None = None,
        *,
        progress: Progress = no_progress,
        **settings: Any,
    ) -> None:
        if engine is not None and settings:
            raise TypeError(f"Give an EngineConfig or keywords, not both: {sorted(settings)}.")
        self.engine_config = EngineConfig(**settings) if engine is None else engine
        self.model_directory = Path(model_directory)
        # First, because packing takes minutes and a bad tokenizer is found at once.
        self.tokenizer = Tokenizer.from_directory(
            self.model_directory, ModelConfig.from_checkpoint(self.model_directory).vocab_size
        )
        self.languages = Languages(
            self.tokenizer, ModelConfig.from_checkpoint(self.model_directory).eos_id
        )
        self._worker = Worker(self.model_directory, self.engine_config, progress)
        speculative = self.engine_config.speculative
        limits = SchedulerLimits(
            max_step_tokens=self.engine_config.max_step_tokens,
            max_context_tokens=self.engine_config.max_context_tokens,
            num_drafts=0 if speculative is None else speculative.num_speculative_tokens,
            state_interval_tokens=interval_of(self.engine_config),
        )
        worker, caches = self._worker, self._worker.caches
        try:
            self._prefix = make_prefix_cache(
                worker.packed.config, worker.engine, caches, worker.cache_identity()
            )
        except BaseException:
            worker.close()
            raise
        self._loop = StepLoop(Scheduler(caches, limits, self._prefix), worker)
        self._events: dict[int, deque[Event]] = {}
        self._is_closed = False
        self._num_requests = 0

    def close(self) -> None:
        """Ends the processes of the other ranks, if there are any; no request is taken after it."""
        self._is_closed = True
        self._worker.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_ranks(self) -> None:
        """Raises RankError where another rank has died or stands still."""
        if self._worker.leader is not None:
            self._worker.leader.check()

    @property
    def rank_failure(self) -> RankError | None:
        """What broke the ranks of this model, once and for all."""
        return None if self._worker.leader is None else self._worker.leader.failure

    @property
    def model_config(self) -> ModelConfig:
        return self._worker.config

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        on_token: Callable[[Token], None] | None = None,
    ) -> list[Output]:
        """The replies to all prompts, in their order, run together as far as they fit.

        A request that breaks has an Output with finish_reason "error"; the others go on. Raises
        RequestError for a prompt that could never fit, before anything runs.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is one text; give a list of prompts.")
        numbers: list[int] = []
        try:
            for prompt in prompts:
                numbers.append(self._submit(prompt, params or SamplingParams()))
            for index, event in self._follow(numbers):
                if on_token is not None:
                    on_token(Token(index, event.token_id, event.text, event.finish_reason))
            return [self._loop.collect(number) for number in numbers]
        finally:
            self._discard(numbers)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Token]:
        """The reply to one prompt, token by token. Closing the iterator aborts the request."""
        numbers = [self._submit(prompt, params or SamplingParams())]
        return self._stream(numbers)

    def chat(
        self,
        messages: Sequence[JsonObject],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        effort: str = "max",
        on_text: Callable[[str, str], None] | None = None,
    ) -> ChatReply:
        """The assistant's reply to a conversation. Raises ChatError for one without an encoding.

        A stop string acts on the response, where its reader sees it, and not on the reasoning.
        on_text gets what became readable of the reasoning and of the response, as it comes; put
        together, its pieces are the reply's two texts.
        """
        params = self._chat_params(params)
        prompt = encode_chat(self.tokenizer, messages, thinking=thinking, effort=effort)
        # The engine's own text has both channels and the names of their tags in it.
        numbers = [self._submit(prompt, dataclasses.replace(params, stop=()))]
        channels = ReplyStream(self.tokenizer, thinking)
        response, reasoning = StopFilter(params.stop), list[str]()

        def tell(thought: str, said: str) -> None:
            reasoning.append(thought)
            if on_text is not None and (thought or said):
                on_text(thought, said)

        try:
            for count, (_, event) in enumerate(self._follow(numbers), start=1):
                # A token that ended the request is not part of its text.
                if event.token_id is not None and event.finish_reason != "stop":
                    thought, said = channels.push(event.token_id)
                    tell(thought, response.push(said, can_stop=count >= params.min_tokens))
                if response.is_stopped:
                    break
            thought, said = channels.flush()
            tell(thought, response.close(said))
            if response.is_stopped:
                self._loop.stop(numbers[0])
            return ChatReply("".join(reasoning), response.text, self._loop.collect(numbers[0]))
        finally:
            self._discard(numbers)

    def teacher_forced(self, prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> Tensor:
        """Logits [len(reply), vocab] fp32: at i, what follows the prompt and reply[:i].

        The prompt is prefilled and the reply decoded token by token, on the path that generation
        takes.
        """
        return torch.stack(list(self.follow_reply(prompt_ids, reply_ids)))

    def follow_reply(self, prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> Iterator[Tensor]:
        """The rows of `teacher_forced`, one at a time, for replies whose logits are too many."""
        self._check_ids(reply_ids, "reply")
        if not reply_ids:
            raise RequestError("The reply has no tokens; at least 1 is needed.")
        params = SamplingParams(max_tokens=len(reply_ids), ignore_eos=True)
        numbers = [self._submit(prompt_ids, params, forced_ids=tuple(reply_ids))]
        try:
            for _, event in self._follow(numbers):
                if event.logits is not None:
                    yield event.logits
            output = self._loop.collect(numbers[0])
            if output.error is not None:
                raise RuntimeError(f"The teacher-forced run broke: {output.error}")
        finally:
            self._discard(numbers)

    def stats(self) -> dict[str, Any]:
        """What has run so far, and the memory it runs in."""
        runner, caches = self._worker.runner, self._worker.caches
        return {
            "decode_steps": [
                {"path": path, "reason": reason, "steps": steps}
                for (path, reason), steps in runner.stats.snapshot().items()
            ],
            "prefill_steps": runner.stats.prefill_steps,
            "coverage": runner.stats.coverage,
            "recorded_steps": runner.stats.recorded_steps,
            "compiled_steps": runner.stats.compiled_steps,
            "waiting": self._loop.scheduler.num_waiting,
            "running": self._loop.scheduler.num_running,
            "preemptions": self._loop.scheduler.num_preemptions,
            # Without those of prefixes that nobody uses now: they are free for whoever comes.
            "pages_used": caches.page_pool.num_used - self._num_idle_pages,
            "slots_used": caches.slot_pool.num_used,
            "packed_bytes": packed_bytes(self._worker.packed),
            "draft_bytes": self._worker.draft_bytes,
            "cache_bytes": caches.num_bytes,
            "build": dataclasses.asdict(self._worker.build_times),
            "speculation": self._speculation_stats(),
            "prefix_cache": describe_prefix_cache(self._prefix, self.engine_config),
        }

    @property
    def _num_idle_pages(self) -> int:
        return 0 if self._prefix is None else self._prefix.pages.num_idle

    def reset_prefix_cache(self) -> None:
        """Forgets every prefix; requests that run keep what they took over."""
        if self._prefix is not None:
            self._prefix.clear()

    def _speculation_stats(self) -> dict[str, Any] | None:
        """Rounds of all requests so far, and the time of their steps; None without a draft."""
        speculation = self._worker.speculation
        if speculation is None:
            return None
        total = RoundStats()
        for rounds in self._loop.rounds.values():
            total.merge(rounds)
        kinds = {kind: rounds.figures() for kind, rounds in self._loop.rounds.items()}
        return {**total.figures(), **dataclasses.asdict(speculation.times), **kinds}

    def resolved_config(self) -> dict[str, Any]:
        """Everything that was decided, read from the running engine.

        Two engines whose results may be compared differ in `decode_backend` only.
        """
        engine, caches, config = self.engine_config, self._worker.caches, self.model_config
        return {
            "model": {
                "type": config.model_type,
                "layers": config.num_layers,
                "weights_digest": self._worker.weights_digest,
            },
            "decode_backend": engine.decode_backend,
            "device": engine.device,
            "isa": self._worker.engine.isa,
            "lossless_packing": engine.lossless_packing,
            "trunk_format": engine.trunk_format,
            "gpu_kernels": engine.gpu_kernels,
            "shared_experts": engine.shared_experts,
            "weight_prefetch": engine.weight_prefetch,
            "expert_products": engine.expert_products,
            "weights_differ_from_checkpoint": engine.changes_weights,
            "threads": engine.resolved_threads(),
            "tensor_parallel_size": engine.tensor_parallel_size,
            "gpu_exchange": self._worker.gpu_exchange,
            "decode_context_parallel_size": engine.decode_context_parallel_size,
            "context_interleave_tokens": engine.context_interleave_tokens,
            "cache": {
                "dtype": caches.cache_dtype,
                "scales": {str(layer): scale for layer, scale in caches.scales.items()},
                "page_tokens": caches.page_tokens,
                "pages": caches.num_pages,
                "slots": caches.num_slots,
                "bytes": caches.num_bytes,
            },
            "max_context_tokens": engine.max_context_tokens,
            "max_step_tokens": engine.max_step_tokens,
            "state_interval_tokens": interval_of(engine),
            "prefix_caching": engine.enable_prefix_caching,
            "state_places": 0 if self._prefix is None else self._prefix.states.num_places,
            "seed": engine.seed,
            "speculative": self._worker.resolved_speculation(),
            # Of greedy text and of distributions; synthetic acceptance makes up both.
            "outputs_valid": engine.speculative is None or not engine.speculative.is_synthetic,
            "versions": {
                name: metadata.version(name) for name in ("kdecode", "torch", "numpy", "tiktoken")
            },
        }

    def decode_plan(self, rows: int = 1) -> DecodePlan:
        """The plan that serves a decode step of so many rows; `explain()` prints it."""
        return self._worker.runner.plan(rows)

    def compile_decode(self, rows: int, form: CompileForm) -> float:
        """From now on, decode steps of so many requests go through `torch.compile`.

        For a comparison's arm, of the standard forward on a CPU: docs/peers.md. Returns the seconds
        that it took. RequestError while requests are open; CompileError where it cannot be.
        """
        self._require_idle("a decode step is compiled")
        self.reset_prefix_cache()
        return self._worker.runner.compile_decode(rows, form)

    def inspect_decode(
        self, rows: int, context_tokens: int, runs: int, drafts: int = 0
    ) -> PlanCost:
        """What each step of a decode step costs, on made-up requests of such a length.

        rows: requests. drafts: of each, for the step that verifies them; no draft model is needed.
        RequestError while requests are open: the probe takes slots and pages of the caches, and
        for requests that the caches cannot hold.
        """
        if self._worker.leader is not None:
            raise RequestError("The parts of a step are timed on one rank; this model has several.")
        self._require_idle("a decode step is inspected")
        self.reset_prefix_cache()
        caches, limit = self._worker.caches, self.engine_config.max_context_tokens
        if rows > caches.num_slots or context_tokens + drafts > limit:
            raise RequestError(
                f"Requests: {rows}, tokens of each: {context_tokens + drafts:,}; this engine's "
                f"caches hold {caches.num_slots} of at most {limit:,}."
            )
        threads, each = self.engine_config.resolved_threads(), 1 + drafts
        plan = self._worker.runner.verify_plan(rows, each) if drafts else self.decode_plan(rows)
        with plan_probe(
            self._worker.packed, plan, caches, rows * each, context_tokens, threads, each
        ) as probe:
            return probe.measure(runs)

    def _require_idle(self, what: str) -> None:
        if self._loop.scheduler.num_waiting or self._loop.scheduler.num_running:
            raise RequestError(f"Requests are open; {what} on an idle engine.")

    def inspect_draft(self, context_tokens: int, runs: int) -> DraftCost | None:
        """What a draft's round costs on an idle engine; None where there is no draft."""
        speculation, speculative = self._worker.speculation, self.engine_config.speculative
        draft = None if speculation is None else speculation.timed_draft
        if draft is None or speculative is None:
            return None
        count = speculative.num_speculative_tokens
        return inspect_draft(draft, self._worker.caches, count, context_tokens, runs)

    @property
    def loop(self) -> StepLoop:
        """The loop that runs the requests of `add_request`; for a driver that owns this engine."""
        return self._loop

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        forced_ids: tuple[int, ...] | None = None,
        start_ns: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> int:
        """Takes a request in for a driver of `loop`, and returns its number in the loop's events.

        start_ns: when its caller handed it over, if that was earlier. priority: the lower one is
        served first. cache_salt: its prefixes are shared with requests of the same one only. Raises
        RequestError, and RuntimeError once the engine was closed.
        """
        if self._is_closed:
            raise RuntimeError(
                "This engine was closed; it takes no more requests. Make another one."
            )
        start_ns = time.perf_counter_ns() if start_ns is None else start_ns
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode_text(prompt)
        self._check_ids(prompt, "prompt")
        number = self._num_requests
        seed = params.seed if params.seed is not None else (self.engine_config.seed << 32) + number
        speculative = self.engine_config.speculative
        if speculative is not None and speculative.is_synthetic and params.structured is not None:
            raise RequestError(
                "Drafts are accepted at stated rates here, whatever they are, so that no reply can "
                "be kept to a language. Use another rejection_sample_method."
            )
        own_end = () if params.ignore_eos else (self.model_config.eos_id,)
        end_ids = frozenset((*own_end, *params.stop_token_ids))
        request = Request(
            number=number,
            prompt_ids=tuple(prompt),
            params=params,
            end_token_ids=end_ids,
            seed=seed,
            timing=Timing(start_ns),
            forced_ids=forced_ids,
            priority=priority,
            cache_salt=cache_salt,
            controls=controls_of(params, prompt, end_ids, self.tokenizer, self.languages),
        )
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special=True)
        self._loop.add(request, TextStream(detokenizer, params.stop))
        self._num_requests += 1
        return number

    def _submit(
        self, prompt: Prompt, params: SamplingParams, forced_ids: tuple[int, ...] | None = None
    ) -> int:
        number = self.add_request(prompt, params, forced_ids=forced_ids)
        self._events[number] = deque()
        return number

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        vocab = self.model_config.vocab_size
        for position, token in enumerate(ids):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"Token {position} of the {what} is {token}; the vocabulary has {vocab:,} ids."
                )

    def _stream(self, numbers: list[int]) -> Iterator[Token]:
        try:
            for _, event in self._follow(numbers):
                yield Token(0, event.token_id, event.text, event.finish_reason)
        finally:
            self._discard(numbers)

    def _follow(self, numbers: Sequence[int]) -> Iterator[tuple[int, Event]]:
        """Steps the engine until these requests have ended; their events, with their index.

        Events of requests that other callers follow are kept for those.
        """
        index = {number: position for position, number in enumerate(numbers)}
        open_numbers = set(numbers)
        while open_numbers:
            for number in sorted(open_numbers):
                events = self._events[number]
                while events:
                    event = events.popleft()
                    if event.finish_reason is not None:
                        open_numbers.discard(number)
                    yield index[number], event
            if open_numbers:
                for event in self._loop.step():
                    if event.number in self._events:
                        self._events[event.number].append(event)

    def _discard(self, numbers: Sequence[int]) -> None:
        """Ends and forgets these requests, whatever became of them."""
        for number in numbers:
            if self._events.pop(number, None) is not None:
                self._loop.drop(number)

    def _chat_params(self, params: SamplingParams | None) -> SamplingParams:
        """Parameters that also end at the format's end of a message."""
        params = params or SamplingParams()
        end = END_OF_MSG if chat_format(self.tokenizer) == "kimi_k3" else IM_END
        ends = (*params.stop_token_ids, self.tokenizer.special_id(end))
        return dataclasses.replace(params, stop_token_ids=tuple(dict.fromkeys(ends)))
