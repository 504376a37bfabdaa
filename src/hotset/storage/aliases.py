"""Aliases of models (`POST /api/copy` of a server), kept in $HOTSET_HOME/aliases.json.

The file is one JSON object: alias → name of the model. The alias of a deleted model is kept, but finds
nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from hotset.errors import FormatError, HotsetError, InvalidRequestError
from hotset.files import changing, read_small_text, write_whole
from hotset.parameters import shown
from hotset.storage import store

MAX_ALIASES = 1024
MAX_CHARS = 128  # of a name
ANY_TAG = ":latest"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?", re.ASCII)


def check_alias(name: str) -> str:
    """Return the name if it is valid: letters, digits and . _ -, at most one slash, and perhaps a tag.

    Raises InvalidRequestError otherwise.
    """
    if len(name) > MAX_CHARS or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"a name has letters, digits, '.', '_' and '-', such as mine/chat:small, at most {MAX_CHARS} "
            f"characters; not {shown(name)}"
        )
    return name


def read() -> dict[str, str]:
    """Return every alias with its model. Raises FormatError if the file does not contain aliases."""
    path = _path()
    try:
        found = json.loads(read_small_text(path))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError, HotsetError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(model, str) for model in found.values()):
        raise FormatError(f"{path} is not a list of aliases; delete it, which removes all aliases")
    return found


def untagged(name: str) -> str:
    """Return a name without the `:latest` that Ollama's clients append to names without a tag."""
    return name[: -len(ANY_TAG)] if name.lower().endswith(ANY_TAG) else name


def find(name: str) -> str | None:
    """Return the model name of an alias, or None for any other name.

    Case and `:latest` do not matter.
    """
    wanted = untagged(name).lower()
    return next((model for alias, model in read().items() if alias.lower() == wanted), None)


def add(alias: str, model: str) -> None:
    """Add an alias, or change it. Raises InvalidRequestError for an invalid name, or too many aliases."""
    with changing(_path()):
        found = read() | {check_alias(alias): model}
        if len(found) > MAX_ALIASES:
            raise InvalidRequestError(f"there are already {MAX_ALIASES} aliases, which is the limit")
        _write(found)


def remove(alias: str) -> bool:
    """Delete an alias, whose case does not matter; return whether it existed."""
    with changing(_path()):
        found = read()
        left = {name: model for name, model in found.items() if name.lower() != alias.lower()}
        if len(left) < len(found):
            _write(left)
    return len(left) < len(found)


def _path() -> Path:
    return store.home() / "aliases.json"


def _write(aliases: dict[str, str]) -> None:
    write_whole({_path(): json.dumps(aliases, ensure_ascii=False, indent=1, sort_keys=True) + "\n"})
