"""The file of `--mcp`: MCP servers whose tools the page offers, in the format of other MCP clients.

    {"mcpServers": {
      "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/srv/texts"]},
      "search": {"url": "https://mcp.example/mcp", "headers": {"Authorization": "Bearer ${SEARCH_KEY}"}}
    }}

`${NAME}`, `${NAME:-default}` and `${env:NAME}` in texts are replaced by environment variables.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import read_small_text
from hotset.parameters import flag, shown

MAX_SERVERS = 32
_MAX_BYTES = 1 << 20
_LONGEST_NAME = 40
_STDIO = ("command", "args", "env", "cwd")
_HTTP = ("url", "headers")
_HTTP_TYPES = ("http", "streamable-http", "streamableHttp", "streamable_http")
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*)(?::-([^}]*))?\}", re.ASCII)
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_OF_A_NAME = re.compile(r"[^a-zA-Z0-9_-]")


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """One server: a command that speaks MCP over stdin and stdout, or an address for streamable HTTP.

    unused: fields of the file that only other clients use.
    """

    name: str
    command: str | None = None
    args: tuple[str, ...] = field(default=(), repr=False)  # may have secrets, like the fields below
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    unused: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """Return the beginning of the names by which a model calls its tools."""
        return f"{_NOT_OF_A_NAME.sub('_', self.name)}__"

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return the fields that identify the program or address."""
        return self.name, self.command, self.args, self.cwd, self.url


def read_servers(path: Path) -> tuple[McpServer, ...]:
    """Return the servers of a file, without disabled ones.

    Raises InvalidRequestError, which quotes no text's value.
    """
    try:
        given = json.loads(read_small_text(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno}: {error.msg})" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidRequestError(f"{path} is not a JSON file{where}") from None
    tables = given.get("mcpServers") if isinstance(given, dict) else None
    if not isinstance(tables, dict) or not tables:
        raise InvalidRequestError(
            f'{path} names no MCP servers: {{"mcpServers": {{"NAME": {{"command": ..., "args": [...]}}}}}}'
        )
    try:
        servers = tuple(
            found for name, table in tables.items() if (found := _server(name, table)) is not None
        )
    except HotsetError as error:
        raise InvalidRequestError(f"{path}: {error}") from None
    if len(servers) > MAX_SERVERS:
        raise InvalidRequestError(f"{path} names {len(servers)} MCP servers, and {MAX_SERVERS} are taken")
    _check_prefixes(path, servers)
    return servers


def _check_prefixes(path: Path, servers: tuple[McpServer, ...]) -> None:
    """Raise InvalidRequestError if tools of two servers could have the same name."""
    ordered = sorted(servers, key=lambda one: one.prefix.lower())
    for one, other in pairwise(ordered):
        if other.prefix.lower().startswith(one.prefix.lower()):
            raise InvalidRequestError(
                f"{path}: tools of {one.name!r} and of {other.name!r} could have the same names; rename one"
            )


def _server(name: str, table: Any) -> McpServer | None:
    if not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise InvalidRequestError(
            f"a server's name has 1 to {_LONGEST_NAME} characters to look at, and is not {shown(name)}"
        )
    if not isinstance(table, dict):
        raise InvalidRequestError(f"{name} is an object with a command or a url")
    if flag(f"{name}: disabled", table.get("disabled", False)):
        return None
    if ("command" in table) == ("url" in table):
        raise InvalidRequestError(f"{name} needs a command, or a url")
    known = _STDIO if "command" in table else _HTTP
    _check_type(name, table)
    unused = tuple(one for one in table if one not in (*known, "type", "disabled"))
    if "command" in table:
        return McpServer(
            name=name,
            command=_text(name, "command", table["command"]),
            args=tuple(_text(name, "args", one, empty=True) for one in _list(name, table.get("args", []))),
            env=_texts(name, "env", table.get("env", {})),
            cwd=_text(name, "cwd", table["cwd"]) if table.get("cwd") is not None else None,
            unused=unused,
        )
    headers = _texts(name, "headers", table.get("headers", {}))
    for header, value in headers.items():
        if not _HEADER.fullmatch(header) or not value.isascii() or not value.isprintable():
            raise InvalidRequestError(
                f"{name}: the header {shown(header)} has characters that none can carry"
            )
    url = _text(name, "url", table["url"])
    if not re.fullmatch(r"https?://[^\s/][!-~]*", url):
        raise InvalidRequestError(f"{name}: url begins with https:// or http://")
    return McpServer(name=name, url=url, headers=headers, unused=unused)


def _check_type(name: str, table: Mapping[str, Any]) -> None:
    kind = table.get("type")
    if kind == "sse":
        raise InvalidRequestError(
            f"{name}: the older transport sse is not supported; give the server's address for streamable HTTP"
        )
    fits = ("stdio",) if "command" in table else _HTTP_TYPES
    if kind is not None and kind not in fits:
        raise InvalidRequestError(f"{name}: type is {fits[0]} here, not {shown(kind)}")


def _list(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise InvalidRequestError(f"{name}: args is a list of texts")
    return given


def _texts(name: str, what: str, given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{name}: {what} is an object of texts")
    return {_text(name, what, one): _text(name, what, value, empty=True) for one, value in given.items()}


def _text(name: str, what: str, given: Any, *, empty: bool = False) -> str:
    """Return a text with its variables replaced. Raises InvalidRequestError."""
    if not isinstance(given, str):
        raise InvalidRequestError(f"{name}: {what} is text, not a {type(given).__name__}")

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise InvalidRequestError(f"{name}: the environment has no {match[1]}, which its {what} needs")
        return found

    found = _VARIABLE.sub(value, given)
    if "\0" in found or not (found or empty):
        raise InvalidRequestError(f"{name}: {what} is empty, or has a zero byte in it")
    return found
