"""`hotset run --session FILE`: a conversation that goes on in the next run, with its cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.cli.console import say
from hotset.engine.saved_prefix import NO_PREFIX
from hotset.errors import FormatError
from hotset.files import check_target, expanded
from hotset.loader.prompt_cache import session_files

if TYPE_CHECKING:
    from hotset.api import Model

Message = dict[str, str]


class Session:
    """A conversation in a file, which is read now, where there is one. messages: of it, in order.

    What is found of its cache is put into the model's, so that its prompt is not computed again. Raises
    FormatError for a file that is something else.
    """

    def __init__(self, model: Model, path: Path) -> None:
        self._path = expanded(path)
        check_target(self._path, model.gguf.paths)
        self._files = session_files(model, "--session")
        self._prefix = NO_PREFIX
        self.messages: list[Message] = []
        try:
            saved = self._files.read(self._path)
        except FileNotFoundError:
            return
        self.messages = _messages(saved.about.get("messages"), self._path)
        self._prefix = saved.prefix
        n_tokens = self._files.restore(saved)
        found = "with their cache" if n_tokens else "without a cache: they are computed again"
        say(f"({self._path}: {len(self.messages)} messages, {found})", dim=True)

    @property
    def system(self) -> str | None:
        """Its system message."""
        return next((one["content"] for one in self.messages if one["role"] == "system"), None)

    @property
    def turns(self) -> list[Message]:
        """Its messages without that."""
        return [one for one in self.messages if one["role"] != "system"]

    def with_question(self, asked: str | list[Message]) -> str | list[Message]:
        """A prompt behind what was said before; a bare text stands for itself. Its own system message takes
        the place of the earlier one."""
        if isinstance(asked, str):
            return asked
        system = [one for one in asked if one["role"] == "system"]
        if not system and self.system is not None:
            system = [{"role": "system", "content": self.system}]
        return [*system, *self.turns, *(one for one in asked if one["role"] != "system")]

    def save(self, messages: list[Message]) -> None:
        """Writes the conversation, with the cache of its latest answer."""
        slots = self._files.thread.engine.keep_slots()
        prefix = next(iter(slots.values()), self._prefix)
        self._files.save(self._path, prefix, {"messages": messages})


def _messages(given: Any, path: Path) -> list[Message]:
    """Checked: a file may come from anywhere."""
    if not isinstance(given, list) or not all(
        isinstance(one, dict)
        and set(one) == {"role", "content"}
        and all(isinstance(v, str) for v in one.values())
        for one in given
    ):
        raise FormatError(f"{path} has no conversation; name another file.")
    return given
