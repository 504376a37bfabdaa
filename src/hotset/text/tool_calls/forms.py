"""The forms in which models write tool calls, each described once: for the parser and for the grammar."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from hotset.text.tool_calls.arguments import Json, Pairs, Tags
from hotset.text.tool_calls.bodies import Calls, Named, Objects, kimi_head, mistral_head, read_harmony
from hotset.text.tool_calls.parser import ToolCallParser
from hotset.text.tool_calls.reader import Steps

_FENCE, _LINE = "```", "\n{"  # before calls without a mark
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")  # texts that may be one token


def marks_in(*texts: str) -> tuple[str, ...]:
    """Return the parts of marks that may be special tokens, each once."""
    return tuple(dict.fromkeys(mark for text in texts for mark in _MARK.findall(text)))


def _random_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Return an id for Mistral's templates, which accept only nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class Form:
    """A form of tool calls.

    found_by: a model uses the form if its chat template has all strings of one of these groups. objects,
    named: how calls are written; with both, objects are the calls that begin with a brace. is_loose: calls of
    known functions may also have no mark, at the beginning of the answer or of a line, or in a fenced block.
    After a call with a mark these are text, because models repeat the call for the reader.
    writes_bare: a required call has no mark. ends_reasoning: marks that begin a call even if the model has
    not closed its reasoning. make_id: returns an id for a call that the model does not number itself.
    """

    name: str
    found_by: tuple[tuple[str, ...], ...]
    objects: Objects | None = None
    named: Named | None = None
    is_loose: bool = False
    writes_bare: bool = False
    ends_reasoning: tuple[str, ...] = ()
    make_id: Callable[[], str] = _random_id

    @property
    def opening(self) -> tuple[str, ...]:
        """Return the marks that calls begin with."""
        bodies = [body for body in (self.named, self.objects) if body]
        return tuple(dict.fromkeys(mark for body in bodies for mark in body.opening))

    @property
    def marks(self) -> tuple[str, ...]:
        """Return all strings of the form that may be special tokens, which a decoder leaves out."""
        texts = [*self.opening]
        if self.objects:
            texts.append(self.objects.end)
        if self.named:
            named = self.named
            texts += [named.after_name, named.end, named.section_end]
            texts += [text for text in vars(named.arguments).values() if isinstance(text, str)]
            texts += [*getattr(named.arguments, "quotes", ()), *named.in_head]
        return marks_in(*texts)

    def written(self, calls: Calls) -> str:
        """Return calls as text. Only some forms need it: those whose templates may not write calls."""
        named = self.named
        if named and (isinstance(named.arguments, Json) or named.arguments is _PYTHON):
            return named.written(calls, is_bare=self.writes_bare)
        return (self.objects or Objects()).written(calls, is_bare=self.writes_bare)

    def read(self, parser: ToolCallParser) -> Steps[None]:
        if self.is_loose:
            parser.hold()
            yield from parser.space()
            found = bool((yield from parser.peek("{", "["))) and (yield from self._unmarked(parser))
            _decide(parser, found)
        marks = (*self.opening, _FENCE, _LINE) if self.is_loose else self.opening
        while True:
            mark = yield from parser.until(marks, parser.text)
            if not mark:
                return
            parser.hold()
            if mark == _LINE:
                found = yield from UNMARKED_OBJECTS.read(parser, "")
            else:
                parser.take(len(mark))
                found = yield from (self._fenced(parser) if mark == _FENCE else self._marked(parser, mark))
            _decide(parser, found)
            if found and mark in self.opening:
                marks = self.opening

    def _marked(self, parser: ToolCallParser, mark: str) -> Steps[bool]:
        body = self.named or self.objects
        assert body is not None
        if self.named and self.objects and mark in self.objects.opening:
            yield from parser.space("[")
            body = self.objects if (yield from parser.peek("{")) else self.named
        return (yield from body.read(parser, mark))

    def _unmarked(self, parser: ToolCallParser) -> Steps[bool]:
        """Read objects, or Python in brackets."""
        yield from parser.space("[")
        body = UNMARKED_OBJECTS if (yield from parser.peek("{")) else UNMARKED_PYTHON
        return (yield from body.read(parser, ""))

    def _fenced(self, parser: ToolCallParser) -> Steps[bool]:
        """Read a block of Markdown with objects, or with Python if the block is marked as calls."""
        language = yield from parser.name()
        yield from parser.space("[")
        if (yield from parser.peek("{")):
            return (yield from FENCED_OBJECTS.read(parser, ""))
        if language in ("tool_code", "tool_call"):
            return (yield from FENCED_PYTHON.read(parser, ""))
        return False


def _decide(parser: ToolCallParser, found: bool) -> None:
    if found:
        parser.drop()
    else:
        parser.reject()


@dataclass(frozen=True)
class Harmony(Form):
    """The form of gpt-oss: messages, some of which are calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        names = ("channel", "message", "start", "constrain", "end", "call", "return")
        return tuple(f"<|{name}|>" for name in names)

    def read(self, parser: ToolCallParser) -> Steps[None]:
        return read_harmony(parser)


_PYTHON = Pairs(between="=", end=")", quotes=('"', "'"))
UNMARKED_OBJECTS = Objects(is_checked=True)
UNMARKED_PYTHON = Named("", _PYTHON, after_name="(", between=",[]", is_checked=True)
FENCED_OBJECTS = Objects(end="```", is_checked=True)
FENCED_PYTHON = Named("", _PYTHON, after_name="(", between=",;[]", section_end="```", is_checked=True)


def _invokes(section: str, prefix: str = "") -> Named:
    """Return a form like `<invoke name="get_weather"><parameter name="city">Rome</parameter></invoke>`."""
    return Named(
        f'<{prefix}invoke name="',
        Tags(f'<{prefix}parameter name="', '"', f"</{prefix}parameter>", before=">", says_type=bool(prefix)),
        after_name='">',
        end=f"</{prefix}invoke>",
        section=(f"<{section}>",),
        section_end=f"</{section}>",
        many=True,
        gap=True,
    )


def _functions(section: str) -> Named:
    return Named(
        "<function=",
        Tags("<parameter=", ">", "</parameter>", lines=True),
        after_name=">",
        end="</function>",
        section=(f"<{section}>",),
        section_end=f"</{section}>",
        gap=True,
    )


_OBJECT = Objects(("<tool_call>",), "</tool_call>")
_DSML = "｜DSML｜"

HARMONY = Harmony("harmony", (("<|channel|>", "<|message|>"),))
HERMES = Form("hermes", (("<tool_call>",),), objects=_OBJECT, is_loose=True)
# The first match counts: a template may mention another form's marks.
FORMS: tuple[Form, ...] = (
    HARMONY,
    Form(
        "mistral",
        (("[TOOL_CALLS]",),),
        objects=Objects(("[TOOL_CALLS]",), as_list=True),
        named=Named("[TOOL_CALLS]", Json(), after_name="[ARGS]", head=mistral_head, in_head=("[CALL_ID]",)),
        make_id=_mistral_id,
    ),
    Form(
        "deepseek-v3.2",
        ((_DSML, "function_calls"),),
        named=_invokes(f"{_DSML}function_calls", _DSML),
    ),
    Form(
        "deepseek-v4",
        ((_DSML,),),
        named=_invokes(f"{_DSML}tool_calls", _DSML),
    ),
    Form(
        "deepseek-v3",
        (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),),
        named=Named(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            Json(),
            after_name="\n```json\n",
            end="\n```<｜tool▁call▁end｜>",
            section=("<｜tool▁calls▁begin｜>",),
            section_end="<｜tool▁calls▁end｜>",
            many=True,
            gap=True,
        ),
    ),
    Form(
        "deepseek-v3.1",
        (("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),),
        named=Named(
            "<｜tool▁call▁begin｜>",
            Json(),
            after_name="<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
            section=("<｜tool▁calls▁begin｜>",),
            section_end="<｜tool▁calls▁end｜>",
            many=True,
        ),
    ),
    Form(
        "kimi",
        (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
        named=Named(
            "<|tool_call_begin|>",
            Json(),
            after_name="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            section=("<|tool_calls_section_begin|>",),
            section_end="<|tool_calls_section_end|>",
            many=True,
            head=kimi_head,
        ),
    ),
    Form(
        "gemma4",
        (("<|tool_call>", "<tool_call|>"),),
        named=Named("<|tool_call>call:", Pairs(":", "}", ('<|"|>', '"')), after_name="{", end="<tool_call|>"),
    ),
    Form(
        "functiongemma",
        (("<start_function_call>",),),
        named=Named(
            "<start_function_call>call:",
            Pairs(":", "}", ("<escape>", '"')),
            after_name="{",
            end="<end_function_call>",
        ),
    ),
    Form(
        "lfm2",
        (("<|tool_call_start|>",), ("<|tool_list_start|>",), ('"List of tools: ["',)),
        objects=Objects(("<|tool_call_start|>",), "<|tool_call_end|>"),
        named=Named(
            "",
            _PYTHON,
            after_name="(",
            section=("<|tool_call_start|>",),
            section_end="<|tool_call_end|>",
            many=True,
            between=",[]",
        ),
    ),
    Form(
        "minimax",
        (("<minimax:tool_call>",),),
        named=_invokes("minimax:tool_call"),
    ),
    Form("seed", (("<seed:tool_call>", "<function="),), named=_functions("seed:tool_call")),
    Form(
        "qwen",
        (("<tool_call>", "<function="),),
        objects=_OBJECT,
        named=_functions("tool_call"),
        ends_reasoning=("<tool_call>\n<function=",),
    ),
    Form(
        "glm",
        (("<tool_call>", "<arg_key>"),),
        objects=_OBJECT,
        named=Named(
            "<tool_call>",
            Tags("<arg_key>", "</arg_key>", "</arg_value>", before="<arg_value>"),
            end="</tool_call>",
            gap=True,
        ),
    ),
    Form(
        "tool-calls", (("<tool_calls>",),), objects=Objects(("<tool_calls>",), "</tool_calls>", as_list=True)
    ),
    HERMES,
    Form("nemotron", (("<TOOLCALL>",),), objects=Objects(("<TOOLCALL>",), "</TOOLCALL>", as_list=True)),
    Form("granite", (("<|tool_call|>",),), objects=Objects(("<|tool_call|>",), as_list=True)),
    Form(
        "phi",
        (("<|tool|>", "<|/tool|>"),),
        objects=Objects(("<|tool_call|>", "functools["), "<|/tool_call|>", as_list=True),
    ),
    Form(
        "command",
        (("<|START_ACTION|>", '"tool_name"'),),
        objects=Objects(
            ("<|START_ACTION|>",),
            "<|END_ACTION|>",
            as_list=True,
            name_key="tool_name",
            arguments_key="parameters",
        ),
    ),
    Form(
        "pythonic",
        (("<|python_start|>", "tools"), ("tool_code",), ("func_name1(",)),
        named=Named(
            "",
            _PYTHON,
            after_name="(",
            section=("<|python_start|>",),
            section_end="<|python_end|>",
            many=True,
            between=",[]",
        ),
        is_loose=True,
        writes_bare=True,
    ),
    Form(
        "llama",
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        objects=Objects(("<|python_tag|>",), arguments_key="parameters"),
        is_loose=True,
        writes_bare=True,
    ),
    Form("json", (("tools",),), is_loose=True, writes_bare=True),
)


def form_of(template: str) -> Form:
    """Return the form in which a model with this chat template writes calls.

    Without marks of another form it is Hermes', which the prompt then describes (text/folding.py).
    """
    return next(
        (form for form in FORMS if any(all(part in template for part in group) for group in form.found_by)),
        HERMES,
    )
