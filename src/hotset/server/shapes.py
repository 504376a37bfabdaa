"""The replies of all API schemas, as models for the OpenAPI document and as makers of JSON."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"


class Shape(BaseModel):
    """A reply, or a part of one, with no other fields than these."""

    model_config = ConfigDict(extra="forbid")
    _constants: ClassVar[dict[str, dict[str, Any]]]  # those that precede a field; "": all

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        found: dict[str, Any] = {}
        cls._constants = {"": found}
        for name, field in cls.model_fields.items():
            cls._constants[name] = dict(found)
            if field.is_required() and (values := _only_value(field)):
                found[name] = values[0]

    @classmethod
    def written(cls, **fields: Any) -> dict[str, Any]:
        """Return JSON with these fields, in this order. Raises KeyError for an unknown field.

        A required field with only one possible value is added, before the fields that it precedes here.
        No other field is added: a stream sends incomplete replies. Nothing is validated: validation holds
        the interpreter's lock, and a reply may have a million logprobs.
        """
        if not cls._constants[""] and fields.keys() <= cls._constants.keys():
            return fields
        written: dict[str, Any] = {}
        for name, value in fields.items():
            constants = cls._constants[name].items()
            written |= {constant: only for constant, only in constants if constant not in fields}
            written[name] = value
        return written | {name: only for name, only in cls._constants[""].items() if name not in written}


def _only_value(field: FieldInfo) -> list[Any]:
    """Return a list with the only possible value of a field; empty if it has several."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        values = list(get_args(kind))
        return values if len(values) == 1 else []
    if kind is NoneType:
        return [None]
    if isinstance(kind, type) and issubclass(kind, Shape):
        only = kind.written()
        return [only] if only.keys() == kind.model_fields.keys() else []
    return [[]] if any(getattr(limit, "max_length", None) == 0 for limit in field.metadata) else []


Responses = dict[int | str, dict[str, Any]]


def documented(reply: type[BaseModel] | UnionType, stream: str) -> Responses:
    """Return the `responses` of a route that answers whole, or as a stream of this type if requested."""
    return {200: {"model": reply, **documented_as(stream)[200]}}


def documented_as(media_type: str) -> Responses:
    """Return the `responses` of a route that answers with a type other than JSON."""
    return {200: {"content": {media_type: {}}}}


def errors(reply: type[BaseModel]) -> Responses:
    """Return the `responses` of all routes of an API schema."""
    return {
        "4XX": {"model": reply, "description": "What is wrong with the request, as a message"},
        "5XX": {"model": reply, "description": "What went wrong here, or that the model is not ready"},
    }


# ---- OpenAI's ----


class OpenAIError(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorReply(Shape):
    error: OpenAIError


class TokenEntry(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenWithTop(TokenEntry):
    top_logprobs: list[TokenEntry]


class ChatLogprobs(Shape):
    content: list[TokenWithTop]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str


class ChatToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CustomCall(Shape):
    name: str
    input: str


class ChatCustomCall(Shape):
    id: str
    type: Literal["custom"]
    custom: CustomCall


class ChatReplyMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any] = Field(max_length=0)
    reasoning_content: str = ""
    tool_calls: list[ChatToolCall | ChatCustomCall] = Field(default=[])
    function_call: CalledFunction | None = None  # of a request with `functions`


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(Shape):
    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class PromptDetails(Shape):
    cached_tokens: int


class AnswerDetails(Shape):
    reasoning_tokens: int


class OpenAIUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: AnswerDetails


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(Shape):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class RankedText(Shape):
    text: str


class RerankResult(Shape):
    """A ranked document. document: its text, if the request wants it."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankReply(Shape):
    """Jina's form, the best document first."""

    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: EmbeddingsUsage


class ChatReply(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionReply(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: OpenAIUsage


# ---- llama-server's and vLLM's ----


class DetokenizeReply(Shape):
    content: str
    prompt: str


class TemplateReply(Shape):
    prompt: str


class LlamaTimings(Shape):
    cache_n: int = 0
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class TokenWithId(TokenEntry):
    id: int
    top_logprobs: list[dict[str, Any]] = []


class LlamaReply(Shape):
    """A whole reply, or an event of a stream; the last event has all fields but the text and the tokens.

    response_fields may choose some of them.
    """

    index: int = 0
    content: str = ""
    tokens: list[int] = []
    id_slot: int = -1
    stop: bool = True
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    generation_settings: dict[str, Any] = {}
    prompt: str = ""
    has_new_line: bool = False
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word"] = "eos"
    stopping_word: str = ""
    timings: LlamaTimings | None = None
    completion_probabilities: list[TokenWithId] = []


class SlotTimings(Shape):
    save_ms: float | None = None
    restore_ms: float | None = None


class SlotReply(Shape):
    """The tokens and bytes of the requested action."""

    id_slot: int
    filename: str | None = None
    n_saved: int | None = None
    n_written: int | None = None
    n_restored: int | None = None
    n_read: int | None = None
    n_erased: int | None = None
    timings: SlotTimings | None = None


class AdapterReply(Shape):
    """An adapter (LoRA) as llama-server has it, and its name.

    path: the name of its file or folder. scale: of requests that choose no adapters.
    """

    id: int
    name: str
    path: str
    scale: float


# ---- /v1/responses ----

Status = Literal["completed", "incomplete"]


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[TokenWithTop]


class OutputMessage(Shape):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningPart(Shape):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Shape):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any] = Field(max_length=0)
    content: list[ReasoningPart]


class OutputCall(Shape):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    namespace: str | None = None
    name: str
    arguments: str


class OutputCustomCall(Shape):
    type: Literal["custom_tool_call"]
    id: str
    status: Status
    call_id: str
    name: str
    input: str


class OutputLocalShellCall(Shape):
    type: Literal["local_shell_call"]
    id: str
    status: Status
    call_id: str
    action: dict[str, Any]


class OutputShellCall(Shape):
    type: Literal["shell_call"]
    id: str
    status: Status
    call_id: str
    action: dict[str, Any]


class OutputPatchCall(Shape):
    type: Literal["apply_patch_call"]
    id: str
    status: Status
    call_id: str
    operation: dict[str, Any]


class Incomplete(Shape):
    reason: Literal["max_output_tokens"]


class InputDetails(Shape):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: AnswerDetails
    total_tokens: int


class ResponseReasoning(Shape):
    effort: str | None
    summary: str | None


class ResponseReply(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int
    status: Status
    error: None
    incomplete_details: Incomplete | None
    output: list[
        OutputMessage
        | OutputReasoning
        | OutputCall
        | OutputCustomCall
        | OutputLocalShellCall
        | OutputShellCall
        | OutputPatchCall
    ]
    usage: ResponseUsage
    model: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    max_tool_calls: int | None
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: ResponseReasoning
    top_logprobs: int
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    previous_response_id: None
    background: Literal[False]
    truncation: Literal["auto", "disabled"]


# ---- Anthropic's ----


class AnthropicError(Shape):
    type: str
    message: str


class AnthropicErrorReply(Shape):
    type: Literal["error"]
    error: AnthropicError
    request_id: None


class DirectCaller(Shape):
    type: Literal["direct"]


class TextReplyBlock(Shape):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingReplyBlock(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseReplyBlock(Shape):
    type: Literal["tool_use"]
    id: str
    caller: DirectCaller
    name: str
    input: dict[str, Any]


class ThinkingDetails(Shape):
    thinking_tokens: int


class MessageUsage(Shape):
    input_tokens: int
    cache_creation: None
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    inference_geo: None
    server_tool_use: None
    service_tier: Literal["standard"]


class AppliedEdits(Shape):
    applied_edits: list[Any] = Field(max_length=0)


class MessageReply(Shape):
    """context_management: of a request that has it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextReplyBlock | ThinkingReplyBlock | ToolUseReplyBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    stop_details: None
    usage: MessageUsage
    container: None
    context_management: AppliedEdits = Field(default=AppliedEdits(applied_edits=[]))


class TokenCount(Shape):
    input_tokens: int


class InputTokens(TokenCount):
    object: Literal["response.input_tokens"]


# ---- Ollama's ----


class OllamaErrorReply(Shape):
    error: str


class OllamaReplyFunction(Shape):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaReplyCall(Shape):
    id: str
    function: OllamaReplyFunction


class OllamaReplyMessage(Shape):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaReplyCall] = Field(default=[])


class OllamaReply(Shape):
    """Counts and durations (nanoseconds) are missing where a model was only to be loaded."""

    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load"]
    logprobs: list[TokenWithTop] = Field(default=[])
    total_duration: int = 0
    load_duration: Literal[0] = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaChatReply(OllamaReply):
    message: OllamaReplyMessage


class OllamaGenerateReply(OllamaReply):
    response: str
    thinking: str = ""


class OllamaEmbedReply(Shape):
    """Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: Literal[0]
    prompt_eval_count: int


class OllamaEmbeddingsReply(Shape):
    embedding: list[float]


# ---- Cohere's ----


class CohereErrorReply(Shape):
    message: str


class CohereVersion(Shape):
    version: Literal["2"]


class CohereTokens(Shape):
    input_tokens: int


class CohereMeta(Shape):
    api_version: CohereVersion
    tokens: CohereTokens


class CohereRerankResult(Shape):
    index: int
    relevance_score: float


class CohereRerankReply(Shape):
    """The best document first."""

    id: str
    results: list[CohereRerankResult]
    meta: CohereMeta


# ---- MCP servers, for the page ----


class McpToolReply(Shape):
    """A tool.

    name: for the model and /mcp/call. tool: the server's name for it. parameters: a JSON schema. digest: of
    its server's program or address and its whole description; a changed digest means another tool.
    """

    name: str
    tool: str
    description: str
    parameters: dict[str, Any]
    digest: str


class McpServerReply(Shape):
    """An MCP server.

    problem: why it failed, or which tools are left out; otherwise empty. tools: its current or last tools.
    """

    name: str
    state: Literal["starting", "ready", "failed"]
    problem: str
    tools: list[McpToolReply]


class McpServersReply(Shape):
    servers: list[McpServerReply]


class McpCallReply(Shape):
    """content: text that is not to be trusted. is_error: the tool says that it failed."""

    content: str
    is_error: bool
