"""From the text of a model to the parts of an answer: reasoning, then calls of functions, then text.

    form = model.output_form                                  # once per model; outputs.py does the rest
    parser = form.parser(prompt, tools={"get_weather": {}})   # the rendered text; schemas of functions, or ()
    for piece in pieces: parts = parser.push(piece)           # of Text, Reasoning, CallStart, CallArguments
    parts = parser.finish()                                   # once, after the last piece
    parser.n_calls                                            # 0, or the answer ended to call functions

If the answer has a given form, a model that thinks still does so first. A tool may also be required:

    params = replace(params, grammar=form.calls_grammar(tools, name=None))    # tool_choice "required"
    around = form.around(prompt, calls=True)                  # response_format: around=form.around(prompt)

Marks that are special tokens have no text in an answer that is decoded for a reader. `shown_ids` are the
tokens that the decoder must spell out for the parser. A request needs no parser and no marks if it wants
neither calls nor separate reasoning, and the template is not harmony's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hotset.text import output_grammar, reasoning, tool_calls
from hotset.text.parts import Part, Text, merged
from hotset.text.thinking import ThinkingBudget, ThinkingMarks, tokens_of
from hotset.text.tokenizer import Tokenizer


class Parser(Protocol):
    """A parser of one answer, which gets the answer's text piece by piece."""

    @property
    def n_calls(self) -> int:
        """Return the number of calls so far."""

    def push(self, text: str) -> list[Part]:
        """Take in the next piece, and return the parts that are certain."""

    def finish(self) -> list[Part]:
        """Return the remaining parts after the last piece."""


@dataclass(frozen=True)
class OutputForm:
    """The form in which a model writes answers, from its chat template.

    template: its text. calls: how the model calls functions. thinks: the marks around its reasoning, or
    None; harmony's are part of `calls`. shown_ids: special tokens whose text the parser must see.
    """

    template: str
    tokenizer: Tokenizer
    calls: tool_calls.Form
    thinks: reasoning.Marks | None
    shown_ids: frozenset[int]

    @staticmethod
    def of(template: str, tokenizer: Tokenizer) -> OutputForm:
        """Return the form for the text of a chat template (ChatTemplate.source)."""
        calls, thinks = tool_calls.form_of(template), reasoning.marks_of(template)
        marks = (*calls.marks, *tool_calls.marks_in(*(thinks or ())))
        ids = (tokenizer.vocabulary.get(mark) for mark in marks)
        shown = frozenset(id for id in ids if id is not None and tokenizer.is_special(id))
        return OutputForm(template, tokenizer, calls, thinks, shown)

    @property
    def can_think(self) -> bool:
        """Return whether the model can think before it answers."""
        return self.thinks is not None or self.calls is tool_calls.HARMONY

    @property
    def knows_effort(self) -> bool:
        """Return whether the template has a variable for the reasoning effort."""
        return reasoning.effort_variable(self.template) is not None

    def parser(
        self, prompt: str, *, tools: tool_calls.Schemas | Collection[str] = (), apart: bool = True
    ) -> Parser:
        """Return a parser for one answer to a rendered prompt, whose end is enough.

        tools: JSON schemas of the arguments, by the names of the functions that the answer may call, or only
        the names. () leaves calls in the text, except harmony's, which cannot be read otherwise. apart:
        False leaves reasoning in the text, including its marks, except harmony's.
        """
        thinks = self.thinks if apart else None
        first = None
        if thinks:
            ends = self.calls.ends_reasoning if tools else ()
            first = reasoning.ReasoningParser(thinks, reasoning.is_open(thinks, prompt), ends)
        reads_calls = bool(tools) or self.calls is tool_calls.HARMONY
        second = tool_calls.parser_of(self.calls, tools) if reads_calls else None
        return _Chain(first, second)

    def thinking(
        self, budget: int | None, message: str, prompt: str, *, calls: bool = False, n_begun: int = 0
    ) -> ThinkingBudget | None:
        """Return the budget of one answer; None without a limit, or if the model does not think.

        budget: tokens; 0 leaves the message out. message: a text that is forced before the closing mark.
        prompt: the end of the rendered prompt. calls: whether the answer may call functions. n_begun: tokens
        of reasoning at the end of the prompt, if the answer continues it.
        """
        if budget is None or budget < 0:
            return None
        said = tuple(self.tokenizer.encode_inside(message)) if budget else ()
        if self.calls is tool_calls.HARMONY:
            end = tokens_of(self.tokenizer, "<|end|><|start|>assistant")
            answer = (*end, *tokens_of(self.tokenizer, "<|channel|>final<|message|>"))
            closings = (said + end, answer) if calls else (said + answer,)
            ends: tuple[str, ...]
            opens, ends = "<|channel|>analysis<|message|>", ("<|end|>",)
        elif self.thinks is not None:
            opens, close = self.thinks
            ends = (close, *(self.calls.ends_reasoning if calls else ()))
            closings = (said + tokens_of(self.tokenizer, close),)
        else:
            return None
        marks = ThinkingMarks(
            opens.encode(), tuple(map(str.encode, ends)), closings,
            self.calls is tool_calls.HARMONY, self._spelled,
        )  # fmt: skip
        is_open = self.thinks is not None and reasoning.is_open(self.thinks, prompt)
        return ThinkingBudget(marks, budget - n_begun, is_open=is_open)

    def _spelled(self, token: int) -> bytes:
        """Return the bytes of a token that a parser sees."""
        is_left_out = self.tokenizer.is_special(token) and token not in self.shown_ids
        return b"" if is_left_out else self.tokenizer.token_bytes(token)

    def calls_grammar(
        self, tools: Sequence[Mapping[str, Any]], *, name: str | None = None, parallel: bool = True
    ) -> str:
        """Return the SamplingParams.grammar of a required call; see output_grammar.calls_grammar."""
        return output_grammar.calls_grammar(
            self.template, self.tokenizer, tools, name=name, parallel=parallel
        )

    def strict_grammar(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the SamplingParams.grammar if tools may be called; see output_grammar.strict_grammar."""
        return output_grammar.strict_grammar(self.template, self.tokenizer, tools)

    def effort(self, variables: Mapping[str, Any], budget: int | None) -> reasoning.Effort:
        """Return the template's variables and the budget for an effort; see reasoning.effort_of."""
        return reasoning.effort_of(self.template, variables, budget)

    def around(
        self,
        prompt: str,
        *,
        calls: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        thinks: bool = True,
        is_begun: bool = False,
    ) -> str | None:
        """Return `prepare(around=...)` for an answer of a given form; see output_grammar.around."""
        return output_grammar.around(
            self.template, self.tokenizer, prompt,
            calls=calls, tools=tools, thinks=thinks, is_begun=is_begun,
        )  # fmt: skip


class _Chain:
    """A parser that splits off reasoning, then reads calls in the rest; either stage may be missing."""

    def __init__(
        self, first: reasoning.ReasoningParser | None, second: tool_calls.ToolCallParser | None
    ) -> None:
        self._first, self._second = first, second

    @property
    def n_calls(self) -> int:
        return self._second.n_calls if self._second else 0

    def push(self, text: str) -> list[Part]:
        return self._through(self._first.push(text) if self._first else [Text(text)])

    def finish(self) -> list[Part]:
        parts = self._through(self._first.finish() if self._first else [])
        return merged(parts + (self._second.finish() if self._second else []))

    def _through(self, parts: list[Part]) -> list[Part]:
        if self._second is None:
            return merged(parts)
        found: list[Part] = []
        for part in parts:
            found += self._second.push(part.text) if isinstance(part, Text) else [part]
        return merged(found)
