"""Tools and tool choices in the forms of all API schemas."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from hotset.errors import InvalidRequestError
from hotset.escaping import clause
from hotset.parameters import shown
from hotset.server.rows import Body, Flag, Row, Text, UnknownPart, having

MAX_TOOL_NAME = 128
"""Characters of a tool's name."""
ToolName = Annotated[str, Field(pattern=rf"^[^\s\x00-\x1f\x7f\"'`\\<>{{}}\[\]()|,]{{1,{MAX_TOOL_NAME}}}$")]
"""Letters, digits and most signs: models write names without quotation marks and next to brackets."""
MAX_TOOLS = 1024
"""Tools of one request."""

_UNUSED = "all tools are in the prompt"


@having(
    Row("defer_loading", _UNUSED, use="ignored"),
    Row("input_examples", "the prompt has no place for them", use="ignored"),
    Row("eager_input_streaming", "arguments always come piece by piece", use="free"),
    Row("allowed_callers", "only the model calls tools", use="free"),
)  # fmt: skip
class Function(Body):
    """A function that the model may call. parameters: a JSON schema. strict: the arguments follow it."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None

    def turn(self) -> dict[str, Any]:
        """Return the tool as chat templates have it."""
        named = {
            "name": self.name, "description": self.description, "parameters": self.parameters,
            "strict": self.strict,
        }  # fmt: skip
        given = {key: value for key, value in named.items() if value is not None}
        return {"type": "function", "function": given}


class OtherTool(UnknownPart):
    """A tool of another type. The prompt has it if the client runs it and hotset knows the type."""

    name: Text | None = None

    def turn(self) -> dict[str, Any] | None:
        """Return the tool as chat templates have it; None if the prompt does not have it."""
        return None

    @property
    def why_ignored(self) -> str | None:
        if self.turn() is not None:
            return None
        if self.type.startswith("computer"):
            return "it needs a model that sees"
        return "a provider runs such tools, and this server does not"


class _Named(Body):
    name: Text


class _Choosable(Body):
    """A tool that is chosen, or allowed."""

    type: Text | None = None
    name: Text | None = None
    function: _Named | None = None
    custom: _Named | None = None

    def chosen_name(self, known: Collection[str]) -> str | None:
        """Return the tool's name. A tool without a name of its own has its type as name. known: names."""
        named = self.function or self.custom
        name = self.name or (None if named is None else named.name)
        return self.type if name is None and self.type in known else name


class _Allowed(Body):
    mode: Text | None = None
    tools: list[_Choosable] | None = None


class ToolChoice(_Choosable, _Allowed):
    """A choice that is an object: of one tool, of some, or by one word.

    OpenAI has the name in `function` or next to the type, and the allowed tools in `allowed_tools` or next to
    the type. Anthropic has one word as the type.
    """

    type: Text
    allowed_tools: _Allowed | None = None
    disable_parallel_tool_use: Flag = False


AnyToolChoice = str | ToolChoice
_WORDS = {"none": "none", "auto": "auto", "required": "required", "any": "required"}


@dataclass(frozen=True)
class Chosen:
    """The tools that the model may call, and whether it must. value: as in AnswerRequest.tool_choice."""

    tools: list[dict[str, Any]]
    value: str | dict[str, str]


def chosen(choice: AnyToolChoice | None, tools: Iterable[dict[str, Any]]) -> Chosen:
    """Return the tools and the choice. Raises InvalidRequestError for an allowed tool that is missing."""
    given = list(tools)
    if choice is None:
        return Chosen(given, "auto")
    if isinstance(choice, str):
        return Chosen(given, _word(choice))
    known = {tool["function"]["name"] for tool in given}
    name = choice.chosen_name(known)
    if choice.type == "allowed_tools":
        allowed = choice.allowed_tools or choice
        names = [one.chosen_name(known) for one in allowed.tools or ()]
        _check_names([one for one in names if one], given)
        some = [tool for tool in given if tool["function"]["name"] in names]
        return Chosen(some, _word(allowed.mode or "auto"))
    if name is None:
        return Chosen(given, _word(choice.type))
    return Chosen(given, {"name": name})


def _word(word: str) -> str:
    if word not in _WORDS:
        raise InvalidRequestError(
            f"tool_choice must be none, auto, required, or a function, not {clause(shown(word))}"
        )
    return _WORDS[word]


def _check_names(names: Sequence[str], tools: Sequence[dict[str, Any]]) -> None:
    known = {tool["function"]["name"] for tool in tools}
    for name in names:
        if name not in known:
            raise InvalidRequestError(
                f"tool_choice names {clause(shown(name))}, which is not among the tools"
            )
