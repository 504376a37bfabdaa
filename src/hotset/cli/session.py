"""`hotset run --session FILE`: a conversation that continues in the next run, with its cache."""

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

Message = dict[str, Any]


class Session:
    """A conversation that is read from a file, if the file exists. messages: in order.

    The file's cache is restored into the model's, so that the prompt is not computed again. Raises
    FormatError for any other file.
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
        """Return its system message, or None."""
        return next((one["content"] for one in self.messages if one["role"] == "system"), None)

    @property
    def turns(self) -> list[Message]:
        """Return its messages without the system message."""
        return [one for one in self.messages if one["role"] != "system"]

    def with_question(self, asked: str | list[Message]) -> str | list[Message]:
        """Return a prompt that follows the earlier messages; a bare text is unchanged.

        A system message in the prompt replaces the earlier one.
        """
        if isinstance(asked, str):
            return asked
        system = [one for one in asked if one["role"] == "system"]
        if not system and self.system is not None:
            system = [{"role": "system", "content": self.system}]
        return [*system, *self.turns, *(one for one in asked if one["role"] != "system")]

    def save(self, messages: list[Message]) -> None:
        """Write the conversation, with the cache of its latest answer."""
        slots = self._files.thread.engine.keep_slots()
        prefix = next(iter(slots.values()), self._prefix)
        self._files.save(self._path, prefix, {"messages": messages})


def _messages(given: Any, path: Path) -> list[Message]:
    """Return the checked messages of a file, which may come from anyone. Raises FormatError."""
    if not isinstance(given, list) or not all(
        isinstance(one, dict)
        and set(one) == {"role", "content"}
        and isinstance(one["role"], str)
        and _is_content(one["content"])
        for one in given
    ):
        raise FormatError(f"{path} has no conversation; name another file.")
    return given


def _is_content(given: Any) -> bool:
    """Return whether a content is a text, or a list of texts and paths of images."""
    if isinstance(given, str):
        return True
    forms = ({"type": "text", "text": str}, {"type": "image", "path": str})
    return isinstance(given, list) and all(
        isinstance(part, dict)
        and any(
            set(part) == set(form) and part["type"] == form["type"] and all(map(_is_str, part.values()))
            for form in forms
        )
        for part in given
    )


def _is_str(value: Any) -> bool:
    return isinstance(value, str)
