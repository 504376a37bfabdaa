"""What chat and completion requests share: how tokens are chosen, spelled as OpenAI and llama.cpp do.

A field that is not declared is refused by its name. One that is declared is obeyed, or has the one value that
changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator

from hotset.backends.adapters import MOST_ADAPTERS
from hotset.engine.sampler import SamplingParams
from hotset.server.answers import Usage
from hotset.server.errors import RequestError
from hotset.server.shapes import AnswerDetails, OpenAIUsage, PromptDetails

Temperature = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_TOOL_NAME = 128
"""Characters."""
ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_TOOL_NAME}}}$")]


MAX_BIASES = 4096
"""Tokens in a logit_bias."""
MAX_METADATA = 64
"""Entries of metadata."""
MAX_TOOLS = 1024
"""Tools of a request."""

MORE_SAMPLERS = (
    "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent",
    "mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip
"""Fields of SamplingParams that llama-server has by the same names."""

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
CacheRetention = Literal["in_memory", "in-memory", "24h"]

Verbosity = Literal["low", "medium", "high"]


def _fail_fast(schema: Any) -> None:
    """Makes every list in a schema of pydantic's stop at its first error."""
    if isinstance(schema, list | tuple):
        for one in schema:
            _fail_fast(one)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for one in schema.values():
            _fail_fast(one)


def at_most(n: int) -> BeforeValidator:
    """For an object with fields of the client's choice: so many, before any is looked at."""

    def checked(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > n:
            raise ValueError(f"it has {len(given)} entries, and at most {n} are taken")
        return given

    return BeforeValidator(checked)


NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


class Body(BaseModel):
    """The JSON of a request: no other fields, and no guessing at types. A field that is null is absent, one
    that is not declared too: clients write out every field that they know.

    A list is checked up to its first wrong element, and one undeclared field is reported of however many:
    pydantic would make an error of each, a second and more for a body of 4 MB.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if value is not None}
        if len(found) <= len(cls.model_fields):
            return found
        declared = {field.alias or name for name, field in cls.model_fields.items()} | cls.model_fields.keys()
        unknown = next((name for name in found if name not in declared), None)
        return {name: value for name, value in found.items() if name in declared or name == unknown}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # padding against eavesdroppers, of which there is none here


class LoraScale(Body):
    """How much of an adapter (LoRA). id: its number, as llama-server has it, or its name."""

    id: int | str
    scale: float = 1.0


class SamplingFields(Body):
    """Fields of SamplingParams, as OpenAI (the first), llama.cpp and vLLM name them."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], at_most(MAX_BIASES)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: Share | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    top_n_sigma: float | None = None
    typical_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    dynatemp_range: Annotated[float, Field(ge=0)] | None = None
    dynatemp_exponent: Annotated[float, Field(ge=0)] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat_eta: Share | None = None
    dry_multiplier: Annotated[float, Field(ge=0)] | None = None
    dry_base: Annotated[float, Field(ge=1)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    dry_sequence_breakers: list[str] | None = None
    ignore_eos: bool | None = None
    n_predict: int | None = None
    cache_prompt: bool | None = None
    id_slot: Annotated[int, Field(ge=-1)] | None = None
    lora: Annotated[list[LoraScale], Field(max_length=MOST_ADAPTERS)] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None

    # For a provider's statistics, prices and caches: no answer depends on it, and nothing is stored.
    user: str | None = None
    metadata: Annotated[dict[str, Any], at_most(MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: ServiceTier | None = None

    model: str | None = None

    @property
    def slot(self) -> int | None:
        """As of AnswerRequest: -1 is any."""
        return None if self.id_slot == -1 else self.id_slot

    @property
    def adapters(self) -> Mapping[int | str, float] | None:
        """As of AnswerRequest."""
        return None if self.lora is None else {one.id: one.scale for one in self.lora}

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self,
        defaults: Mapping[str, Any] = NO_DEFAULTS,
        *,
        logprobs: int | None,
        max_tokens: int | None = None,
        **forms: Any,
    ) -> SamplingParams:
        """Checked: InvalidRequestError for a value that means nothing, or two that disagree.

        defaults: of the model, for what is left out (Service.sampling).
        logprobs: as in SamplingParams. max_tokens: the field of another name for it. forms: what the answer
        must follow, beside the fields for it.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for a stream; leave it out", param="stream_options")
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": _one("repetition_penalty", self.repetition_penalty, self.repeat_penalty),
            "penalty_last_n": self.repeat_last_n,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": self.logit_bias,
            "seed": self.seed,
            "stop": self.stop,
            "max_tokens": _one("max_tokens", max_tokens, self.max_tokens, self.n_predict),
            "ignore_eos": self.ignore_eos,
            "logprobs": logprobs,
            "grammar": self.grammar,
            "regex": self.regex,
            "json_schema": self.json_schema,
        }
        for name, value in forms.items():
            if given.get(name) is not None:
                raise RequestError(f"response_format and {name} both say what to follow", param=name)
            given[name] = value
        given |= {name: getattr(self, name) for name in MORE_SAMPLERS}
        # -1 is llama.cpp's way to ask for any seed, and for as many tokens as it takes.
        unset = [name for name in ("seed", "max_tokens") if given[name] == -1]
        return sampled(given | dict.fromkeys(unset), defaults, unset)


def sampled(
    given: Mapping[str, Any], defaults: Mapping[str, Any], unset: Collection[str] = ()
) -> SamplingParams:
    """The parameters of a request, with a model's own defaults (Service.sampling) for those that are None.

    unset: those that the request wants as they are without any default.
    """
    own = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{name: value for name, value in defaults.items() if name not in unset} | own)


def _one(name: str, *values: Any) -> Any:
    """The value of a parameter that has several names; RequestError where they disagree."""
    given = [value for value in values if value is not None]
    if len(set(given)) > 1:
        raise RequestError(f"{name} is given twice, as {given[0]} and as {given[1]}", param=name)
    return given[0] if given else None


def verbosity(wanted: Verbosity | None) -> dict[str, Any]:
    """A variable for the chat templates that know it."""
    return {} if wanted is None else {"verbosity": wanted}


def usage_dict(usage: Usage) -> dict[str, Any]:
    return OpenAIUsage.written(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptDetails.written(cached_tokens=usage.cached_tokens),
        completion_tokens_details=AnswerDetails.written(reasoning_tokens=usage.reasoning_tokens),
    )
