"""Sends recorded requests of coding agents (requests/*.jsonl) again: none is refused, and prompts are reused.

    HOST=http://127.0.0.1:8080 MODEL=smollm2-135m API_KEY=... python tests/clients/replay.py

From an agent's second request on, at least 95% of the tokens that a prompt shares with an earlier one must
come from the prefix cache.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

REQUESTS = Path(__file__).resolve().parent / "requests"
_SHARE = 0.95
_BLOCK = 64  # tokens: whole blocks of the KV cache are reused
_LIMITS = {"/v1/responses": "max_output_tokens"}


def sent(path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of a prompt, and how many of them were in the cache. Exits if it is refused."""
    body |= {"model": os.environ["MODEL"], "stream": False, "temperature": 0}
    body.pop("stream_options", None)
    body[_LIMITS.get(path, "max_tokens")] = 16
    request = urllib.request.Request(
        f"{os.environ['HOST']}{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['API_KEY']}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as reply:
            usage = json.load(reply)["usage"]
    except urllib.error.HTTPError as error:
        sys.exit(f"{path} answers {error.code}: {error.read().decode()}")
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return usage.get("prompt_tokens") or usage["input_tokens"], details["cached_tokens"]


def prompt_of(body: dict[str, Any]) -> str:
    """Return the parts of a request that a template shows: tools, system prompt and conversation."""
    parts = (
        body.get(key) for key in ("tools", "instructions", "system") if not isinstance(body.get(key), str)
    )
    text = json.dumps([*parts, body.get("messages") or body.get("input")], sort_keys=True)
    return text.replace(', "cache_control": {"type": "ephemeral"}', "")


def shared(prompt: str, earlier: list[str]) -> float:
    """Return the share of a prompt that is also the beginning of an earlier one."""
    lengths = (sum(1 for _ in takewhile(bool, map(eq, prompt, one))) for one in earlier)
    return max(lengths, default=0) / len(prompt)


def replay(file: Path) -> str:
    """Return a line with the shares of an agent's prompts that were cached. Exits if one is too small."""
    earlier: list[str] = []
    shown = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        one = json.loads(line)
        prompt = prompt_of(one["body"])
        n, cached = sent(one["path"], one["body"])
        expected = _SHARE * shared(prompt, earlier) * n - _BLOCK
        shown.append(f"{cached} of {n}")
        if cached < expected:
            sys.exit(f"{file.stem}, request {number}: {cached} of {n} tokens cached, {expected:.0f} expected")
        earlier.append(prompt)
    return f"{file.stem}: {', '.join(shown)}"


if __name__ == "__main__":
    for file in sorted(REQUESTS.glob("*.jsonl")):
        print(replay(file), flush=True)
    print("no request was refused, and every shared prefix was found in the cache")
