"""The editor of the chat: messages of one or more lines, with a history that all chats share.

prompt_toolkit edits them. A pasted block is one message (bracketed paste), Tab completes commands, the arrow
up and Ctrl-R find earlier messages. If nothing can be drawn (TERM=dumb), plain lines are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal

from hotset.cli.console import say
from hotset.errors import HotsetError
from hotset.files import read_small_file, write_whole
from hotset.storage import store

_PROMPT, _CONTINUATION = "> ", "  "
_QUOTES = '"""'
LARGEST_HISTORY = 1 << 20  # bytes of the file
LONGEST_ENTRY = 64 << 10  # bytes of a message; a longer one is not stored


def is_open(typed: str) -> bool:
    """Return whether Enter begins another line: after a backslash, or in a block until its closing quotes."""
    if typed.startswith(_QUOTES):
        return not any(line.rstrip().endswith(_QUOTES) for line in typed[len(_QUOTES) :].split("\n"))
    return typed.endswith("\\")


def block(typed: str) -> str | None:
    """Return the text between the quotes of a block, or None if `typed` is not a block."""
    text, n = typed.rstrip(), len(_QUOTES)
    if len(text) < 2 * n or not (text.startswith(_QUOTES) and text.endswith(_QUOTES)):
        return None
    return text[n:-n].removeprefix("\n").removesuffix("\n")


class Editor:
    """A reader of messages from the terminal. commands: completions of Tab at the start of a message."""

    def __init__(self, commands: Iterable[str]) -> None:
        self._session: PromptSession[str] | None = None
        if is_dumb_terminal() or not (sys.stdout.isatty() or sys.stderr.isatty()):
            return
        output = create_output(always_prefer_tty=True)
        if isinstance(output, Vt100_Output):
            output.enable_cpr = (
                False  # menus need the cursor's position; a late reply would appear as text in an answer
            )
        self._history = ChatHistory()
        self._session = PromptSession(
            _PROMPT, prompt_continuation=_CONTINUATION, history=self._history, key_bindings=_bindings(),
            completer=WordCompleter(list(commands), sentence=True), complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE, enable_suspend=True, output=output,
        )  # fmt: skip

    def read(self) -> str:
        """Return the next message as typed. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        if self._session is None:
            return _read_lines()
        try:
            return self._session.prompt()
        finally:
            self._session.output.enable_bracketed_paste()  # for text that is pasted during an answer
            self._session.output.flush()
            self._history.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            self._session.output.disable_bracketed_paste()
            self._session.output.flush()


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add(
        "enter", filter=has_focus(DEFAULT_BUFFER) & Condition(lambda: is_open(get_app().current_buffer.text))
    )
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not buffer.text.startswith(_QUOTES):
            buffer.cursor_position = len(buffer.text)
            buffer.delete_before_cursor()  # the backslash
        buffer.insert_text("\n")

    return bindings


class ChatHistory(History):
    """The messages of all chats, the newest last: one JSON string per line. Other lines are skipped.

    An error of reading or writing the file is reported once, and changes nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        self._problem = ""
        self._is_reported = False

    def load_history_strings(self) -> list[str]:
        try:
            return [json.loads(line) for line in reversed(_kept(_history_file()))]
        except HotsetError as error:
            self._problem = str(error)
            return []

    def store_string(self, string: str) -> None:
        entry = json.dumps(string)
        if len(entry) > LONGEST_ENTRY:
            return
        try:
            path = _history_file()
            entries = [*_kept(path), entry]  # read again, because other chats may have added entries
            size = sum(len(one) + 1 for one in entries)
            while size > LARGEST_HISTORY:
                size -= len(entries.pop(0)) + 1
            path.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(f"{one}\n" for one in entries)
            write_whole({path: text}, "name another folder in HOTSET_HOME", sync=False, mode=0o600)
        except (HotsetError, OSError) as error:
            self._problem = str(error)

    def report(self) -> None:
        """Print the error of the file, at a moment when nothing is drawn."""
        if self._problem and not self._is_reported:
            self._is_reported = True
            say(f"Messages are not kept for later chats: {self._problem}", dim=True)


def _history_file() -> Path:
    return store.home() / "chat_history"


def _kept(path: Path) -> list[str]:
    """Return the entries of a file, unchanged. Raises HotsetError."""
    try:
        lines = read_small_file(path, LARGEST_HISTORY).decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return []
    return [line for line in lines if _is_entry(line)]


def _is_entry(line: str) -> bool:
    try:
        return isinstance(json.loads(line), str)
    except (ValueError, RecursionError):
        return False


def _read_lines() -> str:
    typed = _read_line(_PROMPT)
    while is_open(typed):
        typed = typed.removesuffix("\\") if not typed.startswith(_QUOTES) else typed
        typed += "\n" + _read_line(_CONTINUATION)
    return typed


def _read_line(prompt: str) -> str:
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = ""
    try:
        line = sys.stdin.readline()
    finally:
        if not line:
            say("")  # moves the cursor away from the prompt
    if not line:
        raise EOFError
    return line.removesuffix("\n")
