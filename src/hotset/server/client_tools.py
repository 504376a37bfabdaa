"""Tools that the client runs and that have a type of their own, translated to functions and back.

The model sees a function in place of such a tool (`ClientTool.turn`). OpenAI's schemas write a call of that
function as a call of the tool: `CallForm` translates both ways. Anthropic's tools have calls like functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, field_validator

from hotset.errors import InvalidRequestError
from hotset.server.modalities import note_of
from hotset.server.rows import Body, Row, Text, having
from hotset.text.image_parts import given_image
from hotset.text.image_text import NOTE, joined, text_of_image

Json = dict[str, Any]


@dataclass(frozen=True)
class ClientTool:
    """The function that replaces a tool in the prompt.

    parameters: a JSON schema. is_strict: whether calls follow it.
    """

    name: str
    description: str
    parameters: Json
    is_strict: bool = False

    def turn(self) -> Json:
        """Return the tool as chat templates have it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function | ({"strict": True} if self.is_strict else {})}


def _object(required: tuple[str, ...], **properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


def _whole(description: str) -> Json:
    return {"type": "integer", "description": description}


def _texts(description: str) -> Json:
    return {"type": "array", "items": {"type": "string"}, "description": description}


def _one_of(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


# ---- OpenAI's tools ----


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class LocalShellAction(_Arguments):
    """One command: the program and its arguments. A plain text is a line for a shell."""

    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None

    @field_validator("command", mode="before")
    @classmethod
    def _line(cls, given: Any) -> Any:
        return ["bash", "-lc", given] if isinstance(given, str) else given


class ShellAction(_Arguments):
    """Lines for a shell."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _Change(_Arguments):
    type: Literal["create_file", "update_file"]
    path: str
    diff: str


class _Deletion(_Arguments):
    type: Literal["delete_file"]
    path: str


_OPERATION: TypeAdapter[_Change | _Deletion] = TypeAdapter(_Change | _Deletion)


def _input_of(arguments: Any) -> Any:
    """Return the free text in the arguments of a custom tool's function."""
    if isinstance(arguments, dict):
        given = arguments.get("input", next(iter(arguments.values()), None) if len(arguments) == 1 else None)
        return given if isinstance(given, str) else None
    return arguments if isinstance(arguments, str) else None


@dataclass(frozen=True)
class CallForm:
    """The form in which an item of /v1/responses has the calls of a type of tool.

    name: of the function; "" for the tool's own. item: the item's type. prefix: of its id. field: of the
    item, for the call itself. read: returns the field's value for the function's arguments; raises ValueError
    or returns None if these do not fit. written: returns the arguments for a field's value.
    """

    name: str
    item: str
    prefix: str
    field: str
    read: Callable[[Any], Any]
    written: Callable[[Any], Any]

    def value(self, arguments: str) -> Any:
        """Return the field's value for the model's arguments; None if they do not fit.

        A custom tool accepts any text: arguments that do not fit are its value.
        """
        try:
            found = self.read(json.loads(arguments, strict=False))
        except (ValueError, RecursionError):  # ValidationError is a ValueError
            found = None
        return arguments if found is None and self is CUSTOM else found

    def arguments(self, value: Any) -> str:
        """Return the function's arguments for a value of the field, as text with JSON."""
        return json.dumps(self.written(value), ensure_ascii=False)


def _given(value: Any) -> Any:
    """Return the fields of a client's object that have a value, without its only type."""
    if not isinstance(value, dict):
        return {}
    return {
        key: one for key, one in value.items() if one not in (None, {}) and (key, one) != ("type", "exec")
    }


CUSTOM = CallForm("", "custom_tool_call", "ctc", "input", _input_of, lambda text: {"input": text})
FORMS: Mapping[str, CallForm] = {
    "custom": CUSTOM,
    "local_shell": CallForm(
        "local_shell", "local_shell_call", "lsh", "action",
        lambda given: LocalShellAction.model_validate(given).model_dump(), _given,
    ),
    "shell": CallForm(
        "shell", "shell_call", "sh", "action",
        lambda given: ShellAction.model_validate(given).model_dump(), _given,
    ),
    "apply_patch": CallForm(
        "apply_patch", "apply_patch_call", "apc", "operation",
        lambda given: _OPERATION.validate_python(given).model_dump(), _given,
    ),
}  # fmt: skip
"""Forms by the type of the tool."""
ITEM_FORMS: Mapping[str, CallForm] = {form.item: form for form in FORMS.values()}
"""Forms by the type of the item."""

_TIMEOUT = _whole("Milliseconds after which it is ended.")
OPENAI_TOOLS: Mapping[str, ClientTool] = {
    "local_shell": ClientTool(
        "local_shell",
        "Runs a command on the user's computer and returns its output.",
        _object(
            ("command",),
            command=_texts("The program and its arguments."),
            working_directory=_text("The folder in which it runs."),
            timeout_ms=_TIMEOUT,
        ),
    ),
    "shell": ClientTool(
        "shell",
        "Runs shell commands on the user's computer and returns their output.",
        _object(("commands",), commands=_texts("Lines for the shell."), timeout_ms=_TIMEOUT),
    ),
    "apply_patch": ClientTool(
        "apply_patch",
        "Creates, updates or deletes a file.",
        _object(
            ("type", "path"),
            type=_one_of("create_file", "update_file", "delete_file"),
            path=_text("The file."),
            diff=_text(
                "In the V4A diff format: the lines of the file with '+', '-' or ' ' in front of each."
            ),
        ),
    ),
}
"""Tools that have a type and no name."""


@having(
    Row("syntax", "a Lark grammar of a tool's input is in the prompt, and not enforced", Text, use="ignored",
        neutral=("regex",)),
)  # fmt: skip
class TextGrammar(Body):
    """A grammar of a custom tool's input. A regular expression is enforced if the model calls the tool."""

    definition: str | None = None


class TextFormat(TextGrammar):
    """The form of a custom tool's input; chats have the grammar in an object of its own."""

    type: Text | None = None
    grammar: TextGrammar | None = None


def custom_tool(name: str, description: str | None, form: TextFormat | None) -> ClientTool:
    """Return the function for a custom tool. form: the form of its input."""
    says = [description] if description else []
    given = _text("The text for the tool.")
    is_strict = False
    if form is not None and form.type == "grammar":
        grammar = form.grammar or form
        syntax = getattr(grammar, "syntax", None)
        says.append(f"The input follows this {syntax} grammar:\n{grammar.definition}")
        if is_strict := syntax == "regex" and grammar.definition is not None:
            given["pattern"] = f"^(?:{grammar.definition})$"
    return ClientTool(name, "\n\n".join(says), _object(("input",), input=given), is_strict)


def result_text(output: Any) -> str:
    """Return the text of a tool's result. A shell's result has the output and the end of each command."""
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        return json.dumps(output, ensure_ascii=False)
    return joined("\n", [_part_text(one) for one in output if isinstance(one, dict)])


def _part_text(part: Json) -> str:
    if "outcome" in part:
        return _command_text(part)
    try:
        image = given_image(part, local=False)
    except InvalidRequestError:
        return NOTE
    return note_of(part) or str(part.get("text") or "") if image is None else text_of_image(image)


def _command_text(one: Json) -> str:
    outcome = one["outcome"] if isinstance(one["outcome"], dict) else {}
    end = "timed out" if outcome.get("type") == "timeout" else f"exit code {outcome.get('exit_code')}"
    texts = (str(one.get(name) or "").rstrip("\n") for name in ("stdout", "stderr"))
    return "\n".join([*filter(None, texts), f"[{end}]"])


# ---- Anthropic's tools ----

_FILE = {
    "path": _text("The file or folder."),
    "file_text": _text("For create: the text of the file."),
    "old_str": _text("For str_replace: a text that the file has once."),
    "new_str": _text("For str_replace: the text in its place."),
    "insert_line": _whole(
        "For insert: the number of the line after which the text is put; 0 is the beginning."
    ),
    "insert_text": _text("For insert: the text."),
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For view: the numbers of the first and the last line; -1 is the end.",
    },
}
_EDITS = ("view", "create", "str_replace", "insert")
_ANTHROPIC: Mapping[str, tuple[str, str, Json]] = {
    "bash_": (
        "bash",
        "Runs a command in a bash session that stays open, and returns its output.",
        _object(
            (),
            command=_text("The command."),
            restart={"type": "boolean", "description": "Restart the session."},
        ),
    ),
    "text_editor_": (
        "str_replace_based_edit_tool",
        "Views, creates and edits text files.",
        _object(("command", "path"), command=_one_of(*_EDITS), **_FILE),
    ),
    "memory_": (
        "memory",
        "Keeps notes in files below /memories, which later conversations can read.",
        _object(
            ("command",),
            command=_one_of(*_EDITS, "delete", "rename"),
            **_FILE,
            old_path=_text("For rename: the file."),
            new_path=_text("For rename: its new name."),
        ),
    ),
}
"""The usual name, description and parameters, by the type without its date."""


def anthropic_tool(kind: str, name: str | None) -> ClientTool | None:
    """Return the function for a type such as bash_20250124; None for a type that hotset does not know."""
    for prefix, (usual, description, parameters) in _ANTHROPIC.items():
        if kind.removeprefix(prefix).isdecimal() and kind.startswith(prefix):
            return ClientTool(name or usual, description, parameters)
    return None
