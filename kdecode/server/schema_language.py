"""The fields that say in which language an answer has to be: OpenAI's and vLLM's, one at a time.

Owns their shapes and what each of them means as a `StructuredOutput`. Does not know which part of a
reply is the answer (`languages`), nor what a language allows (the engine).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kdecode.engine.request import StructuredOutput

Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Field(min_length=1)]


class StrictModel(BaseModel):
    """A number is not a text, and nothing is guessed."""

    model_config = ConfigDict(strict=True)


class JsonSchemaFormat(StrictModel):
    """name, description and strict are told to no one: every reply follows the schema."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[Schema, Field(alias="schema")] = True


class ResponseFormat(StrictModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with the type 'json_schema', and only there.")
        return self

    @property
    def output(self) -> StructuredOutput | None:
        if self.json_schema is not None:
            return _schema(self.json_schema.schema_)
        return _schema({"type": "object"} if self.type == "json_object" else None)


class StructuredOutputs(StrictModel):
    """vLLM's: one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class LanguageFields(StrictModel):
    """guided_*: vLLM's older names of what structured_outputs has."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_languages(self) -> Self:
        names = [name for name, _ in self._languages()]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} each set a language; give one of them.")
        return self

    @property
    def language(self) -> StructuredOutput | None:
        """What the answer's text has to be; at most one is given."""
        return next((output for _, output in self._languages()), None)

    def _languages(self) -> list[tuple[str, StructuredOutput]]:
        form, vllm = self.response_format, self.structured_outputs or StructuredOutputs()
        given = {
            "response_format": form.output if form is not None else None,
            "structured_outputs.json": _schema(vllm.json_),
            "structured_outputs.json_object": _schema(
                {"type": "object"} if vllm.json_object else None
            ),
            "structured_outputs.regex": _text("regex", vllm.regex),
            "structured_outputs.choice": _choice(vllm.choice),
            "structured_outputs.grammar": _text("grammar", vllm.grammar),
            "guided_json": _schema(self.guided_json),
            "guided_regex": _text("regex", self.guided_regex),
            "guided_choice": _choice(self.guided_choice),
            "guided_grammar": _text("grammar", self.guided_grammar),
        }
        return [(name, output) for name, output in given.items() if output is not None]


def _schema(schema: Schema | str | None) -> StructuredOutput | None:
    """A schema, or its JSON."""
    if schema is None:
        return None
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except RecursionError:
        raise ValueError("The JSON schema is nested too deeply.") from None
    return StructuredOutput("json_schema", text)


def _text(kind: Literal["regex", "grammar"], text: str | None) -> StructuredOutput | None:
    return None if text is None else StructuredOutput(kind, text)


def _choice(choices: list[str] | None) -> StructuredOutput | None:
    return None if choices is None else StructuredOutput("choice", json.dumps(choices))
