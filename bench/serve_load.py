"""Servers under load: hotset compared with llama-server, in turn, with the same slots and requests.

usage: python bench/serve_load.py --llama BIN --model FILE [--model FILE ...] [--rounds N] [--tokens N]
       python bench/serve_load.py --model FILE --rounds 0 [--pairs N]         (what HTTP costs, nothing else)
       python bench/serve_load.py --url http://127.0.0.1:8080 [--name NAME]   (any OpenAI-compatible server)

Measures throughput at 1, 4 and 16 streams; the time to the first token of a short request, alone and during a
prompt of 4,000 tokens; and the cost of HTTP for one stream compared with the bare engine. Requests are greedy
streams of /v1/completions with random token ids as prompt, never the same twice, all with equally many
tokens. In a round each server is started, warmed up, measured and ended. For the cost of HTTP, a server and a
bare engine answer in turn, within a second of each other, and the processor time of the server's event loop
is shown too. Prints Markdown tables and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import peers

MODEL = "bench"  # its name in requests
N_CTX = 4608  # tokens of a conversation
SHORT = 30  # tokens of a prompt
VOCABULARY = 30_000  # ids are drawn below it
_START_SECONDS = 180.0
_GAP = (0.1, 0.4)  # seconds between short requests while a long prompt is read


@dataclass
class Reply:
    """A reply: the time of each piece of text, in seconds after the request, and tokens by `usage`."""

    times: list[float] = field(default_factory=list)
    n_tokens: int = 0
    seconds: float = 0.0  # until the connection was closed

    @property
    def decode_rate(self) -> float:
        """Return tokens per second after the first."""
        seconds = self.times[-1] - self.times[0]
        return (self.n_tokens - 1) / seconds if seconds > 0 else 0.0


class Client:
    """Streams of one server. It does little but read lines, because its computing slows the server."""

    def __init__(self, url: str, seed: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._draw = random.Random(seed)

    async def ask(self, n_prompt: int, n_tokens: int, *, stream: bool = True) -> Reply:
        prompt = [self._draw.randrange(100, VOCABULARY) for _ in range(n_prompt)]
        asked: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(asked).encode()
        reply, began = Reply(), time.perf_counter()
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            reason = (await reader.read()).decode()[-500:]
            raise peers.ProgramFailed(f"the server answered {status!r}: {reason}")
        last = b""
        while line := await reader.readline():  # (the sizes of HTTP chunks are separate lines)
            if line.startswith(b"data: {"):
                if b'"choices":[{' in line.replace(b" ", b""):
                    reply.times.append(time.perf_counter() - began)
                if b"completion_tokens" in line:
                    last = line
        writer.close()
        reply.seconds = time.perf_counter() - began
        usage = json.loads(last.removeprefix(b"data: "))["usage"] if last else {}
        reply.n_tokens = usage.get("completion_tokens", n_tokens)
        return reply


# -- servers ---------------------------------------------------------------------------------------


def free_port() -> int:
    """Return a port that nobody listens on. ik_llama.cpp cannot bind one that another server just left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def hotset_command(model: Path, port: int, slots: int, threads: int) -> list[str]:
    return [
        sys.executable, "-m", "hotset.cli.main", "serve", str(model), "--port", str(port), "-a", MODEL,
        "--parallel", str(slots), "-c", str(N_CTX), "--contexts", str(slots), "-t", str(threads),
    ]  # fmt: skip


def llama_command(folder: Path, model: Path, port: int, slots: int, threads: int) -> list[str]:
    program = peers.find_program(folder, "llama-server")
    return [
        str(program), "-m", str(model), "--port", str(port), "-np", str(slots),
        "-c", str(N_CTX * slots), "-t", str(threads), "-tb", str(threads),
    ]  # fmt: skip


class Running(NamedTuple):
    """A server: its address and process."""

    url: str
    pid: int


@contextmanager
def running(command: list[str], port: int) -> Iterator[Running]:
    """Start a server, and yield it once it is ready; a signal ends it."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + _START_SECONDS
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise peers.ProgramFailed(
                        f"{' '.join(command)} did not start:\n{log.read().decode()[-2000:]}"
                    )
                time.sleep(0.1)
            yield Running(url, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


# -- the measurements --------------------------------------------------------------------------------


async def throughput(client: Client, n_streams: int, n_tokens: int) -> dict[str, Any]:
    """Measure concurrent streams: total tokens per second, first token of each, gaps between pieces."""
    began = time.perf_counter()
    replies = await asyncio.gather(*(client.ask(SHORT, n_tokens) for _ in range(n_streams)))
    seconds = time.perf_counter() - began
    return {
        "rate": sum(reply.n_tokens for reply in replies) / seconds,
        "decode": [reply.decode_rate for reply in replies],
        "first": [reply.times[0] for reply in replies],
        "gaps": [float(gap) for reply in replies for gap in np.diff(reply.times)],
    }


async def short_beside_long(client: Client, n_quiet: int, n_long: int) -> dict[str, Any]:
    """Measure seconds to the first token: of short requests, alone and during a long prompt, and of that."""
    quiet = []
    for _ in range(n_quiet):
        await asyncio.sleep(0.05)
        quiet.append((await client.ask(SHORT, 2)).times[0])
    alone = (await client.ask(n_long, 2)).times[0]
    loaded, draw = [], random.Random(n_quiet)
    long = asyncio.create_task(client.ask(n_long, 2))
    while True:
        await asyncio.sleep(draw.uniform(*_GAP))
        if long.done():
            break
        reply = await client.ask(SHORT, 2)
        loaded.append(reply.times[0])  # the last request may end after the long prompt
    return {"quiet": quiet, "loaded": loaded, "long_alone": alone, "long_beside": (await long).times[0]}


async def round_of(url: str, seed: int, streams: list[int], n_tokens: int, n_long: int) -> dict[str, Any]:
    client = Client(url, seed)
    await throughput(client, max(streams), 4)  # warms up
    found: dict[str, Any] = {"streams": {n: await throughput(client, n, n_tokens) for n in streams}}
    found["ttft"] = await short_beside_long(client, 8, n_long)
    return found


# -- the cost of HTTP --------------------------------------------------------------------------------


def bare(model: str, n_tokens: int, threads: int) -> None:
    """Run the engine without a server: answer once per input line, and print how long it took."""
    import hotset

    draw = random.Random(0)
    with hotset.load(model, n_ctx=N_CTX, n_threads=threads) as loaded:
        for _ in sys.stdin:
            prompt = [draw.randrange(100, VOCABULARY) for _ in range(SHORT)]
            began = time.perf_counter()
            answer = loaded.generate(prompt, temperature=0, max_tokens=n_tokens, ignore_eos=True)
            seconds = time.perf_counter() - began
            print(json.dumps([seconds, answer.timings.predicted_per_second]), flush=True)


def loop_seconds(pid: int) -> float:
    """Return the processor time of a process's first thread, which runs the event loop; 0.0 without /proc."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def overhead(model: Path, port: int, threads: int, n_tokens: int, n_pairs: int) -> dict[str, list[float]]:
    """Measure how much longer answers take over HTTP than in the engine, n_pairs times in turn.

    decode: per token of a stream after the first; stream, whole: per answer, as shares. loop_stream,
    loop_whole: seconds of the event loop's thread per token; bare: tokens per second after the first.
    """
    found: dict[str, list[float]] = {
        key: [] for key in ("decode", "stream", "whole", "loop_stream", "loop_whole", "bare")
    }
    flags = ["--bare", str(model), "--tokens", str(n_tokens), "--threads", str(threads)]
    with (
        running(hotset_command(model, port, 16, threads), port) as server,
        subprocess.Popen(
            [sys.executable, __file__, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as engine,
    ):
        assert engine.stdin is not None
        assert engine.stdout is not None
        client = Client(server.url, 0)
        for i in range(n_pairs + 1):
            print(file=engine.stdin, flush=True)
            seconds, rate = json.loads(engine.stdout.readline())
            replies, loop = {}, {}
            for kind in ("stream", "whole") if i % 2 else ("whole", "stream"):
                before = loop_seconds(server.pid)
                replies[kind] = asyncio.run(client.ask(SHORT, n_tokens, stream=kind == "stream"))
                loop[kind] = (loop_seconds(server.pid) - before) / n_tokens
            if not i:  # the first answers warm up
                continue
            found["bare"].append(rate)
            found["decode"].append(rate / replies["stream"].decode_rate - 1)
            for kind, reply in replies.items():
                found[kind].append(reply.seconds / seconds - 1)
                found[f"loop_{kind}"].append(loop[kind])
        engine.stdin.close()
    return found


def report_overhead(found: dict[str, list[float]]) -> None:
    median = {key: statistics.median(values) for key, values in found.items()}
    loops = [f"{1e6 * median[key]:.0f} µs" for key in ("loop_stream", "loop_whole")]
    print(
        f"\nOne stream over HTTP against the bare engine ({median['bare']:.1f} t/s, {len(found['bare'])} "
        f"pairs): a token takes {median['decode']:.1%} longer, a streamed answer {median['stream']:.1%}, one "
        f"in one piece {median['whole']:.1%}; the event loop computes {loops[0]} for a token of a stream, "
        f"{loops[1]} for one of the other."
    )


# -- tables ------------------------------------------------------------------------------------------


def percentiles(seconds: list[float]) -> str:
    if not seconds:
        return ""
    return f"{1e3 * np.percentile(seconds, 50):.0f} / {1e3 * np.percentile(seconds, 99):.0f}"


def pooled(rounds: list[dict[str, Any]], *keys: Any) -> list[float]:
    values: list[float] = []
    for each in rounds:
        found: Any = each
        for key in keys:
            found = found[key]
        values += found if isinstance(found, list) else [found]
    return values


def report(title: str, results: dict[str, list[dict[str, Any]]], streams: list[int], n_long: int) -> None:
    names = list(results)
    rows = []
    for n in streams:
        for name in names:
            rates = pooled(results[name], "streams", n, "rate")
            single = pooled(results[name], "streams", streams[0], "rate")
            other = pooled(results[names[-1]], "streams", n, "rate")
            scale = statistics.median(a / b for a, b in zip(rates, single, strict=True))
            ratio = statistics.median(a / b for a, b in zip(rates, other, strict=True))
            rows.append(
                [
                    str(n), name, f"{statistics.median(rates):.1f}", f"{scale:.2f}×",
                    "" if name == names[-1] else f"{ratio:.2f}×",
                    percentiles(pooled(results[name], "streams", n, "first")),
                    percentiles(pooled(results[name], "streams", n, "gaps")),
                ]
            )  # fmt: skip
    print(f"\n{title}\n")
    headers = ["streams", "server", "tokens/s of all", f"÷ {streams[0]} stream", f"÷ {names[-1]}"]
    peers.print_table([*headers, "first token, ms p50 / p99", "gap, ms p50 / p99"], rows)
    rows = []
    for name in names:
        quiet, loaded = (pooled(results[name], "ttft", key) for key in ("quiet", "loaded"))
        alone, beside = (
            statistics.median(pooled(results[name], "ttft", f"long_{how}")) for how in ("alone", "beside")
        )
        times = float(np.percentile(loaded, 50) / np.percentile(quiet, 50)) if loaded else 0.0
        rows.append(
            [
                name, percentiles(quiet), percentiles(loaded), f"{times:.2f}×",
                f"{alone:.2f} s", f"{beside:.2f} s ({len(loaded)} short ones)",
            ]
        )  # fmt: skip
    print(f"\nFirst token of a short request ({SHORT} tokens), ms p50 / p99\n")
    headers = ["server", "quiet", f"while {n_long} are read", "loaded ÷ quiet"]
    peers.print_table([*headers, f"{n_long} tokens alone", "beside short ones"], rows)


def brief(found: Any) -> Any:
    """Replace long lists of seconds in the results by percentiles."""
    if isinstance(found, dict):
        return {key: brief(value) for key, value in found.items()}
    if not isinstance(found, list):
        return found
    if len(found) <= 16 or not isinstance(found[0], float):
        return [brief(value) for value in found]
    return {"n": len(found)} | {f"p{p}": float(np.percentile(found, p)) for p in (50, 90, 99)}


def measure(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    slots = max(args.streams)
    commands = {"hotset": hotset_command(model, args.port, slots, args.threads)}
    if args.llama:
        commands["llama-server"] = llama_command(args.llama, model, args.port, slots, args.threads)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    disturbed: list[float] = []
    for i in range(args.rounds):
        for name, command in commands.items():
            with peers.Others() as others, running(command, args.port) as server:
                asked = args.streams, args.tokens, args.long
                results[name].append(asyncio.run(round_of(server.url, i, *asked)))
            disturbed.append(others.cores)
    if args.rounds:
        title = f"{model.name}, {args.rounds} rounds, {args.tokens} tokens an answer"
        report(title, results, args.streams, args.long)
    overheads: dict[str, list[float]] = {}
    if args.pairs:
        with peers.Others() as others:
            overheads = overhead(model, args.port, args.threads, args.tokens, args.pairs)
        disturbed.append(others.cores)
        report_overhead(overheads)
    print(f"Others used {statistics.median(disturbed):.2f} cores, {max(disturbed):.2f} at most.")
    return {"results": results, "overheads": overheads, "others": disturbed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--llama", type=Path, help="bin folder of a llama.cpp build with llama-server")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=8, help="answers with and without HTTP, in turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        bare(args.bare, args.tokens, args.threads)
        return
    if not args.model and not args.url:
        sys.exit("Give the file of a model, or the address of a server.")
    peers.wait_until_quiet(args.force)
    found: dict[str, Any] = {}
    if args.url:
        asked = args.streams, args.tokens, args.long
        rounds = [asyncio.run(round_of(args.url, i, *asked)) for i in range(args.rounds)]
        report(f"{args.url}, {args.rounds} rounds", {"server": rounds}, args.streams, args.long)
        found[args.url] = rounds
    for model in args.model:
        found[model.name] = measure(args, model)
    print()
    peers.print_json("serve_load", machine=peers.machine(), found=brief(found))


if __name__ == "__main__":
    main()
