"""Models made of others: a name for a model with a template, parameters and a context of its own (`hotset
create`, `POST /api/create`), kept in $HOTSET_HOME/created.json. No file of a model is copied or changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotset.errors import FormatError, HotsetError, InvalidRequestError
from hotset.files import changing, read_small_text, write_whole
from hotset.storage import store
from hotset.storage.aliases import check_alias, untagged
from hotset.units import human_size

MAX_CREATED = 1024
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Created:
    """base: the name of the model that it is made of, or a file's path. template: of its chats; None: the
    file's. sampling: fields of SamplingParams that requests may leave out; load: of LoadSettings. modelfile:
    what it was made from."""

    base: str
    template: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    modelfile: str = ""


def read() -> dict[str, Created]:
    """Every one by its name. Raises FormatError for a file of something else."""
    path = _path()
    try:
        given = json.loads(read_small_text(path, _MAX_BYTES))
        return {name: Created(**one) for name, one in given.items() if isinstance(one["base"], str)}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, HotsetError):
        raise FormatError(f"{path} is no list of created models; delete it, and they are forgotten") from None


def find(name: str) -> Created | None:
    """The created model of a name, case does not matter, with `:latest` or without; None for any other
    name."""
    found = find_named(name)
    return None if found is None else found[1]


def find_named(name: str) -> tuple[str, Created] | None:
    """As `find`, with the name as it was created."""
    wanted = untagged(name).lower()
    return next(((known, one) for known, one in read().items() if known.lower() == wanted), None)


def add(name: str, created: Created) -> str:
    """Keeps one under a name, in place of one of that name. Returns the name. Raises InvalidRequestError for
    a bad name, for that of a model that is here, and for too many or too long ones."""
    name = check_alias(untagged(name))
    if any(model.name.lower() == name.lower() for model in store.list_models()):
        raise InvalidRequestError(f"a model is called {name!r} already; choose another name")
    with changing(_path()):
        found = {known: one for known, one in read().items() if known.lower() != name.lower()}
        if len(found) >= MAX_CREATED:
            raise InvalidRequestError(f"{MAX_CREATED} models were created already, the most that are kept")
        _write(found | {name: created})
    return name


def remove(name: str) -> bool:
    """Whether there was one."""
    wanted = untagged(name).lower()
    with changing(_path()):
        found = read()
        left = {known: one for known, one in found.items() if known.lower() != wanted}
        if len(left) < len(found):
            _write(left)
    return len(left) < len(found)


def _path() -> Path:
    return store.home() / "created.json"


def _write(created: Mapping[str, Created]) -> None:
    rows = {
        name: {**asdict(one), "sampling": dict(one.sampling), "load": dict(one.load)}
        for name, one in created.items()
    }
    try:
        data = (json.dumps(rows, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "a text of a created model has half of a surrogate pair in it; send whole characters"
        ) from None
    if len(data) > _MAX_BYTES:  # `read` would refuse it
        raise InvalidRequestError(
            f"all created models together take {human_size(len(data))}, and at most {human_size(_MAX_BYTES)} "
            "are kept; delete some of them"
        )
    write_whole({_path(): data})
