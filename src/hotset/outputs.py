"""The form of an answer and its parsing: reasoning, function calls, and a required form.

A model's chat template defines how the model writes these (text/output.py). A required call (`tool_choice`)
is enforced: a grammar of the model's own form constrains the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hotset.engine.sampler import SamplingParams
from hotset.errors import InvalidRequestError
from hotset.escaping import clause
from hotset.parameters import shown
from hotset.text.messages import Opening
from hotset.text.output import OutputForm, Parser
from hotset.text.reasoning import is_open
from hotset.text.thinking import ThinkingBudget
from hotset.text.tool_calls import HARMONY

_END = 32  # tokens of a prompt that show whether an answer begins inside reasoning


@dataclass(frozen=True)
class ToolUse:
    """The functions that an answer may call.

    tools: JSON schemas in OpenAI's form. choice: "none", "auto", "required", or one function, as {"name":
    ...} or OpenAI's {"type": "function", "function": {"name": ...}}. parallel: False ends an answer with its
    first call.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str | Mapping[str, Any] = "auto"
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Return whether an answer must call a function."""
        return self.choice not in ("auto", "none")


@dataclass(frozen=True)
class Reading:
    """The parsing of one answer to a prompt, and the text around a required form.

    parser: None if the whole answer is text. marks: special tokens that the parser must see as text. around:
    see text/output_grammar.py. begun: the beginning of the form, if the prompt ends inside it. parallel:
    whether the answer may call several functions. thinking: its reasoning budget; None: no limit.
    """

    parser: Parser | None = None
    marks: frozenset[int] = frozenset()
    around: str | None = None
    begun: str = ""
    parallel: bool = True
    thinking: ThinkingBudget | None = None

    @classmethod
    def of_text(cls, form: OutputForm, params: SamplingParams, tokens: Sequence[int]) -> Reading:
        """Return the parsing of an answer outside conversations: as plain text."""
        budget, message = params.reasoning_budget, params.reasoning_budget_message
        return cls(thinking=form.thinking(budget, message, _end_of(form, tokens)))


def _end_of(form: OutputForm, tokens: Sequence[int]) -> str:
    """Return the text at the end of a prompt, without images."""
    return form.tokenizer.decode([token for token in tokens[-_END:] if token >= 0])


@dataclass(frozen=True)
class Output:
    """The form and the parsing of the answers to one request.

    form: the model's. tools, variables: for the template. params: with the reasoning budget and the grammar
    of the answers. names: of functions that may be called. calls: whether `params.grammar` is a grammar of
    calls. begun: the text of the message that the answers continue; None if they start a message. parallel:
    see ToolUse.
    """

    form: OutputForm
    params: SamplingParams
    tools: list[dict[str, Any]] | None = None
    names: tuple[str, ...] = ()
    calls: bool = False
    begun: str | None = None
    parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)

    def reading(self, tokens: Sequence[int]) -> Reading:
        """Return the parsing of one answer to a prompt of these tokens."""
        form, params, begun, text = self.form, self.params, self._begun_reasoning, self._begun_text
        end = _end_of(form, tokens)
        if self.begun is not None:
            end = "" if begun is None or form.thinks is None else form.thinks[0]
        is_plain, around, thinking = self._is_plain(end), None, None
        if params.form is not None:
            tools = () if self.calls else self.tools or ()
            around = form.around(
                end, calls=self.calls, tools=tools, thinks=not (is_plain or text), is_begun=bool(text)
            )
        if not is_plain:
            thinking = form.thinking(
                params.reasoning_budget, params.reasoning_budget_message, end,
                calls=bool(self.names), n_begun=len(form.tokenizer.encode_inside(begun or "")),
            )  # fmt: skip
        answer = "" if self.calls else self._answer_in(text)  # a call comes after the text
        if not (form.thinks or form.calls is HARMONY or self.names):
            return Reading(around=around, begun=answer)
        parser = self._parser(end, apart=not is_plain)
        return Reading(parser, form.shown_ids, around, answer, self.parallel, thinking)

    def _is_plain(self, prompt: str) -> bool:
        """Return whether the answer has its form from the first token on, because reasoning is off."""
        marks, params = self.form.thinks, self.params
        if marks is None or params.form is None or params.reasoning_budget != 0:
            return False
        return not is_open(marks, prompt)

    def _parser(self, prompt: str, *, apart: bool) -> Parser:
        functions = [tool["function"] for tool in self.tools or ()]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        return self.form.parser(prompt, tools=schemas, apart=apart)

    @property
    def _begun_reasoning(self) -> str | None:
        """The reasoning that a continued message leaves open; None if it leaves none open."""
        marks, begun = self.form.thinks, self.begun
        if marks is None or begun is None or begun.rfind(marks[0]) <= begun.rfind(marks[1]):
            return None
        return begun.rpartition(marks[0])[2]

    @property
    def _begun_text(self) -> str:
        """The continued message, if its answer has started or its reasoning is closed; otherwise ""."""
        return "" if self._begun_reasoning is not None else (self.begun or "").lstrip()

    def _answer_in(self, text: str) -> str:
        """Return the part of a continued message after its reasoning."""
        marks = self.form.thinks
        return text if marks is None else text.rpartition(marks[1])[2].lstrip()


def output_of(
    form: OutputForm,
    params: SamplingParams,
    messages: Sequence[Mapping[str, Any]],
    opening: Opening,
    use: ToolUse,
    variables: Mapping[str, Any],
) -> Output:
    """Return the form and the parsing of the answers to a conversation.

    variables: for the chat template; `enable_thinking` and `reasoning_effort` have the meaning of
    OutputForm.effort. Raises InvalidRequestError for invalid tools, for a combination that this model does
    not support, and for a message that cannot be continued.
    """
    effort = form.effort(variables, params.reasoning_budget)
    params = replace(params, reasoning_budget=effort.budget)
    output, begun = _of_tools(form, params, use), _begun(messages, opening)
    if begun and use.is_forced and form.calls is HARMONY:
        raise InvalidRequestError(
            "this model cannot call a function in the message that the answer continues; end with a message "
            "of the user, or do not require a call",
            param="tool_choice",
        )
    return replace(output, begun=begun, variables=effort.variables)


def _begun(messages: Sequence[Mapping[str, Any]], opening: Opening) -> str | None:
    """Return the text of the message that the answers continue; None if they start a message."""
    if not opening.continues(messages):
        return None
    content = messages[-1].get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _of_tools(form: OutputForm, params: SamplingParams, use: ToolUse) -> Output:
    tools = [dict(tool) if isinstance(tool, Mapping) else {} for tool in use.tools]
    names = _names_of(tools)
    if use.choice == "none" or not tools:
        if use.is_forced:
            raise InvalidRequestError(
                "tool_choice requires a call, but the request has no tools", param="tool_choice"
            )
        return Output(form, params)
    if use.is_forced:
        name = _chosen(use.choice)
        if name is not None and name not in names:
            raise InvalidRequestError(
                f"tool_choice names {clause(shown(name))}, which is not among the tools", param="tool_choice"
            )
        grammar = form.calls_grammar(tools, name=name, parallel=use.parallel)
        # The whole answer is a call, which replaces any form in the request.
        required = replace(params, json_schema=None, json_object=False, regex=None, grammar=grammar)
        return Output(form, required, tools, names, calls=True, parallel=use.parallel)
    is_strict = any(tool["function"].get("strict") for tool in tools)
    strict = form.strict_grammar(tools) if is_strict and params.form is None else None
    if strict is not None:
        return Output(form, replace(params, grammar=strict), tools, names, calls=True, parallel=use.parallel)
    return Output(form, params, tools, names, parallel=use.parallel)


def _chosen(choice: str | Mapping[str, Any]) -> Any:
    """Return the name of the function that a choice names; None if any function is allowed."""
    if choice == "required":
        return None
    named = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if name is None:
        raise InvalidRequestError(
            f'tool_choice must be "auto", "none", "required" or a function, not {clause(shown(choice))}',
            param="tool_choice",
        )
    return name


def _names_of(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    functions = [tool.get("function") for tool in tools]
    names = [function.get("name") if isinstance(function, Mapping) else None for function in functions]
    known: set[str] = set()
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"tool {i} has no function with a name", param="tools")
        if name in known:
            raise InvalidRequestError(f"two tools are called {clause(shown(name))}", param="tools")
        known.add(name)
    return tuple(known)
