"""Chat templates: from messages to the one text that a model was trained to continue.

A template is a Jinja program that comes with the model file, so it is run as Hugging Face runs it (the same
options, extensions, filters and globals give the same text, to the byte) and trusted as little as the file:
in Jinja's immutable sandbox, on plain data, with bounds on its size, its time and what it may build.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import TokenizerError
from .tokenizer import Tokenizer

MAX_SOURCE_CHARS = 1 << 20
"""The longest template that is accepted (the longest in the wild have some 30,000 characters)."""
MAX_TEXT_CHARS = 16 << 20
"""The longest text, and the longest list, that a template may build."""
MAX_OUTPUT_CHARS = 256 << 20
"""How much a template may put out in all, in macros and loops too."""
MAX_SECONDS = 5.0
"""How long a template may run (a long real one takes milliseconds)."""
_MAX_WIDTH = 100_000  # the largest number that a filter or a method may be given: a width, an indent, a count

# What ends every turn in the format that most models without a template of their own understand.
_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


class ChatTemplate:
    """A compiled chat template.

    source: the Jinja text. bos_token, eos_token: what the template's variables of these names hold.
    is_fallback: the file had no template and this is ChatML.

    Raises TokenizerError for a source that does not compile or is too long.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", *, is_fallback: bool = False
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TokenizerError(
                f"The chat template has {len(source)} characters, and at most {MAX_SOURCE_CHARS} are "
                "accepted: use another file."
            )
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.is_fallback = is_fallback
        self._template = self._compile()

    def _compile(self) -> Template:
        try:
            return _Environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"The chat template is not valid Jinja (line {error.lineno}: {error.message})."
            ) from None
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise TokenizerError(f"The chat template does not compile ({_reason(error)}).") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, to be encoded with `parse_special=True, add_special=False`.

        messages: OpenAI-shaped, {"role": ..., "content": ...}. add_generation_prompt: end with the head of
        the assistant's turn. tools: JSON schemas of functions. variables: whatever else the template knows,
        such as enable_thinking. Raises TokenizerError where the template refuses the messages, fails, or
        wants too much.
        """
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise TokenizerError(
                    'Every message of a chat must be an object with a "role" and a "content".'
                )
        given = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        _budget.start()
        try:
            return self._template.render(_plain(given | variables))
        except _RefusedError as error:
            raise TokenizerError(f"The chat template refuses these messages: {error}") from None
        except Exception as error:  # a template can make Python raise nearly anything
            raise TokenizerError(f"The chat template failed on these messages ({_reason(error)}).") from None


def chat_template(metadata: Mapping[str, Any], tokenizer: Tokenizer, name: str | None = None) -> ChatTemplate:
    """The chat template of a GGUF file (`tokenizer.chat_template`); ChatML if it has none (see is_fallback).

    name: one of the file's further templates (`tokenizer.chat_template.<name>`, such as "tool_use"); see
    `chat_template_names`. Raises TokenizerError for a name that the file does not have.
    """
    key = "tokenizer.chat_template" + (f".{name}" if name else "")
    source = metadata.get(key)
    if name and source is None:
        known = ", ".join(chat_template_names(metadata)) or "none"
        raise TokenizerError(f"The file has no chat template named {name!r} (it has: {known}).")
    if source is not None and not isinstance(source, str):
        raise TokenizerError(f"The file's {key} is not a text: fetch or convert it again.")
    bos, eos = tokenizer.piece(tokenizer.bos_id), tokenizer.piece(tokenizer.eos_id)
    if not source:
        return ChatTemplate(_CHATML, bos, eos, is_fallback=True)
    return ChatTemplate(source, bos, eos)


def chat_template_names(metadata: Mapping[str, Any]) -> list[str]:
    """The names of a file's further chat templates, in alphabetical order."""
    prefix = "tokenizer.chat_template."
    return sorted(key.removeprefix(prefix) for key in metadata if key.startswith(prefix))


# --- the dialect: what Hugging Face adds to Jinja


class _RefusedError(TemplateError):
    """The template called raise_exception: it does not want these messages (two users in a row, say)."""


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes <, > and & for HTML, which a model has never seen.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationBlock(Extension):
    """{% generation %} marks what the assistant said, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block rather than the bare body: names set inside stay inside, as with Hugging Face.
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _content(self, context: nodes.EvalContext, caller: Macro) -> str:
        return caller()


def _plain(value: Any) -> Any:
    """`value` as plain JSON types: objects with methods of their own would be ways out of the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


# --- the bounds


class _Budget(threading.local):
    """What is left to the rendering that this thread is at."""

    deadline = 0.0
    characters = 0

    def start(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.characters = MAX_OUTPUT_CHARS

    def spend(self, characters: int) -> None:
        """Counts characters that are put out, and looks at the clock."""
        self.characters -= characters
        if self.characters < 0:
            raise SecurityError(f"it puts out more than {MAX_OUTPUT_CHARS} characters")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"it runs for more than {MAX_SECONDS:g} seconds")


_budget = _Budget()


def _check_size(size: int) -> None:
    if size > MAX_TEXT_CHARS:
        raise SecurityError(f"it builds a text or a list longer than {MAX_TEXT_CHARS}")


def _checked(value: Any) -> Any:
    if isinstance(value, (str, list, tuple, dict)):
        _check_size(len(value))
    return value


def _written_size(value: Any, limit: int = MAX_TEXT_CHARS) -> int:
    """About how long `value` is as text, at least up to `limit`: [x, x] of [x, x] of ... has 2**depth."""
    size = 0
    todo = [value]
    while todo and size <= limit:
        item = todo.pop()
        size += 16 + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, (list, tuple)):
            todo += item
        elif isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
    return size


def _check_arguments(arguments: Sequence[Any]) -> None:
    """Numbers given to filters and methods are widths and counts: "x".ljust(10**12) is a bomb."""
    for argument in arguments:
        if isinstance(argument, int) and argument > _MAX_WIDTH:
            raise SecurityError(f"it asks for the width or count {argument}")


_WIDE_FORMAT = re.compile(r"[%:.][^%{}]*?\d{6,}|\*")


class _CodeGenerator(CodeGenerator):
    """Jinja's, with a look at the budget in every turn of a loop, every call of a macro and every `~`."""

    def _tick(self, node: Any) -> nodes.Node:
        literal = nodes.Const(sum(len(data.data) for data in node.find_all(nodes.TemplateData)))
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [literal], [], None, None)
        return nodes.ExprStmt(call, lineno=node.lineno).set_environment(self.environment)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        node.body.insert(0, self._tick(node))
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: Frame) -> Any:
        node.body.insert(0, self._tick(node))
        return super().macro_body(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concatenated((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox in Hugging Face's dialect, bounded in time and memory.

    The bounds catch what a template can do in a few steps: endless loops and recursion, texts and lists that
    double, huge repetitions, widths and powers. What remains between two looks at the clock is short.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, LoopControlExtension],
            finalize=self.put_out,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
        )
        del self.globals["lipsum"]  # filler text, as long as one asks

    def tick(self, characters: int) -> None:
        _budget.spend(characters)

    def put_out(self, value: Any) -> Any:
        """Sees every value of a {{ }} before it becomes text."""
        size = _written_size(value)
        _check_size(size)
        _budget.spend(size)
        return value

    def concatenated(self, values: Sequence[Any]) -> str:
        _check_size(_written_size(values))
        return "".join(map(str, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget.spend(0)
        if operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(items, (str, list, tuple)) and isinstance(count, int):
                    _check_size(len(items) * count)
            if isinstance(left, int) and isinstance(right, int):
                _check_arguments([left.bit_length() + right.bit_length()])
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_arguments([left.bit_length() * right])
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # (the names are Jinja's: a macro may have an argument called self)
        _budget.spend(0)
        method_of = getattr(__obj, "__self__", None)
        if isinstance(method_of, (str, list, tuple, dict, int, float)):
            _check_arguments([*args, *kwargs.values()])
            if isinstance(method_of, str):
                _check_string_method(method_of, getattr(__obj, "__name__", ""), args)
        return _checked(super().call(__context, __obj, *args, **kwargs))


class _Namespace(Namespace):
    """Jinja's namespace(), without names that begin with an underscore (as Hugging Face has it)."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` must work
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it sets the private attribute {name!r} of a namespace")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError("it formats with a width that is given outside or is far too large")


def _check_string_method(text: str, method: str, args: Sequence[Any]) -> None:
    """Bounds the methods whose result can be much longer than what they are given."""
    if method == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        _check_size(len(text) + (len(text) if args[0] == "" else text.count(args[0])) * len(args[1]))
    elif method == "join" and args:
        _check_join(args[0], text)
    elif method in ("format", "format_map"):
        _check_format(text)
    elif method == "expandtabs":
        _check_size(text.count("\t") * (args[0] if args and isinstance(args[0], int) else 8))


def _check_join(items: Any, separator: str) -> None:
    if isinstance(items, (str, list, tuple)):
        _check_size(_written_size(items) + len(items) * len(separator))


# Filters that turn whatever they are given into text.
_WRITING_FILTERS = frozenset(
    [
        "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint",
        "replace", "safe", "string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode",
        "urlize", "wordcount", "wordwrap", "xmlattr",
    ]
)  # fmt: skip


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with bounds on arguments and result. (`wraps` also keeps Jinja's pass_context marks.)"""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        _check_arguments(values[1:])
        if name in _WRITING_FILTERS:
            _check_size(_written_size(values))
        texts = [value for value in values if isinstance(value, str)]
        if name in ("replace", "indent", "wordwrap") and len(texts) >= 2:
            # At the worst the longest goes between all characters of the first.
            _check_size((len(texts[0]) + 1) * max(map(len, texts[1:])))
        elif name == "join" and texts:
            for value in values:
                _check_join(value, texts[-1])
        elif name == "format" and texts:
            _check_format(texts[0])
        return _checked(function(*args, **kwargs))

    return bounded


def _reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    text = " ".join(str(error).split())
    return (
        text if isinstance(error, TemplateError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
    )
