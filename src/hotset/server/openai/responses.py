"""POST /v1/responses, without stored responses: every request has its whole conversation.

Input items become the messages of a chat, and the deltas of an answer become output items and their
events.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field

from hotset.engine.sampler import SamplingParams
from hotset.errors import InvalidRequestError
from hotset.server.answers import AnswerRequest
from hotset.server.body import BodyRoute
from hotset.server.client_tools import FORMS, ITEM_FORMS, OPENAI_TOOLS, TextFormat, custom_tool, result_text
from hotset.server.errors import RequestError
from hotset.server.fields import NO_DEFAULTS, TRUNCATION, AnswerFields, ResponseFormat, form_of
from hotset.server.modalities import check_part, note_of
from hotset.server.openai.response_writer import ResponseWriter, ToolNames
from hotset.server.openai.schema import StreamOptions, logprobs_of
from hotset.server.rows import (
    MANY,
    Body,
    ByType,
    Flag,
    Row,
    Text,
    UnknownPart,
    having,
    integer,
    settings_of,
)
from hotset.server.shapes import EVENT_STREAM, InputTokens, ResponseReasoning, ResponseReply, documented
from hotset.server.streams import off_loop, serving, streamed, until_left, whole
from hotset.server.tool_fields import (
    MAX_TOOL_NAME,
    MAX_TOOLS,
    AnyToolChoice,
    Function,
    OtherTool,
    ToolChoice,
    ToolName,
    chosen,
)
from hotset.server.turns import ROLES, Turn, add, client_image, tool_call
from hotset.text.image_text import joined

router = APIRouter(route_class=BodyRoute)

# ---- requests ----


class TextPart(Body):
    """A text in a message. annotations, logprobs: as an answer has them."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


def _noted(part: Any) -> Any:
    """Replace a part of a tool's result that no model here reads by a note."""
    note = note_of(part)
    return {"type": "input_text", "text": note} if note else part


class ImagePart(Body):
    """An image: a data URL, or an address. file_id: of a file that a provider stores."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: str | None = None
    file_id: Any = None

    @cached_property
    def text(self) -> str:
        """Return the image as a text with one image. Raises InvalidRequestError."""
        if self.image_url is None:
            raise InvalidRequestError("no files are stored, so send the image itself as image_url")
        found = client_image({"type": self.type, "image_url": self.image_url, "detail": self.detail})
        assert found is not None
        return found


Part = Annotated[TextPart | ImagePart | RefusalPart | UnknownPart, ByType("text")]
Content = str | list[Annotated[Part, BeforeValidator(check_part)]]


class _Item(Body):
    id: Text | None = None
    status: Text | None = None


class MessageItem(_Item):
    """A message. phase: whether it is a comment or the answer, which no template distinguishes."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = ""
    phase: Any = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: Text
    name: str
    namespace: str | None = None
    arguments: str = "{}"


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: str | list[Annotated[Part, BeforeValidator(_noted)]] = ""


@having(*(Row(name, "replies have it", use="free") for name in ("environment", "caller", "created_by")))
class ClientCallItem(_Item):
    """A call of a tool with a type of its own. input, action, operation: of the types that have it."""

    type: Literal["custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"]
    call_id: Text | None = None
    name: str | None = None
    namespace: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None


class ClientOutputItem(_Item):
    """The result of such a call. id: of a local shell's result, it may be the call's."""

    type: Literal[
        "custom_tool_call_output", "local_shell_call_output", "shell_call_output", "apply_patch_call_output"
    ]
    call_id: Text | None = None
    output: Any = ""
    max_output_length: Any = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


@having(Row("encrypted_content", "only its provider can read it", use="ignored"))
class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None


@having(Row("id", "nothing is stored, so send the item itself", use="refused"))
class ItemReference(Body):
    type: Literal["item_reference"]


Item = Annotated[
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | ClientCallItem
    | ClientOutputItem
    | ReasoningItem
    | ItemReference
    | UnknownPart,
    ByType("message"),
]


class FunctionTool(Function):
    type: Literal["function"] = "function"


class NamespaceTool(Body):
    """Functions in a namespace; the model sees each as NAMESPACE__NAME."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


class CustomTool(Body):
    """A tool that takes any text. format: a grammar of the text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: TextFormat | None = None

    def turn(self) -> dict[str, Any]:
        """Return the tool as chat templates have it."""
        return custom_tool(self.name, self.description, self.format).turn()


class NamelessTool(OtherTool):
    """A tool with a type and no name. environment: of a shell; in a container a provider runs it."""

    environment: Any = None

    def turn(self) -> dict[str, Any] | None:
        place = self.environment.get("type") if isinstance(self.environment, dict) else None
        tool = None if place not in (None, "local") else OPENAI_TOOLS.get(self.type)
        return None if tool is None else tool.turn()


Tool = Annotated[FunctionTool | NamespaceTool | CustomTool | NamelessTool, ByType("function")]


@having(
    Row("format", "The form of the answer.", ResponseFormat, sets=MANY, read=form_of),
    Row("verbosity", "Variable of the chat template.", Text, use="template"),
)
class TextSettings(Body):
    """How an answer is written."""


_NOTHING_STORED = "nothing is stored, so send the whole conversation"


@having(
    *(Row("text", "Form and verbosity of the answer.", TextSettings, use=use, sets=MANY,
          read=settings_of(use)) for use in ("sampling", "template")),
    Row("top_logprobs", "Logprobs of this number of likeliest tokens.", integer(0, 20), use="route"),
    Row("parallel_tool_calls", "False ends the answer with its first call.", Flag, use="request"),
    Row("previous_response_id", _NOTHING_STORED, use="refused"),
    Row("conversation", _NOTHING_STORED, use="refused"),
    Row("prompt", "no prompts are stored, so send the text itself", use="refused"),
    Row("background", "the answer comes with the reply", use="ignored"),
    TRUNCATION,
    Row("context_management", "a conversation that does not fit is refused", use="ignored"),
    Row("moderation", "hotset moderates nothing", use="ignored"),
    Row("max_tool_calls", "it concerns tools that a provider runs", use="free"),
)  # fmt: skip
class ResponsesBody(AnswerFields):
    """The body of a response, as OpenAI has it. Nothing is stored, and nothing is looked up.

    include: parts of the response. Only logprobs have an effect: reasoning is always included, and the other
    parts belong to tools that a provider runs.
    """

    input: str | list[Item] = ""
    instructions: str | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnyToolChoice | None = None
    include: list[str] | None = None

    @property
    def logprobs(self) -> int | None:
        """Return the number of logprobs for SamplingParams, or None."""
        wanted = "message.output_text.logprobs" in (self.include or ())
        return logprobs_of(wanted, self.given("top_logprobs"))


# ---- from a body to a request ----


def answer_request(body: ResponsesBody, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
    """Return the request that a body describes. Raises InvalidRequestError."""
    use = chosen(body.tool_choice, _tools(body.tools or ()))
    return AnswerRequest(
        messages=conversation(body.instructions, body.input),
        tools=use.tools,
        tool_choice=use.value,
        template=body.template_variables,
        thinking=body.thinking_settings,
        params=body.sampling(defaults, body.logprobs),
        stream=bool(body.given("stream")),
        **body.all_settings("request"),
    )


def conversation(instructions: str | None, items: str | list[Item]) -> list[Turn]:
    """Return the turns of a conversation. Raises RequestError if it is empty.

    Adjacent text, reasoning and calls of the assistant form one turn. Every other message is a turn of its
    own.
    """
    if not instructions and not items:
        raise RequestError("input is empty; give a text, or items", param="input")
    turns: list[Turn] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*turns, {"role": "user", "content": items}] if items else turns
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    ids: dict[str, str] = {}  # of calls, by the ids of their items
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                add(turns, {"role": "assistant", "content": _joined(item.content)})
            case MessageItem():
                turns.append({"role": ROLES[item.role], "content": _joined(item.content)})
            case ReasoningItem():
                if text := "\n".join(part.text for part in item.content or item.summary or ()):
                    add(turns, {"role": "assistant", "reasoning_content": text})
            case FunctionCallItem():
                names[item.call_id] = _full_name(item.namespace, item.name)
                call = tool_call(item.call_id, names[item.call_id], item.arguments)
                add(turns, {"role": "assistant", "tool_calls": [call]})
            case ClientCallItem():
                form = ITEM_FORMS[item.type]
                id = ids[item.id or ""] = item.call_id or item.id or ""
                names[id] = _full_name(item.namespace, item.name or form.name)
                call = tool_call(id, names[id], form.arguments(getattr(item, form.field)))
                add(turns, {"role": "assistant", "tool_calls": [call]})
            case ClientOutputItem():
                id = item.call_id or ids.get(item.id or "", item.id or "")
                named = {"name": names[id]} if id in names else {}
                turns.append({"role": "tool", "tool_call_id": id, **named, "content": _result(item)})
            case FunctionCallOutputItem():
                name = names.get(item.call_id)
                output = {"tool_call_id": item.call_id} | ({} if name is None else {"name": name})
                turns.append({"role": "tool", **output, "content": _joined(item.output)})
    return turns


def _result(item: ClientOutputItem) -> str:
    text = result_text(item.output)
    return joined(" ", ["Error:", text]) if item.status == "failed" else text


def _joined(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    texts = [part.refusal if isinstance(part, RefusalPart) else getattr(part, "text", "") for part in content]
    return joined("", texts)


def _full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a function."""
    return name if namespace is None else f"{namespace}__{name}"


def _functions(tools: Sequence[Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield each function as chat templates have it, with its namespace."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from ((tool.name, function.turn()["function"]) for function in tool.tools)
        elif (turn := tool.turn()) is not None:
            yield None, turn["function"]


def _tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the functions for the model. Raises InvalidRequestError for too many, or for a bad full name.

    A full name is bad if it is too long, or if two functions have it.
    """
    found: list[dict[str, Any]] = []
    owners: dict[str, str | None] = {}
    for namespace, function in _functions(tools):
        name = _full_name(namespace, function["name"])
        if len(name) > MAX_TOOL_NAME or len(found) == MAX_TOOLS:
            limit = (
                f"{MAX_TOOLS} tools" if len(found) == MAX_TOOLS else f"names of {MAX_TOOL_NAME} characters"
            )
            raise InvalidRequestError(f"tools: a request has at most {limit}, including namespaces")
        if owners.setdefault(name, namespace) != namespace:
            raise InvalidRequestError(
                f"tools: the model would see {name!r} twice, of two namespaces; rename one of these functions"
            )
        function = {"parameters": {"type": "object", "properties": {}}, **function, "name": name}
        found.append({"type": "function", "function": function})
    return found


def tool_names(tools: Sequence[Any]) -> ToolNames:
    """Return the forms of calls in the response, by the names of the functions that the model calls."""
    spaces = {
        _full_name(namespace, function["name"]): (namespace, function["name"])
        for namespace, function in _functions(tools)
        if namespace is not None
    }
    forms = {
        turn["function"]["name"]: FORMS[tool.type]
        for tool in tools
        if isinstance(tool, CustomTool | NamelessTool) and (turn := tool.turn()) is not None
    }
    return ToolNames(spaces, forms)


@router.post("/v1/responses", responses=documented(ResponseReply, EVENT_STREAM))
async def responses(body: ResponsesBody, http: Request) -> Response:
    service = await serving(http, body.model, takes_adapter=True)
    request = await off_loop(http, answer_request, body, service.sampling)
    said = head(service.name, body, request.params)
    writer = ResponseWriter(said, service.model.tokenizer, body.logprobs, tool_names(body.tools or ()))
    if request.stream:
        return await streamed(http, request, writer.events, writer.sign_of_life)
    return await whole(http, request, lambda answer, choices: writer.whole(answer, choices[0]))


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: ResponsesBody, http: Request) -> InputTokens:
    """Return the number of tokens of the prompt that /v1/responses would compute for this body."""
    service = await serving(http, body.model, takes_adapter=True)

    def counted(left: threading.Event) -> int:
        return len(service.prompt(answer_request(body, service.sampling), left))

    return InputTokens(object="response.input_tokens", input_tokens=await until_left(http, counted))


def head(model: str, body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a ResponseReply that repeat its request, or follow from it."""
    choice, thinking, metadata = body.tool_choice, body.thinking_settings, body.given("metadata")
    return {
        "model": model,
        "truncation": body.given("truncation") or "disabled",
        "instructions": body.instructions,
        "max_output_tokens": body.all_settings("sampling").get("max_tokens"),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "tools": [_repeated(tool) for tool in body.tools or () if not _is_left_out(tool)],
        "tool_choice": _repeated_choice(choice) if isinstance(choice, ToolChoice) else choice or "auto",
        "parallel_tool_calls": body.given("parallel_tool_calls") is not False,
        "max_tool_calls": body.given("max_tool_calls"),
        "text": _text_settings(body),
        "reasoning": ResponseReasoning.written(effort=thinking.effort, summary=_summary(body)),
        "top_logprobs": body.given("top_logprobs") or 0,
        "metadata": {name: _word(one) or "" for name, one in metadata.items()}
        if isinstance(metadata, dict)
        else {},
        "user": _word(body.given("user")),
        "safety_identifier": _word(body.given("safety_identifier")),
        "prompt_cache_key": _word(body.given("prompt_cache_key")),
    }


def _is_left_out(tool: Body) -> bool:
    return isinstance(tool, UnknownPart) and tool.why_ignored is not None


def _repeated(tool: FunctionTool | NamespaceTool | CustomTool | NamelessTool) -> dict[str, Any]:
    """Return a tool as a reply repeats it."""
    if isinstance(tool, CustomTool | NamelessTool):
        return tool.model_dump(exclude_none=True, exclude=set(tool.model_extra or ()))
    head = {"type": tool.type, "name": tool.name, "description": tool.description}
    if isinstance(tool, NamespaceTool):
        return head | {"tools": [_repeated(one) for one in tool.tools]}
    return head | {"parameters": tool.parameters, "strict": tool.strict}


def _repeated_choice(choice: ToolChoice) -> dict[str, Any]:
    if (name := choice.chosen_name(())) is not None:
        return {"type": "custom" if choice.type == "custom" else "function", "name": name}
    return choice.model_dump(exclude_none=True, exclude={"disable_parallel_tool_use"})


def _text_settings(body: ResponsesBody) -> dict[str, Any]:
    """Return the form and the verbosity of an answer for the reply."""
    given = body.given("text")
    form: ResponseFormat | None = given and given.format
    found: dict[str, Any] = {"type": "text"}
    if form is not None and form.type == "json_object":
        found = {"type": "json_object"}
    elif form is not None and form.type == "json_schema":
        named = form.json_schema or form
        found = {
            "type": "json_schema",
            "name": named.name or "answer",
            "schema": named.schema_,
            "description": named.description,
            "strict": bool(named.strict),
        }
    verbosity = body.template_variables.get("verbosity")
    return {"format": found} | ({} if verbosity is None else {"verbosity": verbosity})


def _summary(body: ResponsesBody) -> str | None:
    given = body.given("reasoning")
    return _word(given and (given.summary or given.generate_summary))


def _words(given: Any) -> dict[str, str]:
    """Return the request's metadata for the reply."""
    return {name: _word(one) or "" for name, one in given.items()} if isinstance(given, dict) else {}


def _word(value: Any) -> str | None:
    """Return a request's text or number as text for the reply; None for other values."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
