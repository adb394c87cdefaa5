"""Languages that a reply has to be in: from a schema or a grammar to the tokens that may follow.

Owns the translation to the library (`llguidance`, of the extra "serve") and the compiled languages
that are kept. The library is only imported when a language is asked for. Does not know requests,
chat markup or sampling.

Compiling takes from a millisecond to a second, so it may be done ahead and in any thread
(`Languages.prepare`); a request then gets a copy of its own.
"""

from __future__ import annotations

import copy
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kdecode.engine.controls import ControlError
from kdecode.engine.request import RequestError, StructuredOutput
from kdecode.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled languages that are kept.
MAX_KEPT = 64
# A language's text: what takes longer to read is more likely a mistake than a need.
MAX_TEXT = 1_000_000
# Between the tokens of JSON: enough to indent, and no way to go on for ever.
WHITE_SPACE = r"\n?[ \t]{0,64}"


class Languages:
    """Compiled languages over one tokenizer. eos_id: the model's own end token. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self._eos_id = eos_id
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    def prepare(self, output: StructuredOutput) -> None:
        """Compiles a language, if that has not been done. Raises RequestError."""
        self._compiled(output)

    def matcher(self, output: StructuredOutput, end_ids: Iterable[int]) -> LanguageMatcher:
        """The beginning of a text of the language. end_ids: tokens that end a reply.

        Raises RequestError.
        """
        ends = tuple(token for token in end_ids if self._tokenizer.is_special(token))
        size = self._tokenizer.vocab_size
        return LanguageMatcher(self._compiled(output).deep_copy(), size, self._eos_id, ends)

    def _compiled(self, output: StructuredOutput) -> LLMatcher:
        with self._lock:
            if output in self._kept:
                self._kept.move_to_end(output)
                return self._kept[output]
            vocabulary = self._vocabulary = self._vocabulary or self._read_vocabulary()
        # Outside of the lock: the library lets other threads run while it compiles.
        matcher = _compile(vocabulary, output)
        with self._lock:
            self._kept[output] = matcher
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ModuleNotFoundError as error:
            raise RequestError(
                "Structured output needs the package llguidance, which is not installed here "
                "(`pip install 'kdecode[serve]'`)."
            ) from error
        wrapper = TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos_id))
        return LLTokenizer(wrapper, n_vocab=self._tokenizer.vocab_size, eos_token=self._eos_id)


class LanguageMatcher:
    """One request's text as it grows. The end tokens may follow wherever the text may end."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, eos_id: int, end_ids: tuple[int, ...]
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._end_ids = end_ids
        self._is_over = False

    @property
    def is_complete(self) -> bool:
        """Nothing can follow."""
        return self._is_over or (self._matcher.is_stopped() and not self._matcher.is_error())

    def allowed(self) -> Tensor:
        """Which tokens may follow, [vocab] bool. Raises ControlError."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(mask, count=self._vocab_size, bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_))
        if bool(allowed[self._eos_id]):
            allowed[list(self._end_ids)] = True
        return allowed

    def take(self, token: int) -> None:
        if token == self._eos_id or token in self._end_ids:
            self._is_over = True
        elif not self._is_over:
            # A token that may not follow leaves an error behind, which `allowed` raises.
            self._matcher.consume_token(token)

    def fork(self) -> LanguageMatcher:
        """A copy that goes its own way."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ControlError(f"its language cannot be followed: {self._matcher.get_error()}")


class _Vocabulary:
    """The tokenizer as the library wants to see it."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.bos_token_id = None
        size = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in size]
        self.special_token_ids = [token for token in size if tokenizer.is_special(token)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_text(text.decode("utf-8", errors="replace"))


def _compile(vocabulary: LLTokenizer, output: StructuredOutput) -> LLMatcher:
    from llguidance import LLMatcher

    if len(output.text) > MAX_TEXT:
        raise RequestError(
            f"The {output.kind} has {len(output.text):,} characters; at most {MAX_TEXT:,} are read."
        )
    try:
        content = _library_grammar(output)
        grammars = [content]
        if output.frame is not None:
            grammars = [{"lark_grammar": output.frame}, {**content, "name": "content"}]
        document = json.dumps({"grammars": grammars})
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The {output.kind} cannot be used: {error}") from error
    # Level 0 keeps the library from writing to stderr.
    matcher = LLMatcher(vocabulary, document, log_level=0)
    if matcher.is_error():
        raise RequestError(f"The {output.kind} cannot be used: {matcher.get_error().strip()}")
    return matcher


def _library_grammar(output: StructuredOutput) -> dict[str, Any]:
    """The language as an entry of the library's list of grammars. Raises ValueError."""
    from llguidance import grammar_from

    if output.kind == "json_schema":
        schema = json.loads(output.text)
        if not isinstance(schema, dict | bool):
            raise ValueError("it is neither an object nor a boolean")
        document = schema if isinstance(schema, dict) else {"allOf": [schema]}
        return {"json_schema": {"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **document}}
    if output.kind == "choice":
        choices = json.loads(output.text)
        if not choices:
            raise ValueError("it has no choices")
        return {"lark_grammar": "start: " + " | ".join(map(json.dumps, choices))}
    if output.kind == "regex":
        regex: dict[str, Any] = json.loads(grammar_from("regex", output.text))["grammars"][0]
        return {"lark_grammar": regex["lark_grammar"]}
    return {"lark_grammar": grammar_from("grammar", output.text)}
