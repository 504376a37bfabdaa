"""Clients that ask, leave, drip, flood and send garbage, all at once, to their own `hotset serve`.

usage: python tests/fuzz/fuzz_server.py [--seconds 60] [--disconnects 0] [--seed 0] [--clients 12]

The server is a process with a tiny model, four slots and a short queue. One of its steps in 400 fails. Every
complete answer must equal the model's answer to a single request, and a client gets an error status only for
its own fault, a full server or a failed step. Afterwards no block, answer, thread or handle is left, memory
is as after the first storm (a quarter of the time), and the next answer is right. SIGTERM lets a
running stream finish. The storm lasts --seconds, and until --disconnects clients have left in the middle. The
exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

if __name__ == "__main__":  # as pytest does for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("support", "")]

from tiny_server import events_of, text_of, write_model

import hotset

CHAT = "/v1/chat/completions"
N_CTX, PLACES, QUEUE = 1024, 4, 8
FAILS_ONE_IN = 400  # steps
MAX_BODY = 4 << 20
GROWTH = 24 << 20  # bytes that the allocator may keep after a storm larger than the first


@dataclass(frozen=True)
class Question:
    """A request body, and the model's answers to it as the only request."""

    body: dict[str, Any]
    texts: tuple[str, ...]


def questions(path: Path, draw: random.Random) -> list[Question]:
    found = []
    with hotset.load(path, device="cpu", n_threads=1, n_ctx=N_CTX) as model:
        for i in range(12):
            messages = [
                {"role": "user", "content": "".join(draw.choices("abc xyz", k=draw.choice([3, 40, 300])))}
            ]
            params: dict[str, Any] = {"max_tokens": draw.choice([1, 8, 30]), "ignore_eos": True}
            params |= {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": draw.randrange(2**40)}
            n = 1 if "seed" not in params else draw.choice([1, 2])
            seeds = [{"seed": params["seed"] + j} if "seed" in params else {} for j in range(n)]
            texts = tuple(model.chat(messages, **params | seed).content for seed in seeds)
            found.append(Question({"model": "tiny", "messages": messages, "n": n} | params, texts))
    return found


@dataclass
class Storm:
    """Clients in threads, until all of them have done enough. problems: unexpected results."""

    port: int
    questions: list[Question]
    problems: list[str] = field(default_factory=list)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)

    def rage(self, seed: int, n_clients: int, more: Callable[[], bool]) -> None:
        def client(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            deeds = (self.ask, self.stream, self.leave, self.leave, self.drip, self.mangle, self.flood)
            while more() and len(self.problems) < 20:
                deed = draw.choice(deeds)
                try:
                    deed(draw)
                except Exception as error:
                    self.problems.append(f"{deed.__name__}: {type(error).__name__}: {error}")

        threads = [threading.Thread(target=client, args=(i,)) for i in range(n_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # ---- actions of a client

    def ask(self, draw: random.Random) -> None:
        self.put(draw.choice(self.questions))

    def put(self, question: Question) -> None:
        status, headers, text = self.request("POST", CHAT, json.dumps(question.body))
        if self._is_excused(status, headers, text):
            return
        choices = json.loads(text)["choices"] if status == 200 else []
        found = {choice["index"]: choice["message"]["content"] for choice in choices}
        self.check("answers", found == dict(enumerate(question.texts)), f"{status} {text[:300]}")

    def stream(self, draw: random.Random) -> None:
        question = draw.choice(self.questions)
        status, headers, text = self.request("POST", CHAT, json.dumps(question.body | {"stream": True}))
        if self._is_excused(status, headers, text):
            return
        events, done = events_of(text)
        if events and "error" in events[-1] and "RuntimeError" in str(events.pop()):
            right = all(one.startswith(text_of(events, i)) for i, one in enumerate(question.texts))
            self.check("streams that failed", right and not done, text[-300:])
            return
        right = done and all(text_of(events, i) == one for i, one in enumerate(question.texts))
        self.check("streams", right, f"{status} {text[-300:]}")

    def leave(self, draw: random.Random) -> None:
        """Disconnect at any time between the first byte of a request and the last byte of its answer."""
        content = "".join(draw.choices("abc ", k=draw.choice([2, 100, 600])))
        body = {
            "model": "tiny", "messages": [{"role": "user", "content": content}], "ignore_eos": True,
            "n": draw.choice([1, 1, 3]),
        }  # fmt: skip
        sent = self.bytes_of(body | {"stream": draw.random() < 0.5})
        with self.connection() as connection:
            how = draw.choice(["half", "at once", "soon", "later"])
            connection.sendall(sent[: draw.randrange(1, len(sent))] if how == "half" else sent)
            if how == "soon":
                time.sleep(draw.random() * 0.05)
            elif how == "later":
                connection.settimeout(0.5)
                with contextlib.suppress(TimeoutError):
                    for _ in range(draw.randrange(1, 8)):
                        connection.recv(200)
            if draw.random() < 0.5:  # a reset in place of a proper end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.counts["disconnects"] += 1

    def drip(self, draw: random.Random) -> None:
        """Read or write a few bytes at a time, and leave in the end."""
        question = draw.choice(self.questions)
        sent = self.bytes_of(question.body | {"stream": True, "logprobs": True, "top_logprobs": 20})
        with self.connection() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            if draw.random() < 0.5:
                for i in range(0, len(sent), step := draw.randrange(20, 200)):
                    connection.sendall(sent[i : i + step])
                    time.sleep(0.002)
            else:
                connection.sendall(sent)
            with contextlib.suppress(ConnectionError):
                for _ in range(draw.randrange(1, 20)):
                    connection.recv(30)
                    time.sleep(0.02)
        self.counts["slow clients"] += 1

    def mangle(self, draw: random.Random) -> None:
        """Send garbage or a request that the server must refuse."""
        body = json.dumps(draw.choice(self.questions).body)
        kind = draw.choice(
            ["bytes", "bits", "large", "chunks", "deep", "parameter", "path", "method", "host"]
        )
        if kind == "bytes":
            with self.connection() as connection, contextlib.suppress(ConnectionError):
                connection.sendall(
                    draw.choice([draw.randbytes(2000), b"GET\r\n\r\n", b"POST / HTTP/9\r\n\r\n", b"\n" * 9])
                )
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1000)
        elif kind == "bits":
            data = bytearray(body.encode())
            for _ in range(draw.randrange(1, 6)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            self.refused(kind, (200, 400, 404, 429, 500), "POST", CHAT, bytes(data))  # 404: the name
        elif kind == "large":
            self.refused(kind, (413,), "POST", CHAT, f'{{"prompt": "{"x" * MAX_BODY}"}}')
        elif kind == "chunks":  # a body of unstated size
            self.refused(kind, (413,), "POST", CHAT, iter([b"[" + b" " * 100_000] * 50))
        elif kind == "deep":
            self.refused(kind, (400,), "POST", CHAT, "[" * draw.choice([65, 10**5]))
        elif kind == "parameter":
            wrong = draw.choice(
                [{"n": 10**9}, {"temperature": "hot"}, {"messages": 3}, {"grammars": 1}, {"seed": -(2**70)}]
            )
            self.refused(kind, (400,), "POST", CHAT, json.dumps(json.loads(body) | wrong))
        elif kind == "path":
            self.refused(kind, (404,), "POST", draw.choice(["/v2/chat", "/%00", "/../etc/passwd"]), body)
        elif kind == "method":
            self.refused(kind, (405,), "DELETE", CHAT)
        else:
            self.refused(kind, (403,), "POST", CHAT, body, {"Host": "evil.example"})

    def flood(self, draw: random.Random) -> None:
        """Send more requests at once than fit: the server refuses some and answers the others."""
        asked = [draw.choice(self.questions) for _ in range(PLACES + QUEUE)]
        threads = [threading.Thread(target=self.ask, args=(question,)) for question in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.counts["floods"] += 1

    # ---- HTTP

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def bytes_of(self, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        return (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            + content
        )

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was refused early
                connection.request(method, path, body, headers or {})
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read().decode()

    def refused(
        self, kind: str, statuses: tuple[int, ...], method: str, path: str, body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Check that the status is one of these, and that a failed step (500) gives its reason."""
        try:
            status, _, text = self.request(method, path, body, headers)
        except (ConnectionError, http.client.BadStatusLine):
            if 413 not in statuses:  # the answer may be lost if the server did not read the whole body
                raise
            status, text = 413, ""
        right = status in statuses and (status != 500 or "RuntimeError" in text)
        self.check(f"refused: {kind}", right, f"{status} {text[:300]}")

    def _is_excused(self, status: int, headers: dict[str, str], text: str) -> bool:
        if status == 429:
            self.check(
                "told to come again",
                int(headers.get("Retry-After", headers.get("retry-after", "0"))) > 0,
                text,
            )
        elif status == 500:
            self.check("answers that failed", "RuntimeError" in text and "burst" not in text, text)
        return status in (429, 500)

    def check(self, what: str, right: bool, detail: str) -> None:
        self.counts[what] += 1
        if not right:
            self.problems.append(f"{what}: {detail}")


# ---- the server ----


@contextlib.contextmanager
def server(path: Path, seed: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `hotset serve` by this file, so that its steps can fail. Yield the process and the port."""
    options = [
        "--port", "0", "-a", "tiny", "-t", "2", "-c", str(N_CTX), "-np", str(PLACES), "--max-queue",
        str(QUEUE),
    ]  # fmt: skip
    command = [sys.executable, __file__, "--serve", str(seed), "serve", str(path), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        port = None
        while port is None and (line := process.stderr.readline()):
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            port = int(found[1]) if found else None
        assert port is not None, "the server has ended"
        threading.Thread(target=collections.deque, args=(process.stderr, 0), daemon=True).start()
        yield process, port
    finally:
        process.kill()
        process.wait()


def serve(seed: int, arguments: list[str]) -> None:
    """Run `hotset` with these arguments, and let some steps fail until SIGUSR1 arrives."""
    from hotset.backends.cpu.backend import CpuBackend
    from hotset.cli.main import main

    draw, step, fails = random.Random(seed), CpuBackend.step, [True]

    def failing(self: CpuBackend, batch: Any) -> Any:
        if fails[0] and draw.randrange(FAILS_ONE_IN) == 0:
            raise RuntimeError("the step burst")
        return step(self, batch)

    CpuBackend.step = failing  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: fails.clear() or fails.append(False))
    sys.argv = ["hotset", *arguments]
    main()


def settled(storm: Storm, process: psutil.Process) -> dict[str, float]:
    """Wait until nothing runs, and return the resources that the server holds."""
    end = time.monotonic() + 60
    busy = (
        "hotset_answers_open", "hotset_sequences_running", "hotset_sequences_waiting",
        "hotset_cache_blocks_used",
    )  # fmt: skip
    while True:
        text = storm.request("GET", "/metrics")[2]
        values = {
            name: float(value) for name, value in re.findall(r"^(\w+) ([\d.e+-]+)$", text, re.MULTILINE)
        }
        held = {name: values[name] for name in busy}
        if not any(held.values()) or time.monotonic() > end:
            break
        time.sleep(0.1)
    time.sleep(2)  # connections that were left, and the engine's thread, take a moment
    return held | {
        "file handles": process.num_fds(),
        "threads": process.num_threads(),
        "memory": process.memory_info().rss,
    }


def last_stream(storm: Storm, process: subprocess.Popen[str]) -> None:
    """Stream to the end of the context, and send SIGTERM to the server in the middle."""
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    with storm.connection() as connection:
        connection.sendall(storm.bytes_of(body))
        received = connection.recv(2000)
        process.send_signal(signal.SIGTERM)
        while data := connection.recv(1 << 16):
            received += data
    lines = [
        line for line in received.decode().replace("\r\n", "\n").split("\n") if line.startswith("data: ")
    ]
    events, done = events_of("\n".join(lines))
    reason = events[-1]["choices"][0]["finish_reason"] if events and events[-1].get("choices") else None
    storm.check("SIGTERM in a stream", done and reason == "length", "\n".join(lines[-3:]))
    storm.check("exit status", process.wait(60) == 0, str(process.returncode))


def main() -> int:
    if "--serve" in sys.argv[1:2]:
        serve(int(sys.argv[2]), sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--disconnects", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOTSET_HOME"] = f"{folder}/home"
        path = write_model(Path(folder) / "tiny.gguf", **{"llama.context_length": N_CTX})
        asked = questions(path, random.Random(args.seed))
        with server(path, args.seed) as (process, port):
            storm, seen = Storm(port, asked), psutil.Process(process.pid)
            while storm.request("GET", "/health")[0] != 200:
                time.sleep(0.05)
            first = time.monotonic() + args.seconds / 4
            storm.rage(args.seed, args.clients, lambda: time.monotonic() < first)
            before = settled(storm, seen)
            end = time.monotonic() + args.seconds
            storm.rage(
                args.seed + 1, args.clients,
                lambda: time.monotonic() < end or storm.counts["disconnects"] < args.disconnects,
            )  # fmt: skip
            after = settled(storm, seen)
            for name, value in after.items():
                grown = {"memory": GROWTH, "threads": 1}.get(name, 0)  # the engine's thread comes and goes
                storm.check(
                    "what is left", value <= before[name] + grown, f"{name}: {before[name]} -> {value}"
                )
            process.send_signal(signal.SIGUSR1)
            for question in asked:
                storm.put(question)
            last_stream(storm, process)
    print(", ".join(f"{n} {what}" for what, n in sorted(storm.counts.items())))
    print("; ".join(f"{name} {before[name]:.0f} -> {after[name]:.0f}" for name in after))
    for problem in storm.problems:
        print(problem, file=sys.stderr)
    print(f"{len(storm.problems)} problems")
    return 1 if storm.problems else 0


if __name__ == "__main__":
    sys.exit(main())
