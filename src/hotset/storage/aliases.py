"""Further names of models: `POST /api/copy` of a server, kept in $HOTSET_HOME/aliases.json.

One object: alias → name of the model. An alias whose model is gone is kept and leads nowhere.
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
    """Raises InvalidRequestError for what is no name: letters, digits, . _ -, once a slash, and a tag."""
    if len(name) > MAX_CHARS or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"a name has letters, digits, '.', '_' and '-', such as mine/chat:small, at most {MAX_CHARS} "
            f"characters; not {shown(name)}"
        )
    return name


def read() -> dict[str, str]:
    """Every alias with the model that it stands for. Raises FormatError for a file of something else."""
    path = _path()
    try:
        found = json.loads(read_small_text(path))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError, HotsetError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(model, str) for model in found.values()):
        raise FormatError(f"{path} is no list of aliases; delete it, and the aliases are forgotten")
    return found


def untagged(name: str) -> str:
    """A name without the `:latest` that Ollama's clients put behind one that has no tag."""
    return name[: -len(ANY_TAG)] if name.lower().endswith(ANY_TAG) else name


def find(name: str) -> str | None:
    """The name that an alias stands for, case does not matter, with `:latest` or without; None for any other
    name."""
    wanted = untagged(name).lower()
    return next((model for alias, model in read().items() if alias.lower() == wanted), None)


def add(alias: str, model: str) -> None:
    """Raises InvalidRequestError for a bad name, or too many."""
    with changing(_path()):
        found = read() | {check_alias(alias): model}
        if len(found) > MAX_ALIASES:
            raise InvalidRequestError(f"there are {MAX_ALIASES} aliases already, the most that are kept")
        _write(found)


def remove(alias: str) -> bool:
    """Whether there was one (case does not matter)."""
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
