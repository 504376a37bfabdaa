"""How much of an agent's prompts is computed again, with a growing conversation, early changes and restarts?

usage: python bench/agent_traffic.py --model FILE [--model FILE ...] [--llama BIN] [--turns N] [--rounds N]

An agent sends its whole conversation with each request: instructions and tools (--tools tokens), then turns,
each with the server's answer and the result of a tool (--result tokens). Kinds of requests are counted
separately:

    grows     it begins like the previous one
    changed   one token in the middle of the tools is different (every fifth turn), such as a date
    restart   it grows, and the server was restarted before it (once, in the middle)

hotset serves with --cache-dir; llama-server (--llama) saves its slot before it is stopped, and restores it.
Measured for each kind: the share of prompt tokens that were not computed again, and the time to the first
token. Token ids are random, and the same for both servers. Prints a Markdown table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import serve_load

KINDS = ("first", "grows", "changed", "restart")
_ANSWER = 32  # tokens
_CHANGED_EVERY = 5  # turns


@dataclass
class Turn:
    """A request: its tokens, how many of them were not computed again, and the seconds to the first token."""

    n_prompt: int
    n_cached: int
    seconds: float


@dataclass
class Agent:
    """A conversation as token ids."""

    draw: random.Random
    n_tools: int
    n_result: int
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self._drawn(self.n_tools)

    def _drawn(self, n: int) -> list[int]:
        return [self.draw.randrange(100, serve_load.VOCABULARY) for _ in range(n)]

    def change_early(self) -> None:
        self.tokens[self.n_tools // 2] = self._drawn(1)[0]

    def go_on(self) -> None:
        """Add an answer and a tool's result, the same for every server."""
        self.tokens += self._drawn(_ANSWER + self.n_result)


def ask(url: str, tokens: list[int]) -> Turn:
    """Request one token. A random token may have no text; then the end of the reply gives its time."""
    body = {
        "model": serve_load.MODEL, "prompt": tokens, "max_tokens": 1, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        "cache_prompt": True, "id_slot": 0,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    first, last, began = 0.0, {}, time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                last |= json.loads(line.removeprefix(b"data: "))
    return Turn(len(tokens), _cached(last), first)


def _cached(reply: dict[str, Any]) -> int:
    """Return the number of cached prompt tokens in OpenAI's or llama-server's reply."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    found = details.get("cached_tokens", (reply.get("timings") or {}).get("cache_n"))
    if found is None:
        raise SystemExit("the server does not report how many tokens were in its cache")
    return int(found)


def slot(url: str, action: str) -> None:
    body = json.dumps({"filename": "agent.bin"}).encode()
    request = urllib.request.Request(
        f"{url}/slots/0?action={action}", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        reply.read()


def conversation(
    command: Callable[[Path], list[str]], port: int, agent: Agent, n_turns: int, *, by_slot: bool
) -> dict[str, list[Turn]]:
    """Return the turns of each kind. by_slot: the cache survives restarts only if saved with /slots."""
    found: dict[str, list[Turn]] = defaultdict(list)
    restart = n_turns // 2
    with tempfile.TemporaryDirectory() as folder:
        for part in (range(restart), range(restart, n_turns)):
            with serve_load.running(command(Path(folder)), port) as server:
                if part.start and by_slot:
                    slot(server.url, "restore")
                for i in part:
                    kind = "first" if not i else "restart" if i == restart else "grows"
                    if i and i != restart and i % _CHANGED_EVERY == 0:
                        kind = "changed"
                        agent.change_early()
                    found[kind].append(ask(server.url, agent.tokens))
                    agent.go_on()
                if not part.start and by_slot:
                    slot(server.url, "save")
    return found


def commands(args: argparse.Namespace, model: Path) -> dict[str, Callable[[Path], list[str]]]:
    def ours(folder: Path) -> list[str]:
        how = serve_load.hotset_command(model, args.port, 1, args.threads)
        return [*how, "-c", str(_context(args)), "--contexts", "2", "--cache-dir", str(folder)]

    def theirs(folder: Path) -> list[str]:
        how = serve_load.llama_command(args.llama, model, args.port, 1, args.threads)
        return [*how, "-c", str(_context(args)), "--slot-save-path", str(folder)]

    return {"hotset": ours} | ({"llama-server": theirs} if args.llama else {})


def _context(args: argparse.Namespace) -> int:
    return int(args.tools + args.turns * (_ANSWER + args.result) + _ANSWER)


def measure(args: argparse.Namespace, model: Path) -> dict[str, dict[str, dict[str, float]]]:
    turns: dict[str, dict[str, list[Turn]]] = defaultdict(lambda: defaultdict(list))
    for i in range(args.rounds):
        for name, command in commands(args, model).items():
            agent = Agent(random.Random(i), args.tools, args.result)
            found = conversation(command, args.port, agent, args.turns, by_slot=name != "hotset")
            for kind, each in found.items():
                turns[name][kind] += each
    return {
        name: {kind: _summary(kinds[kind]) for kind in KINDS if kind in kinds}
        for name, kinds in turns.items()
    }


def _summary(turns: list[Turn]) -> dict[str, float]:
    return {
        "n": len(turns),
        "reused": sum(turn.n_cached for turn in turns) / sum(turn.n_prompt for turn in turns),
        "first_token_ms": 1e3 * statistics.median(turn.seconds for turn in turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--llama", type=Path, help="bin folder of a llama.cpp build with llama-server")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tools", type=int, default=1500, help="tokens of instructions and tools")
    parser.add_argument("--result", type=int, default=64, help="tokens of a tool's result")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--port", type=int, default=18081)
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()
    peers.wait_until_quiet(args.force)
    results = {model.name: measure(args, model) for model in args.model}
    rows = [
        [
            model,
            name,
            kind,
            str(int(each["n"])),
            f"{100 * each['reused']:.1f}%",
            f"{each['first_token_ms']:.0f} ms",
        ]
        for model, servers in results.items()
        for name, kinds in servers.items()
        for kind, each in kinds.items()
    ]
    peers.print_table(
        ["model", "server", "kind", "requests", "not computed again", "first token (median)"], rows
    )
    print()
    peers.print_json("agent_traffic", machine=peers.machine(), found=results)


if __name__ == "__main__":
    main()
