"""K3 replies as grammars: the answer in a language of the client's, or calls of its tools.

Owns where in a reply the bound part stands, in Lark, with markers by token id, so that no text can
take their place. Reasoning is free. A reply ends with the marker that closes its last channel: what
would follow is the same for every reply. Does not know fields of requests or how grammars are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kdecode.engine.request import RequestError, StructuredOutput
from kdecode.engine.structured import WHITE_SPACE
from kdecode.model.chat import K3_MARKERS
from kdecode.model.tokenizer import Tokenizer

JSON_TYPES = ("string", "number", "boolean", "null", "object", "array")
# Schemas inside of schemas that are followed; deeper ones are any value.
MAX_DEPTH = 8
_QUOTE = '"'
_KEY = r"/[^\"&<>\n]+/"


class K3Grammar:
    """thinking: the reply begins inside its reasoning."""

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool) -> None:
        self._open, self._close, self._sep, _ = (
            f"<[{tokenizer.special_id(name)}]>" for name in K3_MARKERS
        )
        self._thinking = thinking
        self._rules = [f"text: <[0-{tokenizer.num_base - 1}]>*"]

    def answer(
        self, language: StructuredOutput, tools: Sequence[Mapping[str, Any]] = ()
    ) -> StructuredOutput:
        """An answer in this language; or, where there are tools, calls of them instead."""
        replies = [f"@content {self._close}"]
        if tools:
            replies.append(self._calls(tools, can_repeat=True))
        start = f"start: {self._reasoning()}({' | '.join(replies)})"
        frame = "\n".join([start, *self._rules])
        return StructuredOutput(language.kind, language.text, frame)

    def calls(
        self, tools: Sequence[Mapping[str, Any]], *, name: str | None, can_repeat: bool
    ) -> StructuredOutput:
        """Calls of these tools, or one of the tool with this name. Raises RequestError."""
        if name is not None:
            tools = [tool for tool in tools if _function(tool).get("name") == name]
            if not tools:
                raise RequestError(f"tool_choice names the tool {name!r}; tools has none like it.")
        calls = self._calls(tools, can_repeat=can_repeat and name is None)
        start = f"start: {self._reasoning()}{calls}"
        return StructuredOutput("grammar", "\n".join([start, *self._rules]))

    def _reasoning(self) -> str:
        """From the beginning of the reply to the inside of the response channel."""
        if not self._thinking:
            return ""
        return f"text {self._end('think')} {self._begin('response')} "

    def _calls(self, tools: Sequence[Mapping[str, Any]], *, can_repeat: bool) -> str:
        """From the inside of the response channel to the marker that closes the tools."""
        names = []
        for index, tool in enumerate(tools):
            names.append(f"call_{index}")
            self._rules.append(f"call_{index}: {self._call(_function(tool))}")
        again = "+" if can_repeat else ""
        return (
            f"{self._end('response')} {self._begin('tools')} ({' | '.join(names)}){again} "
            f"{self._close}"
        )

    def _call(self, function: Mapping[str, Any]) -> str:
        head = f"call tool={_quoted(_name(function))} index="
        begin = (
            f"{self._open} {_literal(head + _QUOTE)} /[1-9][0-9]?/ {_literal(_QUOTE)} {self._sep}"
        )
        return f"{begin} {self._arguments(function.get('parameters'))} {self._end('call')}"

    def _arguments(self, parameters: Any) -> str:
        """One element a property, in the order they are declared; without any, whatever."""
        schema = parameters if isinstance(parameters, Mapping) else {}
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            if schema.get("additionalProperties") is False:
                return ""
            key = f"{_literal(f'argument key={_QUOTE}')} {_KEY} {_literal(f'{_QUOTE} type=')}"
            return f"({self._argument(key, {}, {})})*"
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        elements = []
        for name, declared in properties.items():
            key = _literal(f"argument key={_quoted(name)} type=")
            again = "" if name in required else "?"
            elements.append(f"({self._argument(key, declared, shared)}){again}")
        return " ".join(elements)

    def _argument(self, key: str, schema: Any, shared: Mapping[str, Any]) -> str:
        """An element with a value; key: the grammar of its tag, up to the value's type."""
        values = [
            f"{_literal(_quoted(kind))} {self._sep} {value}"
            for kind, value in self._values(schema, shared, depth=0)
        ]
        return f"{self._open} {key} ({' | '.join(values)}) {self._end('argument')}"

    def _values(
        self, declared: Any, shared: Mapping[str, Any], depth: int
    ) -> list[tuple[str, str]]:
        """(type in the markup, grammar) of each type of value. Texts are free, or of a list."""
        schema = declared if isinstance(declared, Mapping) and depth < MAX_DEPTH else {}
        schema = _resolved(schema, shared)
        members = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(members, list) and members:
            return [
                value for member in members for value in self._values(member, shared, depth + 1)
            ]
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        types = _types(schema, listed)
        found = []
        for kind in types or JSON_TYPES:
            if kind == "string":
                texts = [item for item in listed or () if isinstance(item, str)]
                found.append((kind, f"({' | '.join(map(_literal, texts))})" if texts else "text"))
                continue
            # Without a type of its own, a schema may be of another one: then it is any value.
            bound = {**schema, **shared} if types else {}
            bound |= {"type": kind, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
            rule = f"value_{len(self._rules)}"
            self._rules.append(f"{rule}: %json {json.dumps(bound)}")
            found.append(("number" if kind == "integer" else kind, rule))
        return found

    def _begin(self, name: str) -> str:
        return f"{self._open} {_literal(name)} {self._sep}"

    def _end(self, name: str) -> str:
        return f"{self._close} {_literal(name)} {self._sep}"


def _types(schema: Mapping[str, Any], listed: Any) -> list[str]:
    """JSON types of a schema, as far as it says so itself."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, list):
        return [kind for kind in declared if isinstance(kind, str)]
    values = listed if isinstance(listed, list) else []
    return list(dict.fromkeys(_type_of(value) for value in values))


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _resolved(schema: Mapping[str, Any], shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reference to the tool's own definitions stands for."""
    place = schema.get("$ref")
    if not isinstance(place, str):
        return schema
    _, _, group = place.partition("#/")
    folder, _, name = group.partition("/")
    found = shared.get(folder, {})
    target = found.get(name) if isinstance(found, Mapping) else None
    return target if isinstance(target, Mapping) else {}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _name(function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"A tool's function has the name {name!r}; it must be a text.")
    return name


def _quoted(value: str) -> str:
    """An attribute's value, as K3's markup has it."""
    escaped = value.replace("&", "&amp;").replace('"', "&quot;")
    return f'"{escaped}"'


def _literal(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text)
