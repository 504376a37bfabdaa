"""Requests over several models of one server, whose memory has room for all but one of them.

usage: python bench/serve_models.py A.gguf B.gguf C.gguf [--requests 200] [--at-once 24] [--tokens 16]

The answers to a few prompts are computed first, by each model alone. Then `hotset serve` gets the models with
a budget that lacks the smallest one, and requests in a random order, some at once. Every reply must be there,
and be its model's answer; what models have by /metrics must stay within the budget, and so must the process,
beside what it has without a model. Prints a Markdown table and one line of JSON; ends with 1 where a reply is
missing or wrong, or memory goes beyond the budget.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

import hotset
from hotset.server.slots import bytes_of

PROMPTS = ("The sky is", "Once upon a time", "In the year 2000", "A recipe for bread:")
MARGIN = 256 << 20  # of the program: connections, templates, what the allocator keeps
_GIB = 1 << 30


def expected(path: Path, settings: hotset.LoadSettings, n_tokens: int) -> tuple[int, dict[str, str]]:
    """The bytes of a model, and its answer to each prompt."""
    with hotset.load(path, settings) as model:
        made = model.generate_many(PROMPTS, temperature=0, max_tokens=n_tokens)
        return bytes_of(model), {prompt: one.text for prompt, one in zip(PROMPTS, made, strict=True)}


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=600) as reply:
        text = reply.read().decode()
    return json.loads(text) if body is not None else text


class Watch:
    """The memory of a server, looked at until it is closed."""

    def __init__(self, url: str, pid: int) -> None:
        self._url, self._process, self._ends = url, psutil.Process(pid), threading.Event()
        self.first = self.most_resident = self._process.memory_info().rss
        self.most_counted = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(0.05):
            found = re.findall(r"^hotset_model_memory_bytes\{.*\} (\S+)$", ask(f"{self._url}/metrics"), re.M)
            self.most_counted = max(self.most_counted, sum(map(float, found)))
            self.most_resident = max(self.most_resident, self._process.memory_info().rss)

    def close(self) -> None:
        self._ends.set()
        self._thread.join()


def started(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server, and where it listens."""
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if match := re.search(r"listening on (\S+)", line):
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return server, match[1]
    raise SystemExit(f"the server did not start: {' '.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--n-ctx", type=int, default=1024)
    given = parser.parse_args()
    settings = hotset.LoadSettings(backend="cpu", n_ctx=given.n_ctx, n_seqs=1)
    known = {path.stem: expected(path, settings, given.tokens) for path in given.models}
    sizes = sorted(n_bytes for n_bytes, _ in known.values())
    budget = sum(sizes[1:])
    command = [
        sys.executable, "-m", "hotset.cli.main", "serve", *map(str, given.models), "--port", "0", "--no-gpu",
        "--ctx-size", str(given.n_ctx), "--contexts", "1", "--max-memory", str((budget + 4096) / _GIB),
        "--max-queue", str(given.requests),
    ]  # fmt: skip
    server, url = started(command)
    rng = random.Random(1)
    requests = [(rng.choice(list(known)), rng.choice(PROMPTS)) for _ in range(given.requests)]
    watch = Watch(url, server.pid)

    def one(request: tuple[str, str]) -> str:
        name, prompt = request
        body = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": given.tokens}
        try:
            text = ask(f"{url}/v1/completions", body)["choices"][0]["text"]
        except (OSError, ValueError, LookupError) as error:
            return f"lost ({error})"
        return "right" if text == known[name][1][prompt] else "wrong"

    began = time.perf_counter()
    try:
        with ThreadPoolExecutor(given.at_once) as threads:
            results = list(threads.map(one, requests))
        seconds = time.perf_counter() - began
        metrics = ask(f"{url}/metrics")
    finally:
        watch.close()
        server.terminate()
        server.wait()
    loads = sum(float(n) for n in re.findall(r"^hotset_model_loads_total\{.*\} (\S+)$", metrics, re.M))
    found = {
        "requests": len(results), "right": results.count("right"), "wrong": results.count("wrong"),
        "seconds": round(seconds, 2), "loads": int(loads), "budget": budget,
        "most_counted": int(watch.most_counted), "most_resident": watch.most_resident - watch.first,
        "models": {name: n_bytes for name, (n_bytes, _) in known.items()},
    }  # fmt: skip
    print("| requests | right | wrong | loads | s | budget MB | counted MB | resident MB |")
    print("|---|---|---|---|---|---|---|---|")
    sizes_mb = [found[name] / 1e6 for name in ("budget", "most_counted", "most_resident")]
    print(
        f"| {found['requests']} | {found['right']} | {found['wrong']} | {found['loads']} | {seconds:.1f} | "
        + " | ".join(f"{size:.1f}" for size in sizes_mb) + " |"
    )  # fmt: skip
    print(json.dumps(found))
    lacking = [result for result in results if result != "right"]
    if lacking or watch.most_counted > budget + 4096 or found["most_resident"] > budget + MARGIN:
        raise SystemExit(f"not as it must be: {lacking[:3]}")


if __name__ == "__main__":
    main()
