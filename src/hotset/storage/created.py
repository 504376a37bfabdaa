"""Created models: a name for a model with its own template, parameters and context.

They come from `hotset create` and `POST /api/create`; no model file is copied or changed. Each is a file in
$HOTSET_HOME/created, which is read again when it has changed. An older hotset kept them all in
$HOTSET_HOME/created.json: that file is still read, and the next change moves its models into the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from hotset.errors import FormatError, HotsetError, InvalidRequestError
from hotset.files import changing, entries, read_small_text, write_whole
from hotset.storage import store
from hotset.storage.aliases import check_alias, untagged
from hotset.units import human_size

MAX_CREATED = 1024
MAX_BYTES = 64 << 20  # of all together
_SUFFIX = ".json"
_LONGEST = 200  # characters of a file's name


@dataclass(frozen=True, kw_only=True)
class Created:
    """A model with its own template and parameters.

    base: the name of the model, or the path of a file, that it is based on. template: the chat template;
    None: the file's. sampling: defaults for fields of SamplingParams; load: fields of LoadSettings.
    modelfile: the Modelfile that it was created from.
    """

    base: str
    template: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    modelfile: str = ""


def read() -> dict[str, Created]:
    """Return every model by its name; skip those whose file is damaged."""
    found = {}
    for entry in entries(_folder()):
        if entry.name.endswith(_SUFFIX):
            with suppress(FormatError):
                if (one := _read(Path(entry.path), _parse_one)) is not None:
                    found[one[0]] = one[1]
    kept = {name.lower() for name in found}
    return {name: one for name, one in _old().items() if name.lower() not in kept} | found


def find(name: str) -> Created | None:
    """Return the created model of a name, or None for any other name. Case and `:latest` do not matter.

    Raises FormatError if its file is damaged.
    """
    found = find_named(name)
    return None if found is None else found[1]


def find_named(name: str) -> tuple[str, Created] | None:
    """Return a model's original name and the result of `find`, or None."""
    wanted = untagged(name).lower()
    if (found := _read(_path(wanted), _parse_one)) is not None:
        return found
    return next(((known, one) for known, one in _old().items() if known.lower() == wanted), None)


def add(name: str, created: Created) -> str:
    """Save a model under a name, replacing one of that name; return the name.

    Raises InvalidRequestError for an invalid name, the name of a stored model, and too many or too long ones.
    """
    name = check_alias(untagged(name))
    if any(model.name.lower() == name.lower() for model in store.list_models()):
        raise InvalidRequestError(f"a model is called {name!r} already; choose another name")
    with changing(_folder() / "all"):
        _move_old()
        data, path = _written(name, created), _path(name)
        files = [entry for entry in entries(_folder()) if entry.name.endswith(_SUFFIX)]
        others = [entry.stat().st_size for entry in files if entry.name != path.name]
        if len(others) >= MAX_CREATED:
            raise InvalidRequestError(f"there are already {MAX_CREATED} created models, which is the limit")
        if (n_bytes := sum(others) + len(data)) > MAX_BYTES:
            raise InvalidRequestError(
                f"all created models together take {human_size(n_bytes)}, but the limit is "
                f"{human_size(MAX_BYTES)}; delete some of them"
            )
        write_whole({path: data})
    return name


def remove(name: str) -> bool:
    """Delete the model of a name; return whether it existed."""
    with changing(_folder() / "all"):
        _move_old()
        try:
            _path(untagged(name)).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise HotsetError(f"{_path(untagged(name))} cannot be deleted ({error.strerror}).") from None
    return True


def _folder() -> Path:
    return store.home() / "created"


def _path(name: str) -> Path:
    return _folder() / f"{quote(name.lower(), safe='', errors='replace')[:_LONGEST]}{_SUFFIX}"


# ---- files ----

_Contents = TypeVar("_Contents")
_known: dict[Path, tuple[tuple[int, ...], Any]] = {}  # a file's size, times and inode, and its contents


def _read(path: Path, parse: Callable[[Any], _Contents]) -> _Contents | None:
    """Return the contents of a file; None if it does not exist. Raises FormatError for any other file."""
    try:
        stat = path.stat()
        mark = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        if (known := _known.get(path)) is None or known[0] != mark:
            while len(_known) >= 2 * MAX_CREATED:
                _known.pop(next(iter(_known)), None)
            known = _known[path] = mark, parse(json.loads(read_small_text(path, MAX_BYTES)))
    except (FileNotFoundError, NotADirectoryError):
        _known.pop(path, None)
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, HotsetError):
        raise FormatError(f"{path} is not a created model; delete it, which removes that model") from None
    found: _Contents = known[1]
    return found


def _parse_one(given: Any) -> tuple[str, Created]:
    name = check_alias(given.pop("name"))
    return name, _created(given)


def _created(given: Any) -> Created:
    if not isinstance(given["base"], str):
        raise TypeError
    return Created(**given)


def _written(name: str, created: Created) -> bytes:
    row = {"name": name, **asdict(created), "sampling": dict(created.sampling), "load": dict(created.load)}
    try:
        return (json.dumps(row, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "a text of a created model has half of a surrogate pair; send whole characters"
        ) from None


def _old() -> dict[str, Created]:
    """Return the models of created.json."""
    return _read(_old_path(), lambda given: {name: _created(one) for name, one in given.items()}) or {}


def _old_path() -> Path:
    return store.home() / "created.json"


def _move_old() -> None:
    """Give each model of created.json a file of its own, and delete created.json once all are written."""
    missing = {name: one for name, one in _old().items() if not _path(name).exists()}
    write_whole({_path(name): _written(name, one) for name, one in missing.items()})
    with suppress(FileNotFoundError):
        _old_path().unlink()
