"""How the answers to a request are written and read: reasoning, calls of functions, forms that are asked for.

A model says by its chat template how it writes these (text/output.py). A call that the request asks for in so
many words (`tool_choice`) is not left to the model: a grammar of its own form constrains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotset.api import Model
from hotset.engine.sampler import SamplingParams
from hotset.escaping import clause
from hotset.parameters import shown
from hotset.server.answers import AnswerRequest
from hotset.server.errors import RequestError
from hotset.text.output import OutputForm, Parser
from hotset.text.tool_calls import HARMONY

_END = 32  # tokens of a prompt by which it is seen whether an answer begins inside reasoning


@dataclass(frozen=True)
class Output:
    """How the answers to one request are to be written, and read.

    form: the model's; None where prompts are continued as they stand. tools: what the template gets.
    params: with what the answers must follow. names: of functions that may be called. calls: whether one
    must be. begun: the text of the message that the answers continue; None where they begin one.
    """

    form: OutputForm | None
    params: SamplingParams
    tools: list[dict[str, Any]] | None = None
    names: tuple[str, ...] = ()
    calls: bool = False
    begun: str | None = None

    def around(self, prompt: str) -> str | None:
        """What surrounds a form that is asked for, of an answer to a prompt that ends so."""
        if self.form is None or self.params.form is None:
            return None
        return self.form.around(prompt, calls=self.calls)

    def parser(self, prompt: str) -> Parser | None:
        """What reads one answer to a prompt that ends so; None where all of it is text."""
        form = self.form
        if form is None or not (form.thinks or form.calls is HARMONY or self.names):
            return None
        functions = [tool["function"] for tool in self.tools or ()]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        return form.parser(prompt, tools=schemas)

    def end_of(self, model: Model, tokens: list[int]) -> str:
        """The end of a prompt, marks and all. Of a message that is continued only reasoning counts that it
        leaves open."""
        if self.begun is None:
            return model.tokenizer.decode(tokens[-_END:])
        marks = self.form.thinks if self.form is not None else None
        if marks is None or self.begun.rfind(marks[0]) <= self.begun.rfind(marks[1]):
            return ""
        return marks[0]


def output_of(model: Model, request: AnswerRequest) -> Output:
    """Raises RequestError for tools that are none, for what this model cannot do with them, and for a message
    that cannot be continued."""
    output, begun = _output_of(model, request), _begun(request)
    if begun and (request.params.form is not None or request.tool_choice not in ("auto", "none")):
        raise RequestError(
            "the last message is the assistant's, and an answer that was begun cannot be held to a form or a "
            "call; leave that out, or end with a message of the user"
        )
    return replace(output, begun=begun)


def _begun(request: AnswerRequest) -> str | None:
    """The text of the message that the answers continue, if they do."""
    if request.messages is None or not request.opening.continues(request.messages):
        return None
    content = request.messages[-1].get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _output_of(model: Model, request: AnswerRequest) -> Output:
    params, form, choice = request.params, model.output_form, request.tool_choice
    if request.messages is None:
        return Output(None, params)
    tools = [dict(tool) for tool in request.tools]
    names = _names_of(tools)
    if choice == "none" or not tools:
        if choice not in ("none", "auto"):
            raise RequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")
        return Output(form, params)
    if params.form is not None:
        raise RequestError(
            "tools and a form of the answer cannot be asked for together; leave one of them out, or say "
            'tool_choice: "none"',
            param="tools",
        )
    if choice != "auto":
        name = None if isinstance(choice, str) else choice["name"]
        if name is not None and name not in names:
            raise RequestError(f"there is no tool {clause(shown(name))} to choose", param="tool_choice")
        grammar = form.calls_grammar(tools, name=name, parallel=request.parallel_tool_calls)
        return Output(form, replace(params, grammar=grammar), tools, names, calls=True)
    is_strict = any(tool["function"].get("strict") for tool in tools)
    strict = form.strict_grammar(tools) if is_strict else None
    if strict is not None:
        return Output(form, replace(params, grammar=strict), tools, names, calls=True)
    return Output(form, params, tools, names)


def _names_of(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    names = [tool.get("function", {}).get("name") for tool in tools]
    known: set[str] = set()
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise RequestError(f"tool {i} has no function with a name", param="tools")
        if name in known:
            raise RequestError(f"two tools are called {clause(shown(name))}", param="tools")
        known.add(name)
    return tuple(names)
