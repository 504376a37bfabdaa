"""Requests to several models of one server, with a memory budget for all but one of them.

usage: python bench/serve_models.py A.gguf B.gguf C.gguf [--requests 200] [--at-once 24] [--kills 2]

First each model alone computes the answers to a few prompts. Then `hotset serve` serves all models with a
budget without room for the smallest one, and gets requests in random order, some at once. Every reply must
arrive and be its model's answer. The models' bytes in /metrics must stay within the budget, and so must the
process, apart from its memory without models.

With --kills the prompt cache is on disk, and the server is killed this often during requests and started
again with the same cache. Lost requests are sent again, as clients do; their answers must be the same, and
prompts must be found on disk.

Prints a Markdown table and one line of JSON. The exit code is 1 if a reply is missing or wrong, memory
exceeds the budget, or nothing came from the cache of a killed server.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import psutil

import hotset
from hotset.server.slots import bytes_of

_TEXT = (Path(__file__).parents[1] / "docs/guides/serve.md").read_text()
PROMPTS = tuple(_TEXT[start : start + 600] for start in range(0, 2400, 600))  # some blocks of the cache each
MARGIN = 256 << 20  # for the program: connections, templates, freed memory that the allocator keeps
_GIB = 1 << 30
Known = dict[str, tuple[int, dict[str, str]]]  # for each model: its bytes, its answer to each prompt


def expected(path: Path, settings: hotset.LoadSettings, n_tokens: int) -> tuple[int, dict[str, str]]:
    """Return the bytes of a model, and its answer to each prompt."""
    with hotset.load(path, settings) as model:
        made = model.generate_many(PROMPTS, temperature=0, max_tokens=n_tokens)
        return bytes_of(model), {prompt: one.text for prompt, one in zip(PROMPTS, made, strict=True)}


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=600) as reply:
        text = reply.read().decode()
    return json.loads(text) if body is not None else text


class Server:
    """A server that may be killed and restarted, whose memory and counters are recorded."""

    def __init__(self, command: list[str]) -> None:
        self._command, self._changes = command, threading.Condition()
        self.n_starts = self.most_resident = 0
        self.most_counted = 0.0
        self.counted: dict[str, float] = {}  # sum over all starts; of killed ones, the last values
        self._start()

    def _start(self) -> None:
        self._process, self.url = started(self._command)
        self._first = psutil.Process(self._process.pid).memory_info().rss
        self._ends, self._latest = threading.Event(), ""
        self._thread = threading.Thread(target=self._watch, args=(self._process.pid, self.url))
        self._thread.start()
        with self._changes:
            self.n_starts += 1
            self._changes.notify_all()

    def _watch(self, pid: int, url: str) -> None:
        while not self._ends.wait(0.05):
            try:
                self._latest = ask(f"{url}/metrics")
                resident = psutil.Process(pid).memory_info().rss - self._first
            except (OSError, HTTPException, psutil.NoSuchProcess):
                return  # it was killed
            found = _values(self._latest, "hotset_model_memory_bytes")
            self.most_counted = max(self.most_counted, sum(found))
            self.most_resident = max(self.most_resident, resident)

    def ask(self, body: dict[str, Any]) -> tuple[Any, int]:
        """Return a reply, and the number of requests: a killed server needs another one."""
        n_asked = 0
        while True:
            n_starts, n_asked = self.n_starts, n_asked + 1
            try:
                return ask(f"{self.url}/v1/completions", body), n_asked
            except (OSError, HTTPException):  # the reply was interrupted, or did not start
                with self._changes:
                    if not self._changes.wait_for(lambda since=n_starts: self.n_starts > since, 60):
                        raise

    def end(self, signal: int) -> None:
        if signal != SIGKILL:
            self._latest = ask(f"{self.url}/metrics")
        self._ends.set()
        self._process.send_signal(signal)
        self._process.wait()
        self._thread.join()
        for name in ("hotset_model_loads_total", "hotset_restored_prompt_tokens_total",
                     "hotset_prompt_cache_blocks_damaged_total"):  # fmt: skip
            self.counted[name] = self.counted.get(name, 0) + sum(_values(self._latest, name))

    def kill(self) -> None:
        self.end(SIGKILL)
        self._start()


def _values(metrics: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.M)]


def started(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return it and its address."""
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if match := re.search(r"listening on (\S+)", line):
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return server, match[1]
    raise SystemExit(f"the server did not start: {' '.join(command)}")


def play(
    server: Server, requests: list[tuple[str, str]], known: Known, given: argparse.Namespace
) -> list[str]:
    """Return the result of each request."""
    answered = threading.Semaphore(0)

    def one(request: tuple[str, str]) -> str:
        name, prompt = request
        body = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": given.tokens}
        try:
            reply, n_asked = server.ask(body)
            text = reply["choices"][0]["text"]
        except (OSError, HTTPException, ValueError, LookupError) as error:
            return f"lost ({error})"
        finally:
            answered.release()
        return ("right" if n_asked == 1 else "right again") if text == known[name][1][prompt] else "wrong"

    with ThreadPoolExecutor(given.at_once) as threads:
        results = [threads.submit(one, request) for request in requests]
        for _ in range(given.kills):
            for _ in range(len(requests) // (given.kills + 1)):
                answered.acquire()
            server.kill()
        return [result.result() for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--n-ctx", type=int, default=1024)
    parser.add_argument("--kills", type=int, default=0)
    given = parser.parse_args()
    settings = hotset.LoadSettings(device="cpu", n_ctx=given.n_ctx, n_seqs=1)
    known = {path.stem: expected(path, settings, given.tokens) for path in given.models}
    sizes = sorted(n_bytes for n_bytes, _ in known.values())
    budget = sum(sizes[1:])
    command = [
        sys.executable, "-m", "hotset.cli.main", "serve", *map(str, given.models), "--port", "0",
        "--device", "cpu",
        "--ctx-size", str(given.n_ctx), "--contexts", "1", "--max-memory", str((budget + 4096) / _GIB),
        "--max-queue", str(given.requests),
    ]  # fmt: skip
    rng = random.Random(1)
    requests = [(rng.choice(list(known)), rng.choice(PROMPTS)) for _ in range(given.requests)]
    with tempfile.TemporaryDirectory() as folder:
        if given.kills:
            command += ["--cache-dir", folder, "--cache-disk", "1"]
        server = Server(command)
        began = time.perf_counter()
        try:
            results = play(server, requests, known, given)
            seconds = time.perf_counter() - began
        finally:
            server.end(SIGTERM)
    counts = {kind: results.count(kind) for kind in ("right", "right again", "wrong")}
    loads, restored, damaged = map(int, server.counted.values())
    found = {
        "requests": len(results), **counts, "seconds": round(seconds, 2), "kills": given.kills,
        "loads": loads, "tokens_from_disk": restored, "damaged_blocks": damaged, "budget": budget,
        "most_counted": int(server.most_counted), "most_resident": server.most_resident,
        "models": {name: n_bytes for name, (n_bytes, _) in known.items()},
    }  # fmt: skip
    print("| requests | right | right, asked again | wrong | kills | loads | tokens from disk | s | "
          "budget MB | counted MB | resident MB |")  # fmt: skip
    print("|" + "---|" * 11)
    sizes_mb = [found[name] / 1e6 for name in ("budget", "most_counted", "most_resident")]
    print(
        f"| {len(results)} | " + " | ".join(map(str, counts.values()))
        + f" | {given.kills} | {loads} | {restored} | {seconds:.1f} | "
        + " | ".join(f"{size:.1f}" for size in sizes_mb) + " |"
    )  # fmt: skip
    print(json.dumps(found))
    lacking = [result for result in results if not result.startswith("right")]
    within = server.most_counted <= budget + 4096 and server.most_resident <= budget + MARGIN
    if lacking or not within or (given.kills and not restored):
        raise SystemExit(f"missing or wrong: {lacking[:3]}")


if __name__ == "__main__":
    main()
