"""POST /v1/responses, without a memory: every request brings its whole conversation.

Only a translation: input items become the messages of a chat, and the deltas of an answer become output items
and their events. A field that is not declared is refused by its name; one that is declared is obeyed, or has
the one value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Discriminator, Field, Tag

from hotset.engine.sampler import SamplingParams
from hotset.errors import InvalidRequestError
from hotset.parameters import shown
from hotset.server.answers import AnswerRequest
from hotset.server.body import BodyRoute
from hotset.server.modalities import check_part
from hotset.server.openai.response_writer import ResponseWriter
from hotset.server.openai.schema import (
    MAX_METADATA,
    MAX_TOOL_NAME,
    MAX_TOOLS,
    NO_DEFAULTS,
    Body,
    CacheRetention,
    ServiceTier,
    Share,
    Temperature,
    ToolName,
    Verbosity,
    at_most,
    sampled,
    verbosity,
)
from hotset.server.shapes import EVENT_STREAM, ResponseReasoning, ResponseReply, documented
from hotset.server.streams import off_loop, serving, streamed, whole
from hotset.server.turns import Turn, add, tool_call

router = APIRouter(route_class=BodyRoute)

# ---- what a client sends ----

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None  # as an answer bears them
    logprobs: list[Any] | None = None


Content = str | list[Annotated[TextPart, BeforeValidator(check_part)]]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # no template distinguishes these


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None  # there is none: answers have their reasoning in the open
    id: str | None = None
    status: Status | None = None


def _kind(item: Any) -> Any:
    """What distinguishes items: the type, which a message may leave out."""
    return (item.get("type") or "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Body):
    """Functions in a namespace; the model sees each as NAMESPACE__NAME."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


Tool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class PlainText(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool = False  # answers follow the schema whatever it says


class TextSettings(Body):
    format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] | None = None
    verbosity: Verbosity | None = None


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(Body):
    """An answer has its reasoning whole, whatever summary is asked for."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None  # the older name


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None  # padding against eavesdroppers, of which there is none here


# Of these the logprobs add something. Reasoning comes in the open, and can be sent again as the encrypted one
# could. The others belong to tools that a provider runs, of which there are none.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesBody(Body):
    """OpenAI's body, less what this server does not have: nothing is stored, and nothing is looked up."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Includable] | None = None

    store: bool | None = None  # the response says false: nothing is stored
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    prompt: None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of tools that a provider runs: none here
    # For a provider's statistics, prices and caches: no answer depends on it.
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    client_metadata: Annotated[dict[str, Any], at_most(MAX_METADATA)] | None = None  # as Codex sends it
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None

    @property
    def logprobs(self) -> int | None:
        """As in SamplingParams."""
        wanted = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None


# ---- from a body to a request ----


def answer_request(body: ResponsesBody, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
    """Raises InvalidRequestError for what is wrong with it."""
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_tokens": body.max_output_tokens,
        "logprobs": body.logprobs,
        **_form(body.text),
    }
    return AnswerRequest(
        messages=conversation(body.instructions, body.input),
        tools=_tools(body.tools or ()),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template=_template(body.reasoning) | verbosity(body.text.verbosity if body.text else None),
        params=sampled(given, defaults),
        stream=bool(body.stream),
    )


def conversation(instructions: str | None, items: str | list[Item]) -> list[Turn]:
    """The turns of a conversation. What the model said, thought and called, one item after the other, is one
    turn; messages of others are turns of their own."""
    turns: list[Turn] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*turns, {"role": "user", "content": items}]
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for i, item in enumerate(items):
        match item:
            case MessageItem(role="assistant"):
                add(turns, {"role": "assistant", "content": _joined(item.content)})
            case MessageItem():
                role = "system" if item.role == "developer" else item.role  # what templates know
                turns.append({"role": role, "content": _joined(item.content)})
            case ReasoningItem():
                text = "\n".join(part.text for part in item.content or item.summary or ())
                add(turns, {"role": "assistant", "reasoning_content": text})
            case FunctionCallItem():
                names[item.call_id] = _full_name(item.namespace, item.name)
                call = tool_call(item.call_id, names[item.call_id], item.arguments)
                add(turns, {"role": "assistant", "tool_calls": [call]})
            case FunctionCallOutputItem():
                if item.call_id not in names:
                    raise InvalidRequestError(
                        f"input.{i}: there is no function_call with the call_id {shown(item.call_id)} before "
                        "its output; nothing is stored, so send the whole conversation"
                    )
                output = {"tool_call_id": item.call_id, "name": names[item.call_id]}
                turns.append({"role": "tool", **output, "content": _joined(item.output)})
    return turns


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _form(text: TextSettings | None) -> dict[str, Any]:
    """What the answer must follow, as SamplingParams has it."""
    match text and text.format:
        case JsonSchema(schema_=schema):
            return {"json_schema": schema}
        case JsonObject():
            return {"json_object": True}
    return {}


def _full_name(namespace: str | None, name: str) -> str:
    """What the model calls a function."""
    return name if namespace is None else f"{namespace}__{name}"


def _functions(tools: Sequence[FunctionTool | NamespaceTool]) -> Iterator[tuple[str | None, FunctionTool]]:
    """Each function with its namespace."""
    for tool in tools:
        if isinstance(tool, FunctionTool):
            yield None, tool
        else:
            yield from ((tool.name, function) for function in tool.tools)


def _tools(tools: Sequence[FunctionTool | NamespaceTool]) -> list[dict[str, Any]]:
    """Raises InvalidRequestError for too many, and for a full name that is too long or has two meanings."""
    found: list[dict[str, Any]] = []
    owners: dict[str, str | None] = {}
    for namespace, tool in _functions(tools):
        name = _full_name(namespace, tool.name)
        if len(name) > MAX_TOOL_NAME or len(found) == MAX_TOOLS:
            limit = (
                f"{MAX_TOOLS} tools" if len(found) == MAX_TOOLS else f"names of {MAX_TOOL_NAME} characters"
            )
            raise InvalidRequestError(f"tools: a request has at most {limit}, those of namespaces with these")
        if owners.setdefault(name, namespace) != namespace:
            raise InvalidRequestError(
                f"tools: the model would see {name!r} twice, of two namespaces; rename one of these functions"
            )
        function = tool.model_dump(exclude={"type"}, exclude_none=True) | {"name": name}
        function = {"parameters": {"type": "object", "properties": {}}} | function
        found.append({"type": "function", "function": function})
    return found


def namespaces(tools: Sequence[FunctionTool | NamespaceTool]) -> dict[str, tuple[str, str]]:
    """What the model calls the functions of namespaces → namespace and name."""
    return {
        _full_name(namespace, tool.name): (namespace, tool.name)
        for namespace, tool in _functions(tools)
        if namespace is not None
    }


def _tool_choice(choice: str | NamedFunction | None) -> str | Mapping[str, str]:
    if isinstance(choice, NamedFunction):
        return {"name": choice.name}
    return choice or "auto"


def _template(reasoning: Reasoning | None) -> dict[str, Any]:
    if reasoning is None or reasoning.effort is None:
        return {}
    if reasoning.effort == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": reasoning.effort}


@router.post("/v1/responses", responses=documented(ResponseReply, EVENT_STREAM))
async def responses(body: ResponsesBody, http: Request) -> Response:
    service = await serving(http, body.model, takes_adapter=True)
    request = await off_loop(http, answer_request, body, service.sampling)
    said = head(service.name, body, request.params)
    writer = ResponseWriter(said, service.model.tokenizer, body.logprobs, namespaces(body.tools or ()))
    if request.stream:
        return await streamed(http, request, writer.events, writer.sign_of_life)
    return await whole(http, request, lambda answer, choices: writer.whole(answer, choices[0]))


def head(model: str, body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    """Fields of a ResponseReply: what it repeats of its request, and what the server made of it."""

    def given(part: Body) -> dict[str, Any]:
        return part.model_dump(by_alias=True)

    choice, reasoning = body.tool_choice, body.reasoning or Reasoning()
    form = body.text.format if body.text and body.text.format else PlainText(type="text")
    spoken = verbosity(body.text.verbosity if body.text else None)
    return {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "tools": [given(tool) for tool in body.tools or ()],
        "tool_choice": given(choice) if isinstance(choice, NamedFunction) else choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_tool_calls": body.max_tool_calls,
        "text": {"format": given(form), **spoken},
        "reasoning": ResponseReasoning.written(
            effort=reasoning.effort, summary=reasoning.summary or reasoning.generate_summary
        ),
        "top_logprobs": body.top_logprobs or 0,
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
