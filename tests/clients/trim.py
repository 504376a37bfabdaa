"""Makes recorded requests (record.py) short and anonymous, so that they can be kept as data of the tests.

    python tests/clients/trim.py AGENT FILE=COUNT ...

Takes the first COUNT requests with a body of each file, and writes tests/clients/requests/AGENT.jsonl. Long
texts are cut, identifiers and paths become fixed words, and tools beyond the first ones are left out. Equal
texts stay equal, so that requests still share a prefix.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REQUESTS = Path(__file__).resolve().parent / "requests"
_LONGEST = 240  # characters of a text
_MOST_TOOLS = 12
_KEPT = ("name", "type", "role", "id", "call_id", "tool_use_id", "tool_call_id", "arguments")  # uncut
_IDENTIFIERS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-f]{32,64}\b")
_PATHS = re.compile(r"(?<![\w:/.<])(?:/[\w.@+-]+){2,}")


def trimmed(value: Any, key: str = "") -> Any:
    """Return a part of a body with short texts and fixed words for identifiers and paths."""
    if isinstance(value, dict):
        return {name: trimmed(one, name) for name, one in value.items() if name != "client_metadata"}
    if isinstance(value, list):
        return [trimmed(one) for one in (value[:_MOST_TOOLS] if key == "tools" else value)]
    if not isinstance(value, str):
        return value
    text = _PATHS.sub("/home/user/project", _IDENTIFIERS.sub("00000000-0000-4000-8000-000000000000", value))
    return text if key in _KEPT else text[:_LONGEST]


def requests(file: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first requests with a body."""
    lines = (json.loads(line) for line in file.read_text().splitlines())
    for one in [line for line in lines if line["body"]][:count]:
        yield {"path": one["path"], "body": trimmed(one["body"])}


if __name__ == "__main__":
    agent, *files = sys.argv[1:]
    found = [
        one
        for name, count in (file.rsplit("=", 1) for file in files)
        for one in requests(Path(name), int(count))
    ]
    REQUESTS.mkdir(exist_ok=True)
    (REQUESTS / f"{agent}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in found))
