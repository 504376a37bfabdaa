"""The table of request fields: names, types, ranges and effects, one table for all API schemas.

Each API schema has the rows of `EVERYWHERE`, rows of its own, and the structured parts of its requests, such
as messages and tools.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hotset.backends.adapters import MOST_ADAPTERS
from hotset.engine.sampler import SamplingParams
from hotset.parameters import shown
from hotset.sampling_parameters import PARAMETERS, RULES
from hotset.server.answers import Thinking
from hotset.server.errors import RequestError
from hotset.server.rows import (
    MANY,
    Bias,
    Body,
    Flag,
    Integer,
    Number,
    Row,
    Text,
    Use,
    at_most,
    having,
    integer,
    number_of,
    settings_of,
)
from hotset.text.grammar_child import NAME_KEY

MAX_BIASES = 4096
"""Tokens in a logit_bias."""
MAX_CHOICES = 256
"""Texts in a guided_choice."""

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})

Schema = dict[str, Any]
SchemaOrText = Schema | str


def _ollama_limit(value: int) -> int | None:
    return None if value <= 0 else value


def _seed(value: int) -> int:
    """Return a seed as SamplingParams has it, for a value of either sign."""
    return value if value == -1 else value % 2**64


def _stops(value: str | list[str]) -> list[str]:
    """Return stop strings without empty ones, which end nothing."""
    return [one for one in ([value] if isinstance(value, str) else value) if one]


def _biases(value: dict[str, Any] | list[list[Any]]) -> dict[Any, float]:
    """Return biases by token. llama-server has pairs, too, and `false` for a forbidden token."""
    pairs = value.items() if isinstance(value, dict) else value
    return {token: -float("inf") if bias is False else bias for token, bias in pairs}


def _pair(pair: list[Any]) -> list[Any]:
    """Return a pair of llama-server's logit_bias. Raises ValueError for anything else."""
    if len(pair) != 2 or not all(isinstance(one, int | float | str) for one in pair):
        raise ValueError("a pair must have a token and a number, or false")
    return pair


def _one_of(texts: list[str]) -> str:
    """Return a regular expression of these texts."""
    return "|".join(re.escape(text) for text in texts)


_Biases = (
    Annotated[dict[str, Bias | Literal[False]], at_most(MAX_BIASES)]
    | Annotated[list[Annotated[list[Any], AfterValidator(_pair)]], Field(max_length=MAX_BIASES)]
)
_Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


@having(
    Row("json", "JSON schema that the answer follows.", SchemaOrText, ("json_schema",), sets="json_schema"),
    Row("json_object", "Whether the answer is a JSON object.", Flag),
    Row("regex", "Regular expression that the whole answer matches.", str),
    Row("grammar", "GBNF or Lark that the answer follows.", str),
    Row("choice", "Texts of which the answer is one.", _Choices, sets="regex", read=_one_of),
)
class StructuredOutputs(Body):
    """The form of an answer, as vLLM has it."""


class NamedSchema(Body):
    """A JSON schema with a name. An answer follows it whatever `strict` says."""

    name: Text | None = None
    description: str | None = None
    schema_: Annotated[SchemaOrText | None, Field(alias="schema")] = None
    strict: Flag | None = None


class ResponseFormat(NamedSchema):
    """The form of an answer, as OpenAI has it; a schema may be in `json_schema` or next to the type."""

    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: NamedSchema | None = None
    grammar: str | None = None
    regex: str | None = None


def form_of(given: ResponseFormat) -> dict[str, Any]:
    """Return the sampling parameter for a form. Raises RequestError for one without its schema."""
    if given.type == "text":
        return {}
    name = "json_schema" if given.type == "json_object" else given.type
    named = given.json_schema or given
    value = named.schema_ if name == "json_schema" else getattr(given, name)
    if named.name is not None and isinstance(value, Mapping):
        value = {**value, NAME_KEY: f"the format {shown(named.name)}"}
    if value is None and given.type == "json_object":
        return {"json_object": True}
    if value is None:
        raise RequestError(f"response_format has no {name}", param="response_format")
    return {name: value}


def _sampling(name: str, kind: Any, first: str = "", **more: Any) -> Row:
    """Return the row of a sampling parameter.

    first: the name that counts if a request has several.
    """
    parameter = PARAMETERS[name]
    names = (name, *parameter.also)
    first = first or name
    others = tuple(one for one in names if one != first)
    return Row(first, parameter.summary, kind, others, sets=name, **{"read": parameter.meant} | more)


SAMPLING = (
    *(_sampling(one.name, number_of(one)) for one in RULES),
    _sampling("dry_sequence_breakers", list[str]),
    _sampling("logit_bias", _Biases, read=_biases),
    _sampling("seed", integer(), read=_seed),
    _sampling("max_tokens", integer(-1), first="max_completion_tokens"),
    Row("num_predict", "As max_tokens; 0, -1 and -2: as many as fit.", integer(-2), sets="max_tokens",
        read=_ollama_limit),
    _sampling("stop", str | list[str], read=_stops),
    _sampling("stop_token_ids", list[Integer]),
    _sampling("ignore_eos", Flag),
    _sampling("json_schema", SchemaOrText),
    _sampling("regex", str),
    _sampling("grammar", str),
    Row("guided_choice", "Texts of which the answer is one.", _Choices, sets="regex", read=_one_of),
    Row("structured_outputs", "The form of the answer, as vLLM has it.", StructuredOutputs, sets=MANY,
        read=settings_of("sampling")),
    Row("response_format", "The form of the answer, as OpenAI has it.", ResponseFormat, sets=MANY,
        read=form_of),
)  # fmt: skip
"""Fields that set SamplingParams."""


class LoraScale(Body):
    """The share of an adapter (LoRA). id: its number, as llama-server has it, or its name."""

    id: int | str
    scale: Number = 1.0


def _adapters(scales: list[LoraScale]) -> dict[int | str, float]:
    return {one.id: one.scale for one in scales}


REQUEST = (
    Row("cache_prompt", "False computes a cached prompt again.", Flag, use="request", sets="reuse_prefix"),
    Row("id_slot", "Slot that has the tokens afterwards; -1: any.", integer(-1), ("slot_id",), use="request",
        read=lambda slot: None if slot == -1 else slot),
    Row("lora", "Adapters, and the share of each.",
        Annotated[list[LoraScale], Field(max_length=MOST_ADAPTERS)], use="request", sets="adapters",
        read=_adapters),
)  # fmt: skip
"""Fields that set an AnswerRequest, in all API schemas."""

TRUNCATION = Row(
    "truncation", "\"auto\" leaves out the oldest turns of a conversation that is too long.",
    Literal["auto", "disabled"], use="request", sets="truncates", read=lambda given: given == "auto",
)  # fmt: skip

Level = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_Budget = integer(-1)
_SUMMARY = "replies have the thinking itself"


def _think(given: bool | str) -> dict[str, Any]:
    return {"enabled": given} if isinstance(given, bool) else {"effort": given, "enabled": given != "none"}


@having(
    Row("enabled", "Whether to think.", Flag, use="thinking"),
    Row("effort", "How much to think.", Level, use="thinking", sets=MANY, read=_think),
    Row("max_tokens", "Most tokens of thinking.", _Budget, use="thinking", sets="budget"),
    Row("exclude", "True leaves the thinking out of the reply.", Flag, use="thinking", sets="shown",
        read=operator.not_),
    Row("summary", _SUMMARY, use="free"),
    Row("generate_summary", _SUMMARY, use="free"),
)  # fmt: skip
class Reasoning(Body):
    """How much to think, as OpenAI's responses and OpenRouter have it."""


@having(
    Row("type", "Whether to think.", Literal["enabled", "adaptive", "disabled", "auto"], use="thinking",
        sets="enabled", read=lambda kind: None if kind == "auto" else kind != "disabled"),
    Row("budget_tokens", "Most tokens of thinking.", _Budget, use="thinking", sets="budget"),
    Row("display", "\"omitted\" leaves the thinking out of the reply.", str, use="thinking", sets="shown",
        read=lambda display: display != "omitted"),
)  # fmt: skip
class ThinkingSwitch(Body):
    """How much to think, as Anthropic has it."""


THINKING = (
    Row("enable_thinking", "Whether to think.", Flag, use="thinking", sets="enabled"),
    Row("reasoning_effort", "How much to think.", Level, use="thinking", sets=MANY, read=_think),
    Row("reasoning_budget_tokens", "Most tokens of thinking; 0: none, -1: no limit.", _Budget,
        ("thinking_budget_tokens", "thinking_budget", "reasoning_budget"), use="thinking", sets="budget"),
    Row("reasoning_budget_message", "Text that ends thinking when its budget is used up.", str,
        ("thinking_budget_message",), use="thinking", sets="closing"),
    Row("include_reasoning", "False leaves the thinking out of the reply.", Flag, use="thinking",
        sets="shown"),
    Row("think", "Whether, or how much, to think.",
        Annotated[Flag | Level, Field(union_mode="left_to_right")], use="thinking", sets=MANY, read=_think),
    Row("thinking", "Whether, and how much, to think.", ThinkingSwitch, use="thinking", sets=MANY,
        read=settings_of("thinking")),
    Row("reasoning", "How much to think.", Reasoning, use="thinking", sets=MANY,
        read=settings_of("thinking")),
)  # fmt: skip
"""Fields that set a Thinking."""

TEMPLATE = (
    Row("chat_template_kwargs", "Variables of the chat template.", Schema, use="template", sets=MANY),
    Row("verbosity", "Variable of the chat template.", Text, use="template"),
)

_PROVIDER = "it concerns a provider's statistics, prices and places; no answer depends on it"
_CACHE = "hotset finds a cached prompt by its tokens"


class CacheControl(Body):
    """A mark of a part of a prompt that a provider keeps in its cache."""

    type: Any = None
    ttl: Any = None


FREE = (
    *(Row(name, _PROVIDER, use="free") for name in (
        "user", "metadata", "safety_identifier", "store", "service_tier", "client_metadata", "inference_geo",
        "speed", "user_profile_id", "workspace_id", "anthropic_version", "anthropic_beta", "betas",
        "priority", "request_id", "session_id",
    )),
    *(Row(name, _CACHE, use="free") for name in (
        "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    )),
    Row("cache_control", _CACHE, CacheControl, use="free"),
    Row("prediction", "it only makes a provider's answer faster", use="free"),
    Row("add_special_tokens", "hotset adds BOS as the model needs it", use="free"),
)  # fmt: skip
"""Fields that need no action: the answer is the one that the client asks for."""

_LOADED = "the model is loaded already; choose it when you start the server"

IGNORED = (
    *(Row(name, _LOADED, use="ignored") for name in (
        "num_ctx", "n_ctx", "num_batch", "num_gpu", "num_gqa", "num_thread", "main_gpu", "numa", "low_vram",
        "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only",
        "rope_frequency_base", "rope_frequency_scale",
    )),
    Row("n_keep", "the context is not shifted", also=("num_keep",), use="ignored"),
    Row("tfs_z", "hotset has no tail-free sampling", use="ignored", neutral=(1,)),
    Row("min_keep", "hotset's filters keep one token at least", use="ignored", neutral=(1,)),
    Row("penalize_newline", "hotset penalises line breaks as other tokens", use="ignored", neutral=(True,)),
    Row("samplers", "the order of the samplers is fixed", use="ignored", also=("sampler_seq",)),
    Row("skip_special_tokens", "answers have no special tokens", use="ignored", neutral=(True,)),
    Row("spaces_between_special_tokens", "answers have no special tokens", use="ignored", neutral=(True,)),
    Row("reasoning_format", "thinking comes as reasoning", use="ignored", neutral=("auto", "deepseek")),
    Row("web_search_options", "hotset does not search the web", use="ignored"),
    Row("timings_per_token", "hotset reports timings with the last piece of an answer", use="ignored"),
    Row("n_indent", "hotset does not control indentation", use="ignored"),
    *(Row(name, "an answer ends by its tokens", use="ignored")
      for name in ("t_max_prompt_ms", "t_max_predict_ms")),
)  # fmt: skip
"""Fields that hotset knows and does not support."""

EVERYWHERE = (*SAMPLING, *REQUEST, *THINKING, *TEMPLATE, *FREE, *IGNORED)
"""Rows of every request for an answer, at its top level and in `options` and `extra_body`."""


@having(*EVERYWHERE)
class Options(Body):
    """Fields of a request that may also be in an object of it."""


@having(
    Row("stream", "Send the answer piece by piece.", Flag, use="route"),
    *EVERYWHERE,
)
class AnswerFields(Body):
    """The fields of every request for an answer.

    options, extra_body: more of them; a field of the request itself counts first.
    """

    model: Text | None = None
    options: Options | None = None
    extra_body: Options | None = None

    def given(self, name: str) -> Any:
        """Return the value of a field of the table, or None."""
        for part in self._parts():
            if (value := getattr(part, name, None)) is not None:
                return value
        return None

    def all_settings(self, use: Use) -> dict[str, Any]:
        """Return the settings of this use, of the request and of the objects in it."""
        found: dict[str, Any] = {}
        for part in reversed(self._parts()):
            found |= part.settings(use)
        return found

    def _parts(self) -> list[Body]:
        return [self, *(one for one in (self.options, self.extra_body) if one is not None)]

    @property
    def thinking_settings(self) -> Thinking:
        """Return how much to think."""
        names: dict[str, str] = {}
        for place, part in ("extra_body.", self.extra_body), ("options.", self.options), ("", self):
            sources = {} if part is None else part.sources("thinking")
            names |= {setting: place + name for setting, (_, name) in sources.items()}
        return Thinking(**self.all_settings("thinking"), fields=names)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        return self.all_settings("template")

    def sampling(
        self, defaults: Mapping[str, Any] = NO_DEFAULTS, logprobs: int | None = None, **over: Any
    ) -> SamplingParams:
        """Return checked parameters. Raises InvalidRequestError.

        defaults: of the model, for missing parameters (Service.sampling). logprobs: as in SamplingParams.
        over: parameters that override the request's.
        """
        given = self.all_settings("sampling")
        return SamplingParams(**{**defaults, **given, **over, "logprobs": logprobs})
