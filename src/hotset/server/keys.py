"""API keys that have names and limits: the file of `--keys-file`.

    [alice]
    key = "sk-..."                # or sha256 = "...", of it
    requests_per_minute = 60
    tokens_per_minute = 20000     # of prompts and answers
    models = ["smollm2-135m"]     # default: all
    manages = false               # whether it may load, fetch and delete models, load adapters, save
                                  # slots, and call tools; default true

Each limit is a bucket that refills once per minute. A key can use a whole bucket at once, and then waits for
the refill. Tokens are counted when an answer has ended; a key that has used too many waits until the refill
has covered them.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError, InvalidRequestError, did_you_mean
from hotset.files import read_small_text
from hotset.parameters import flag, real_number, shown, text

_MAX_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, kw_only=True)
class NamedKey:
    """A key. sha256: its hash. models: names that it may use; empty: all."""

    name: str
    sha256: str
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    models: tuple[str, ...] = ()
    manages: bool = True


def read_keys(path: Path) -> tuple[NamedKey, ...]:
    """Return the keys of a file. Raises InvalidRequestError, which never quotes a key."""
    try:
        given = tomllib.loads(read_small_text(path, _MAX_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError):
        raise InvalidRequestError(f"{path} is not a TOML file") from None
    try:
        keys = tuple(_key(name, table) for name, table in given.items())
    except HotsetError as error:
        raise InvalidRequestError(f"{path}: {error}") from None
    if not keys:
        raise InvalidRequestError(f"{path} has no key in it")
    if len({key.sha256 for key in keys}) < len(keys):
        raise InvalidRequestError(f"{path} has a key twice")
    return keys


def _key(name: str, table: Any) -> NamedKey:
    if not isinstance(table, Mapping):
        raise InvalidRequestError(f"{name} is a table, such as [alice]")
    known = {"key": "key", **{one.name: one.name for one in fields(NamedKey) if one.name != "name"}}
    for field_name in table:
        if field_name not in known:
            meant = did_you_mean(field_name.lower(), known) or f"it knows {', '.join(known)}"
            raise InvalidRequestError(f"[{name}] has no {shown(field_name)} ({meant})")
    if ("key" in table) == ("sha256" in table):
        raise InvalidRequestError(f"[{name}] needs a key, or the sha256 of one")
    limits = {
        limit: real_number(f"[{name}] {limit}", table[limit], 1)
        for limit in ("requests_per_minute", "tokens_per_minute")
        if limit in table
    }
    models = table.get("models", [])
    if not isinstance(models, list):
        raise InvalidRequestError(f"[{name}] models is a list of names")
    return NamedKey(
        name=name,
        sha256=_digest(name, table),
        models=tuple(text(f"[{name}] models", model) for model in models),
        manages=flag(f"[{name}] manages", table.get("manages", True)),
        **limits,
    )


def _digest(name: str, table: Mapping[str, Any]) -> str:
    if "key" in table:
        key = table["key"]
        if not isinstance(key, str) or not key.isascii() or not key.isprintable() or not key or " " in key:
            raise InvalidRequestError(f"[{name}] key has letters, digits and signs that a header can carry")
        return digest(key).hex()
    given = table["sha256"]
    if not isinstance(given, str) or not _DIGEST.fullmatch(given.lower()):
        raise InvalidRequestError(f"[{name}] sha256 has 64 hex digits")
    return given.lower()
