"""What runs in the process that renders templates: Jinja, its sandbox, and limits.

`renderer.py` starts it. A message is eight bytes of length and that many of JSON. The first one out says that
the process is ready; then each message in gets one out: {"source": ..., "environment": ...} compiles,
{"render": {...}} renders, and with "literal" the text is read as a Python literal, whose JSON is the answer;
{"renders": [{...}, ...]} renders several, of which those that fail have no text.

Nothing here belongs to the rest of hotset, and nothing heavy is imported: the process must start in the time
that loading a tokenizer takes, and what a template may use of memory is counted from what is here.
"""

from __future__ import annotations

import ast
import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace

_MAX_REASON_CHARS = 400

# --- what Hugging Face adds to Jinja


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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_list_of_filter,
    )


def _list_of_filter(value: Any) -> list[Any]:
    """The items of `map`, `select` and alike, of which Python makes a generator."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class _GenerationBlock(Extension):
    """{% generation %} marks what the assistant said, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block rather than the bare body: names set inside stay inside, as with Hugging Face.
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _content(self, _: nodes.EvalContext, caller: Macro) -> str:
        return caller()


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


def _regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    return re.sub(pattern, replacement, text, count=count)


def _environment(name: str) -> SandboxedEnvironment:
    """Return Jinja's environment of a kind of templates.

    name: "chat", as Hugging Face renders chat templates, or "task", as EleutherAI's evaluation harness
    renders the templates of its task files (lm_eval/utils.py). A chat template may change its values, which
    are this process's copy of the request: Kimi K2 appends to lists.
    """
    environment: SandboxedEnvironment
    if name == "task":
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        environment.filters["regex_replace"] = _regex_replace
    else:
        environment = SandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControlExtension]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
        )
    del environment.globals["lipsum"]  # random text, which no prompt can mean
    return environment


# --- the answers


class _Renderer:
    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._template: Template | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "source" in request:
                self._template = _environment(request["environment"]).from_string(request["source"])
                return {}
            if "renders" in request:
                return {"texts": self._texts(request["renders"])}
            text = self._rendered(request["render"])
            if request.get("literal"):
                text = json.dumps(ast.literal_eval(text), ensure_ascii=False)
        except MemoryError:
            return {"error": "memory"}
        except TemplateSyntaxError as error:
            return {"error": "syntax", "line": error.lineno, "reason": _shortened(str(error.message))}
        except _RefusedError as error:
            return {"error": "refused", "reason": _shortened(str(error))}
        except Exception as error:  # a template can make Python raise nearly anything
            return {"error": "failed", "reason": _reason(error)}
        if len(text) > self._max_chars:
            return {"error": "failed", "reason": f"it puts out more than {self._max_chars} characters"}
        return {"text": text}

    def _rendered(self, variables: dict[str, Any]) -> str:
        assert self._template is not None
        return self._template.render(variables)

    def _texts(self, conversations: list[dict[str, Any]]) -> list[str | None]:
        """The text of each; None for one that fails, and for those past the longest text together."""
        texts: list[str | None] = []
        n_chars = 0
        for variables in conversations:
            text: str | None
            try:
                text = self._rendered(variables)
            except MemoryError:
                raise
            except Exception:  # as of one text
                text = None
            n_chars += len(text or "")
            texts.append(text if n_chars <= self._max_chars else None)
        return texts


def _reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    text = _shortened(str(error))
    return (
        text if isinstance(error, TemplateError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
    )


def _shortened(text: str) -> str:
    short = " ".join(text[: 4 * _MAX_REASON_CHARS].split())
    return short if len(short) <= _MAX_REASON_CHARS else short[:_MAX_REASON_CHARS] + "…"


# --- the process


def _limit(max_bytes: int) -> None:
    """Bounds the memory that may come on top of what is here, and takes away what rendering never needs.

    Systems without such limits are left to the parent, which looks at the process from outside.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0}
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
        limits |= {"RLIMIT_AS": now + max_bytes, "RLIMIT_DATA": now + max_bytes}
    for name, value in limits.items():
        with suppress(AttributeError, OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (value, value))


def _alarm(seconds: float) -> None:
    """Ends the process that late, whatever it does, should the parent have died; 0 calls it off."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(8)
    if len(head) < 8:
        return None
    data = stream.read(int.from_bytes(head, "big"))
    request: dict[str, Any] = json.loads(data.decode("utf-8", "surrogatepass"))
    return request


def _write(stream: BinaryIO, message: dict[str, Any]) -> None:
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(len(data).to_bytes(8, "big"))
    stream.write(data)
    stream.flush()


def main(max_bytes: int, max_chars: int, max_seconds: float) -> None:
    """Answers until the parent closes the pipe. max_seconds: of one answer, by the clock."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    renderer = _Renderer(max_chars)
    # Compiles once before the limits stand: it imports what Jinja imports late.
    renderer.answer({"source": "{% for a in b %}{{ a | tojson }}{% endfor %}", "environment": "chat"})
    renderer.answer({"render": {"b": [1]}})
    _strftime_now("%Y")
    _limit(max_bytes)
    _write(sys.stdout.buffer, {})
    while True:
        try:
            request = _read(sys.stdin.buffer)
            if request is None:
                return
            _alarm(max_seconds)
            answer = renderer.answer(request)
            del request
            _write(sys.stdout.buffer, answer)
            _alarm(0)
        except MemoryError:  # for the request, or to write down the answer
            answer = {}
            _write(sys.stdout.buffer, {"error": "memory"})
