"""The chat in a terminal: a conversation, and commands that begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotset.cli.answer import chunks, closing_line, has_template, print_stats
from hotset.cli.console import say, tell_error
from hotset.cli.terminal import Answer
from hotset.errors import HotsetError
from hotset.files import check_target, expanded, write_whole
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.generation import Chunk

_PROMPT = "> "


class _LeaveError(Exception):
    """/exit, or the end of the input."""


class Chat:
    """A conversation with a model. Without a chat template every line is continued on its own."""

    def __init__(
        self, model: Model, system: str | None, raw: bool, params: dict[str, Any], parse_special: bool = True
    ) -> None:
        self.model = model
        self.params = params
        self.parse_special = parse_special
        self.template = has_template(model) and not raw
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.last: Chunk | None = None
        self.answered = 0  # answers, and the tokens of them
        self.generated = 0
        self.commands: dict[str, tuple[Callable[[str], None], str]] = {
            "help": (self.help, "these commands"),
            "clear": (self.clear, "forget the conversation"),
            "system": (self.set_system, "TEXT: the system message from now on (forgets the conversation)"),
            "regen": (self.regenerate, "answer the last question again"),
            "stats": (self.stats, "speed, context used, bytes touched per token"),
            "save": (self.save, "FILE: write the conversation as JSON"),
            "exit": (self.leave, "leave (as Ctrl-D does)"),
        }

    # -- the loop ------------------------------------------------------------------------------

    def loop(self) -> None:
        hint = "/help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves."
        if not self.template:
            hint = "No chat template: every line is continued on its own. " + hint
        name = Path(self.model.gguf.path).name
        say(f"{name}, context {self.model.n_ctx} tokens", dim=True)
        say(hint, dim=True)
        while True:
            try:
                line = _read()
            except KeyboardInterrupt:
                say("")
                say("(Ctrl-D or /exit leaves)", dim=True)
                continue
            except EOFError:
                say("")
                return
            try:
                self.handle(line)
            except _LeaveError:
                return
            except HotsetError as error:
                tell_error(str(error))

    def handle(self, line: str) -> None:
        """One line: a command, or something to answer."""
        if not line.strip():
            return
        if line.startswith("/"):
            name, _, rest = line[1:].strip().partition(" ")
            names = [command for command in self.commands if command.startswith(name)] if name else []
            if name in ("quit", "bye"):
                names = ["exit"]
            if len(names) == 1:
                self.commands[names[0]][0](rest.strip())
            else:
                say(f"There is no command /{name}: /help shows them.")
            return
        if self.template:
            self.messages.append({"role": "user", "content": line})
            self.answer()
        else:
            self._show(line)

    def answer(self) -> None:
        """Answers the last message, and keeps the answer (or what there is of it) in the conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            text = self._show([*system, *self.messages])
        except HotsetError:
            self.messages.pop()  # what cannot be answered must not block the next question
            raise
        self.messages.append({"role": "assistant", "content": text})

    def _show(self, prompt: str | list[dict[str, str]]) -> str:
        pieces: list[str] = []
        self.last = None
        try:
            answer = chunks(self.model, prompt, self.params, parse_special=self.parse_special)
            with Answer() as out, closing(answer) as stream:  # type: ignore[type-var]
                for chunk in stream:
                    self.last = chunk
                    pieces.append(chunk.text)
                    out.write(chunk.text)
        except KeyboardInterrupt:
            if self.last is None:
                say("(stopped before the answer began)", dim=True)
        sys.stdout.write("\n")
        sys.stdout.flush()
        if self.last is not None:
            self.answered += 1
            self.generated += self.last.timings.predicted_tokens
            say(closing_line(self.model, self.last), dim=True)
        return "".join(pieces)

    # -- commands ------------------------------------------------------------------------------

    def help(self, rest: str) -> None:
        for name, (_, text) in self.commands.items():
            say(f"  /{name:<8}{text}")
        say("  A line that ends with \\ goes on in the next one.")

    def clear(self, rest: str) -> None:
        self.messages.clear()
        say("(a new conversation)", dim=True)

    def set_system(self, rest: str) -> None:
        if not self.template:
            say("There is no chat template that could carry a system message.")
            return
        if rest:
            self.system = rest
            self.clear("")
        else:
            say(f"System message: {self.system or '(none)'}")

    def regenerate(self, rest: str) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            say("There is no question to answer again.")
            return
        self.answer()

    def stats(self, rest: str) -> None:
        if self.last is None:
            say("Nothing has been answered yet.")
            return
        timings = self.last.timings
        used = timings.prompt_tokens + timings.predicted_tokens
        say(closing_line(self.model, self.last))
        say(f"Answers: {self.answered}, with {self.generated} tokens")
        say(f"{used} of {self.model.n_ctx} tokens of the context are used")
        say(f"{human_size(self.model.gguf.nbytes)} of weights, backend {self.model.backend.name}")
        if self.model.config.leaves_out:
            print_stats(self.last.answer_stats, self.model.decided.channels)

    def save(self, rest: str) -> None:
        if not rest:
            say("Say where: /save FILE")
            return
        import json

        system = [{"role": "system", "content": self.system}] if self.system else []
        path = expanded(rest)
        check_target(path, self.model.gguf.paths)
        text = json.dumps([*system, *self.messages], indent=2, ensure_ascii=False) + "\n"
        write_whole({path: text.encode("utf-8", "replace")}, "choose another place")
        say(f"Saved {len(self.messages)} messages to {rest}.")

    def leave(self, rest: str) -> None:
        raise _LeaveError


def _read() -> str:
    """A line of the person, several where lines end with a backslash."""
    lines = [_input(_PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_input("  "))
    return "\n".join(lines)


def _input(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)  # with the line editing that readline adds
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def chat(
    model: Model, *, system: str | None, raw: bool, params: dict[str, Any], parse_special: bool = True
) -> None:
    """Chats until /exit or Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines and remembers them
    if system and (raw or not has_template(model)):
        raise typer.BadParameter("it needs a chat template.", param_hint="--system")
    Chat(model, system, raw, params, parse_special).loop()
