"""The chat in a terminal: a conversation, with commands that begin with a slash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotset.cli.answer import closing_line, has_template, print_stats, with_images
from hotset.cli.console import print_error, say
from hotset.cli.editor import Editor, block
from hotset.cli.terminal import AnswerWriter
from hotset.engine.sampler import SamplingParams
from hotset.errors import HotsetError, InvalidRequestError, did_you_mean
from hotset.files import check_target, expanded, write_whole
from hotset.parameters import shown
from hotset.sampling_parameters import PARAMETERS
from hotset.text.fitting import fitted
from hotset.text.image_text import NO_TOKEN
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.cli.session import Session
    from hotset.generation import Chunk


class _FieldError(InvalidRequestError):
    """A message of /set, which takes names of fields, not of options."""


class _LeaveError(Exception):
    """The exception that leaves the chat: /exit, or the end of the input."""


class Chat:
    """A conversation with a model. Without a chat template every message is continued on its own."""

    def __init__(
        self, model: Model, system: str | None, raw: bool, params: dict[str, Any], parse_special: bool = True
    ) -> None:
        self.model = model
        self.params = params
        self.parse_special = parse_special
        self.raw = raw
        self.another: Callable[[str], Model] | None = None
        self.template = has_template(model) and not raw
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.images: list[Path] = []  # for the next message
        self.n_dropped = 0  # the oldest turns, which the latest prompt left out
        self.last: Chunk | None = None
        self.answered = 0  # answers; `generated` counts their tokens
        self.generated = 0
        self.commands: dict[str, tuple[Callable[[str], None], str]] = {
            "help": (self.help, "these commands"),
            "clear": (self.clear, "forget the conversation"),
            "system": (self.set_system, "TEXT: the system message from now on (forgets the conversation)"),
            "set": (self.set_parameter, "PARAMETER VALUE: set a sampling parameter, such as temperature 0.2"),
            "model": (self.change_model, "NAME: continue the conversation with another model"),
            "load": (self.change_model, "NAME: the same"),
            "image": (self.attach, "FILE: show an image with the next message"),
            "regen": (self.regenerate, "answer the last question again"),
            "stats": (self.stats, "speed, context used, bytes read per token"),
            "save": (self.save, "FILE: write the conversation as JSON"),
            "exit": (self.leave, "leave (as Ctrl-D does)"),
        }

    # -- the loop ------------------------------------------------------------------------------

    def loop(self) -> None:
        hint = "/help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves."
        if not self.template:
            hint = "No chat template: every message is continued on its own. " + hint
        name = Path(self.model.gguf.path).name
        say(f"{name}, context {self.model.n_ctx} tokens", dim=True)
        say(hint, dim=True)
        with Editor(f"/{command}" for command in self.commands) as editor:
            while True:
                try:
                    self.handle(editor.read())
                except KeyboardInterrupt:
                    say("(Ctrl-D or /exit leaves)", dim=True)
                except (EOFError, _LeaveError):
                    return
                except HotsetError as error:
                    print_error(str(error), as_options=not isinstance(error, _FieldError))

    def handle(self, typed: str) -> None:
        """Obey a command, or answer a message."""
        text = block(typed)
        if text is None:
            text = typed
            if typed.startswith("/") and self._obeys(typed):
                return
        if not text.strip():
            return
        if self.template or self.images:
            content, self.images = with_images(text, self.images), []
            self.messages.append({"role": "user", "content": content})
            self.answer()
        else:
            ids = self.model.encode(text, parse_special=self.parse_special)
            self._show(self.model.stream(ids, **self.params))

    def _obeys(self, typed: str) -> bool:
        """Obey a command, and return whether the text was one.

        Pasted lines, such as a path or a comment, are a command only if they begin with its whole name.
        """
        name, rest = [*typed[1:].split(None, 1), "", ""][:2]
        name = {"quit": "exit", "bye": "exit"}.get(name, name)
        if name not in self.commands:
            if "\n" in typed:
                return False
            begun = [command for command in self.commands if name and command.startswith(name)]
            if len(begun) != 1:
                known = {command: f"/{command}" for command in begun or self.commands}
                meant = did_you_mean(name.lower(), known, 0.0 if begun else 0.6)
                say(f"There is no command /{name}; {meant or '/help shows them.'}")
                return True
            name = begun[0]
        self.commands[name][0](rest.strip())
        return True

    def answer(self) -> None:
        """Answer the last message, and keep the answer, even if interrupted, in the conversation."""
        try:
            n_ctx, params = self.model.n_ctx, SamplingParams(**self.params)
            found = fitted(self.whole, self._encoded, n_ctx, params.max_tokens)
            stream = self.model.stream(found.tokens, **self.params)  # raises if the last message has no room
            if (n := found.n_dropped - self.n_dropped) > 0:
                which = f"the {n} oldest turns are" if n > 1 else "the oldest turn is"
                full = f"the context of {n_ctx} tokens is full"
                say(f"({full}: {which} left out; a larger -c keeps more)", dim=True)
            text = self._show(stream)
        except (HotsetError, KeyboardInterrupt):
            self.messages.pop()  # a message that cannot be answered must not block the next one
            raise
        self.messages.append({"role": "assistant", "content": text})
        self.n_dropped = found.n_dropped

    def _encoded(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        budget = self.params.get("reasoning_budget")
        return self.model.encode_chat(messages, variables=self.model.output_form.effort({}, budget).variables)

    @property
    def whole(self) -> list[dict[str, Any]]:
        """Return all messages, with the system message."""
        return [*self._system_messages(), *self.messages]

    def _system_messages(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _show(self, answer: Iterator[Chunk]) -> str:
        pieces: list[str] = []
        self.last = None
        try:
            with AnswerWriter() as out, closing(answer) as stream:  # type: ignore[type-var]
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

    def help(self, _rest: str) -> None:
        for name, (_, text) in self.commands.items():
            say(f"  /{name:<8}{text}")
        say('  A pasted block is one message. So are the lines between """ and """.')
        say("  A message continues after a line that ends with \\.")
        say("  Tab completes commands; the arrow up and Ctrl-R find earlier messages, of earlier chats too.")

    def attach(self, rest: str) -> None:
        """Check an image, and keep it for the next message."""
        if not rest:
            names = ", ".join(path.name for path in self.images)
            say(f"Images of the next message: {names or '(none)'}; add one with /image FILE")
            return
        if self.raw:
            raise HotsetError("images need the chat template, which --raw leaves out")
        path = expanded(rest.strip("'\""))
        encoded = self.model.encode_chat([{"role": "user", "content": with_images("", [path])}])
        self.images.append(path)
        say(f"({path.name} is shown with the next message: {encoded.count(NO_TOKEN)} tokens)", dim=True)

    def clear(self, _: str) -> None:
        self.images.clear()
        self.messages.clear()
        self.n_dropped = 0
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

    def set_parameter(self, rest: str) -> None:
        """Change a sampling parameter for later answers, or print the parameters that are set."""
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        if not value:
            for field, given in self.params.items():
                say(f"  {field:<24}{given}")
            say("Change one with /set PARAMETER VALUE, such as /set temperature 0.2", dim=True)
            return
        try:
            self.params |= parameter(name, value.strip())
        except InvalidRequestError as error:
            raise _FieldError(str(error)) from None
        say(f"({name} is now {value.strip()})", dim=True)

    def change_model(self, rest: str) -> None:
        if not rest:
            say(f"{Path(self.model.gguf.path).name}, context {self.model.n_ctx} tokens")
            return
        if self.another is None:
            raise HotsetError("a chat with --session keeps its model; start another chat for another model")
        model = self.another(rest)
        of_file = self.model.decided.sampling
        own = {name: value for name, value in self.params.items() if of_file.get(name) != value}
        self.model.close()
        self.model, self.params = model, {**model.decided.sampling, **own}
        self.template = has_template(model) and not self.raw
        self.last, self.n_dropped = None, 0
        say(f"({Path(model.gguf.path).name}, context {model.n_ctx} tokens)", dim=True)

    def regenerate(self, _: str) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            say("There is no question to answer again.")
            return
        self.answer()

    def stats(self, _: str) -> None:
        if self.last is None:
            say("Nothing has been answered yet.")
            return
        timings = self.last.timings
        say(closing_line(self.model, self.last))
        say(f"Answers: {self.answered}, with {self.generated} tokens")
        used = timings.prompt_tokens + timings.predicted_tokens
        say(f"{used} of {self.model.n_ctx} tokens of the context are used")
        say(f"{human_size(self.model.gguf.nbytes)} of weights, backend {self.model.backend.name}")
        if self.model.config.leaves_out:
            print_stats(self.last.answer_stats, self.model)

    def save(self, rest: str) -> None:
        if not rest:
            say("Say where: /save FILE")
            return
        path = expanded(rest)
        check_target(path, self.model.gguf.paths)
        text = json.dumps(self.whole, indent=2, ensure_ascii=False) + "\n"
        write_whole({path: text.encode("utf-8", "replace")}, "choose another place")
        say(f"Saved {len(self.messages)} messages to {rest}.")

    def leave(self, _: str) -> None:
        raise _LeaveError


def parameter(name: str, value: str) -> dict[str, Any]:
    """Return a field of SamplingParams with its value. Raises InvalidRequestError for a wrong name or value.

    name: of the field, of its option (`temp`, `--top-k`) or of Ollama's parameter (`num_predict`).
    """
    wanted = name.strip("-").replace("-", "_")
    known = {spelled: one for one in PARAMETERS.values() for spelled in one.names}
    if wanted not in known:
        if wanted in ("num_ctx", "n_ctx", "ctx_size", "c"):
            raise InvalidRequestError("the context is fixed when a model is loaded; start the chat with -c")
        meant = did_you_mean(wanted, {one: one for one in PARAMETERS}, 0.6)
        raise InvalidRequestError(f"the parameter {shown(name)} is unknown; {meant or ', '.join(PARAMETERS)}")
    field = known[wanted].name
    try:
        given = json.loads(value)
    except ValueError:
        given = value
    if field in ("stop", "dry_sequence_breakers"):
        given = tuple(given) if isinstance(given, list) else (str(given),)
    return {field: getattr(SamplingParams(**{field: given}), field)}


def chat(
    model: Model,
    *,
    system: str | None,
    raw: bool,
    params: dict[str, Any],
    parse_special: bool = True,
    session: Session | None = None,
    another: Callable[[str], Model] | None = None,
    images: Sequence[Path] = (),
) -> None:
    """Chat until /exit or Ctrl-D. session: keeps the conversation. another: loads a model by name.

    images: for the first message.
    """
    if system and (raw or not has_template(model)):
        raise typer.BadParameter("it requires a chat template.", param_hint="--system")
    conversation = Chat(model, system, raw, params, parse_special)
    for path in images:
        conversation.attach(str(path))
    if session is None:
        conversation.another = another
        try:
            conversation.loop()
        finally:
            conversation.model.close()
        return
    conversation.system = system or session.system
    conversation.messages = session.turns
    try:
        conversation.loop()
    finally:
        session.save(conversation.whole)
