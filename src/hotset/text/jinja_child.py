"""The program of the process that renders templates: Jinja and its sandbox.

`renderer.py` starts it (`child_main.py`). {"source": ..., "environment": ...} compiles a template.
{"render": {...}} renders it; with "literal" the text is parsed as a Python literal, whose JSON is the answer.
{"renders": [{...}, ...]} renders several; a text is null if its rendering fails.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace

STACK_BYTES = 0  # 0: the main thread
MAX_TEXT_CHARS = 16 << 20
"""The maximum length of a template's output, in characters."""
_MAX_REASON_CHARS = 400

# --- Hugging Face's additions to Jinja


class _TemplateRaisedError(TemplateError):
    """The template called raise_exception: it rejects these messages (such as two users in a row)."""


def _raise_exception(message: str) -> None:
    raise _TemplateRaisedError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model has never seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_list_of_filter,
    )


def _list_of_filter(value: Any) -> list[Any]:
    """Return the items of `map`, `select` and similar filters, which are generators in Python."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class _GenerationBlock(Extension):
    """The block {% generation %}, which marks the assistant's text for training; rendered as its content."""

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
    """Jinja's namespace(), without names that begin with an underscore (as in Hugging Face's)."""

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
    are this process's copy of the request: Kimi K2's appends to lists.
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
    del environment.globals["lipsum"]  # random text, which no prompt needs
    return environment


# --- answering requests


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers requests. A first rendering triggers Jinja's late imports."""
    renderer = _Renderer()
    renderer.answer({"source": "{% for a in b %}{{ a | tojson }}{% endfor %}", "environment": "chat"})
    renderer.answer({"render": {"b": [1]}})
    _strftime_now("%Y")
    return renderer.answer


class _Renderer:
    def __init__(self) -> None:
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
            raise
        except TemplateSyntaxError as error:
            return {"error": "syntax", "line": error.lineno, "reason": _shortened(str(error.message))}
        except _TemplateRaisedError as error:
            return {"error": "refused", "reason": _shortened(str(error))}
        except Exception as error:  # a template can make Python raise nearly anything
            return {"error": "failed", "reason": _reason(error)}
        if len(text) > MAX_TEXT_CHARS:
            return {"error": "failed", "reason": f"it puts out more than {MAX_TEXT_CHARS} characters"}
        return {"text": text}

    def _rendered(self, variables: dict[str, Any]) -> str:
        assert self._template is not None
        return self._template.render(variables)

    def _texts(self, conversations: list[dict[str, Any]]) -> list[str | None]:
        """Return each text; None for one that fails, and for those past the length limit of all together."""
        texts: list[str | None] = []
        n_chars = 0
        for variables in conversations:
            text: str | None
            try:
                text = self._rendered(variables)
            except MemoryError:
                raise
            except Exception:  # a template can make Python raise nearly anything
                text = None
            n_chars += len(text or "")
            texts.append(text if n_chars <= MAX_TEXT_CHARS else None)
        return texts


def _reason(error: BaseException) -> str:
    """Return the error in one line."""
    text = _shortened(str(error))
    return (
        text if isinstance(error, TemplateError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
    )


def _shortened(text: str) -> str:
    short = " ".join(text[: 4 * _MAX_REASON_CHARS].split())
    return short if len(short) <= _MAX_REASON_CHARS else short[:_MAX_REASON_CHARS] + "…"
