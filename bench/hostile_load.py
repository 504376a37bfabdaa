"""How much do the worst requests of one client affect another: its stream, /health, and the server's memory?

usage: python bench/hostile_load.py --model FILE [--only NAME,NAME] [--seconds N] [--at-once N]

Starts a server with a key for each of four clients. One streams an answer. The others, in a separate process,
send requests of one kind, several at once, for some seconds: the largest bodies that a server accepts (4 MB),
and those that cost most per byte, some of them accepted, some refused. Meanwhile /health is read every 20 ms.
For each kind it prints the longest gap between two pieces of the stream, the mean engine step, the slowest
/health, the additional memory, and the statuses of the replies. The control is the longest gap in the seconds
before each kind, which the machine causes without other requests. The first line is the server without the
other clients.

Limits: a gap stays under 250 ms, or under two engine steps if these take longer; /health answers within
100 ms. They apply to a quiet machine; the load average is printed. Prints a Markdown table and one line of
JSON. All kinds together take less than six minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import peers
import psutil
import serve_load

from hotset.storage import created

BODY_BYTES = 32 << 20  # the largest that a server takes
STREAM_KEY = "key-of-the-stream"
HOSTILE_KEYS = [f"key-of-the-hostile-{i}" for i in range(3)]
_CONTROL_SECONDS = 3.0  # of the stream without other requests, before each kind
_HEALTH_SECONDS = 0.02  # between two looks at /health
_REPLY_SECONDS = 20.0  # for which a reply is waited for
GAP_SECONDS, HEALTH_SECONDS = 0.25, 0.1  # the limits

MODEL = serve_load.MODEL  # its name in requests
Request = tuple[str, bytes]  # path, body


# -- the requests ------------------------------------------------------------------------------------


def _json(path: str, **fields: Any) -> Request:
    return path, json.dumps({"model": MODEL} | fields).encode()


def _filled(path: str, head: str, piece: str, tail: str, most: int | None = None) -> Request:
    """Return a JSON body with at most `most` pieces between commas, or as many as fit."""
    head = f'{{"model":"{MODEL}",{head[1:]}'
    n = (BODY_BYTES - 100 - len(head) - len(tail)) // (len(piece.encode()) + 1)
    return path, (head + ",".join([piece] * min(n, most or n)) + tail).encode()


def _texts(n_chars: int) -> list[str]:
    """Return texts that are hard for tokenizers: a long word, spaces, digits, signs, multi-byte letters."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 12)))
        for _ in range(n_chars // 7)
    ]
    return [
        "a" * n_chars, " " * n_chars, " ".join(words)[:n_chars], "1" * n_chars, "{[(!" * (n_chars // 4),
        "\u00e9" * (n_chars // 2), "\U0001f600" * (n_chars // 4), "<|im_start|>" * (n_chars // 12),
    ]  # fmt: skip


def _tokenize() -> Iterator[Request]:
    for text in _texts(1 << 20):  # the longest that is accepted
        yield _json("/tokenize", content=text)
        yield _json("/tokenize", prompt=text, with_pieces=True, return_token_strs=True)


def _long_texts() -> Iterator[Request]:
    for text in _texts(BODY_BYTES - 1000):
        yield "/tokenize", json.dumps({"content": text}, ensure_ascii=False).encode()[: BODY_BYTES - 1]
        yield _json("/v1/completions", prompt=text, max_tokens=1)
        yield _json("/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=1)
        yield _json("/infill", input_prefix=text, input_suffix=text)
        yield _json("/v1/embeddings", input=text)
        yield _json("/tokenize", messages=[{"role": "user", "content": text}])


def _prompts() -> Iterator[Request]:
    """Yield prompts and answers that fill the context, with the most logprobs."""
    text = _texts(8000)[2]
    yield _json("/v1/completions", prompt=text, max_tokens=1, echo=True, logprobs=20)
    yield _json("/v1/completions", prompt=text, n=4, max_tokens=64, logprobs=20, cache_prompt=False)
    many = {"temperature": 1.5, "top_p": 1, "top_k": 0, "repeat_penalty": 1.3, "repeat_last_n": -1}
    yield _json("/v1/completions", prompt="a", n=4, max_tokens=512, ignore_eos=True, logprobs=20, **many)
    yield _json("/v1/completions", prompt="a", n=16, max_tokens=512, ignore_eos=True, logprobs=20)
    yield _json("/v1/completions", prompt=[text[:4000]] * 16, max_tokens=2)
    stops = ["".join(random.Random(i).choices("ab", k=1000)) for i in range(16)]
    biases = {str(i): 0.1 for i in range(4000)}
    yield _json("/v1/completions", prompt="a", stop=stops, logit_bias=biases, max_tokens=256, n=4)


def _embeddings() -> Iterator[Request]:
    yield _json("/v1/embeddings", input=["a"] * 2048)
    yield _json("/v1/embeddings", input=[_texts(1900)[2]] * 2048, encoding_format="base64")
    yield _json("/v1/embeddings", input=[[1]] * 2048)
    yield _json("/v1/embeddings", input=["a"] * 60_000)


def _rerank() -> Iterator[Request]:
    """Yield documents that each follow the query, so that the tokens are limited, not only the bytes."""
    yield _json("/v1/rerank", query="q" * 1900, documents=["a"] * 2048)
    yield _json("/v1/rerank", query=_texts(1 << 20)[2], documents=["a"] * 2048)
    yield _json("/v2/rerank", query="q", documents=["a" * 1900] * 2048, max_tokens_per_doc=1)
    yield _json("/api/embed", input=["a" * 1900] * 2048)


def _tools() -> Iterator[Request]:
    draw = random.Random(1)

    def tool(i: int) -> dict[str, Any]:
        properties = {f"p{j}": {"type": "string", "description": "x" * 50} for j in range(3)}
        function = {
            "name": f"f{i}-{draw.random()}",
            "parameters": {"type": "object", "properties": properties},
        }
        return {"type": "function", "function": function}

    tools = [tool(i) for i in range(1150)]
    messages = [{"role": "user", "content": "a"}]
    yield _json("/v1/chat/completions", messages=messages, tools=tools, max_tokens=1)
    yield _json("/v1/chat/completions", messages=messages, tools=tools, tool_choice="required", max_tokens=1)
    yield _json("/tokenize", messages=messages, tools=tools)
    anthropic = [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(4000)]
    yield _json("/v1/messages", messages=messages, tools=anthropic, max_tokens=1)
    yield _filled("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"tools":[', "{}", "]}")


def _deep() -> Iterator[Request]:
    deep, n_lists = "[" * 60 + "]" * 60, 8_000  # the limit is 8,192
    for name in ("chat_template_kwargs", "prediction", "json_schema"):
        head = f'{{"messages":[{{"role":"user","content":"a"}}],"max_tokens":1,"{name}":{{"a":['
        yield _filled("/v1/chat/completions", head, deep, "]}}")
        yield _filled("/v1/chat/completions", head, deep, "]}}", n_lists // 60)
    yield "/v1/chat/completions", b"[" * (BODY_BYTES - 1)
    yield "/v1/chat/completions", b'{"a":' * ((BODY_BYTES - 1) // 5)
    for most in (None, 8_000):
        yield _filled("/v1/chat/completions", '{"messages":[', '{"role":"user","content":"a"}', "]}", most)
        parts = '{"messages":[{"role":"user","content":['
        yield _filled("/v1/chat/completions", parts, '{"type":"text","text":"a"}', "]}]}", most)
        parts = '{"max_tokens":1,' + parts[1:]
        yield _filled("/v1/messages", parts, '{"type":"text","text":"a"}', "]}]}", most)


def _arrays() -> Iterator[Request]:
    for piece in ("1", "1.5", "[]", "{}", '"a"', "null", "1e400", "-0", '"\\ud800"'):
        yield _filled("/v1/completions", '{"prompt":[', piece, "]}")
        yield _filled("/detokenize", '{"tokens":[', piece, "]}")
        yield _filled("/v1/embeddings", '{"input":[', piece, "]}")
        yield _filled("/v1/chat/completions", '{"messages":[', piece, "]}")
        yield _filled("/v1/responses", '{"input":[', piece, "]}")
        yield _filled("/v1/completions", '{"prompt":"a","stop":[', piece, "]}")
        yield _filled("/v1/completions", '{"prompt":"a","metadata":{"a":[', piece, "]}}")
    keys = ",".join(f'"k{i}":1' for i in range(60_000))
    for path in ("/v1/completions", "/v1/messages", "/api/chat", "/api/show", "/tokenize"):
        yield path, f"{{{keys}}}".encode()
    yield "/v1/completions", f'{{"prompt":"a","logit_bias":{{{keys}}}}}'.encode()
    yield "/v1/completions", b'{"prompt":"a","max_tokens":1' + b"0" * 4_000_000 + b"}"


def _detokenize() -> Iterator[Request]:
    for id in range(1000, 1008):
        yield _filled("/detokenize", '{"tokens":[', str(id), "]}", 500_000)
        yield _filled("/detokenize", '{"tokens":[', str(id), "]}", 50_000)


def _grammars() -> Iterator[Request]:
    """Yield grammars that are slow to compile or to mask; each is new, so that none is cached."""
    draw = random.Random(2)
    while True:
        n = draw.randrange(10**9)
        yield _json("/v1/completions", prompt="a", max_tokens=32, regex=f"{n}|(a|b)*a(a|b){{18}}")
        yield _json("/v1/completions", prompt="a", max_tokens=32, regex=f"([^{n}]{{1,400}} ){{1,400}}")
        properties = {f"p{n}{i}": {"type": "string", "maxLength": i + 1} for i in range(3000)}
        yield _json("/v1/completions", prompt="a", max_tokens=32, json_schema={"properties": properties})
        enum = [f"{n}{i}{draw.random()}" for i in range(8000)]
        yield _json("/v1/completions", prompt="a", max_tokens=32, json_schema={"enum": enum})
        lark = f'start: e\ne: e e | "a" | "b{n}" | /[a-z ]+/ | e "," e e'
        yield _json("/v1/completions", prompt="a", max_tokens=64, grammar=lark)
        lark = f"start: a\na: (b | c)*\nb: /(.|\\n){{0,300}}x{n}/\nc: /([a-z]*[0-9]*){{0,60}}/"
        yield _json("/v1/completions", prompt="a", max_tokens=64, grammar=lark)


def _answers(**fields: Any) -> Request:
    most = {"max_tokens": 256, "ignore_eos": True, "top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1}
    return _json("/v1/completions", prompt="a", **most | fields)


# Samplers that read the whole vocabulary, for as many sequences as possible.


def _typical() -> Iterator[Request]:
    yield _answers(n=15, typical_p=0.9)


def _many_samplers() -> Iterator[Request]:
    many = {"xtc_probability": 1, "xtc_threshold": 0.01, "dry_multiplier": 0.8, "dynatemp_range": 0.5}
    yield _answers(n=15, **many)
    yield _answers(n=15, typical_p=0.95, top_n_sigma=3, top_p=0.99, repeat_penalty=1.1, **many)


def _mirostat() -> Iterator[Request]:
    yield _answers(n=15, mirostat=2, mirostat_tau=12)
    yield _answers(n=15, mirostat=1, mirostat_tau=12)


def _logprobs() -> Iterator[Request]:
    yield _answers(n=15, logprobs=20)
    yield _json("/v1/completions", prompt=_texts(8000)[2], max_tokens=64, n=15, logprobs=20)


def _show() -> Iterator[Request]:
    yield _json("/api/show", verbose=True)
    yield _json("/api/show")


def _unknown_names() -> Iterator[Request]:
    """Yield names that must be searched among the created models (`_create`)."""
    for i in range(100):
        yield "/api/show", json.dumps({"model": f"unknown-{i}"}).encode()
        yield (
            "/v1/completions",
            json.dumps({"model": f"unknown-{i}", "prompt": "a", "max_tokens": 1}).encode(),
        )


def _schemas() -> Iterator[Request]:
    """Yield nested objects with 400 properties in total; each schema is new."""
    draw = random.Random(3)
    for _ in range(60):
        n = draw.randrange(10**9)
        schema: dict[str, Any] = {"type": "string"}
        for i in range(20):
            properties = {f"p{n}-{i}-{j}": {"type": "string", "maxLength": 40} for j in range(19)}
            schema = {"type": "object", "properties": {**properties, "inner": schema}}
            schema["required"] = list(schema["properties"])
        yield _json("/v1/completions", prompt="a", max_tokens=32, json_schema=schema)


def _connections() -> Iterator[Request]:
    """Yield short connections, more than the 938 in 6 s of a report if the machine is fast enough."""
    yield _json("/tokenize", content="a")
    yield "/v1/completions", b"{}"


KINDS: dict[str, Callable[[], Iterator[Request]]] = {
    "nothing": lambda: iter(()),
    "tokenize": _tokenize,
    "long texts": _long_texts,
    "prompts": _prompts,
    "embeddings": _embeddings,
    "rerank": _rerank,
    "tools": _tools,
    "deep JSON": _deep,
    "arrays": _arrays,
    "detokenize": _detokenize,
    "grammars": _grammars,
    "typical": _typical,
    "many samplers": _many_samplers,
    "mirostat": _mirostat,
    "logprobs": _logprobs,
    "show": _show,
    "unknown names": _unknown_names,
    "schemas": _schemas,
    "connections": _connections,
}
AT_ONCE = {"connections": 32}  # requests, in place of --at-once


# -- the hostile clients ------------------------------------------------------------------------------


def hostile(port: int, kind: str, at_once: int, seconds: float, told: Connection) -> None:
    """Send requests of a kind for `seconds`, in a separate process; send back the statuses of the replies."""
    requests = KINDS[kind]()
    prepared = [next(requests) for _ in range(100)] if kind == "grammars" else list(requests)
    sent, lock, found = iter(range(10**9)), threading.Lock(), Counter[str]()
    told.send("ready")
    told.recv()
    end = time.monotonic() + seconds

    def work(key: str) -> None:
        while prepared and time.monotonic() < end:
            with lock:
                path, body = prepared[next(sent) % len(prepared)]
            status = _status(port, path, body, key)
            with lock:
                found[status] += 1

    keys = [HOSTILE_KEYS[i % len(HOSTILE_KEYS)] for i in range(at_once)]
    threads = [threading.Thread(target=work, args=[key], daemon=True) for key in keys]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    deadline = time.monotonic() + _REPLY_SECONDS
    for thread in threads:  # requests that were sent before the end count
        thread.join(max(deadline - time.monotonic(), 0.0))
    told.send(dict(found))


def _head(path: str, key: str, n_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\nConnection: close\r\n"
        f"Content-Length: {n_bytes}\r\n\r\n"
    ).encode()


def _status(port: int, path: str, body: bytes, key: str) -> str:
    """Return the status of the reply, or what happened instead."""
    try:
        with socket.create_connection(("127.0.0.1", port), _REPLY_SECONDS) as connection:
            connection.sendall(_head(path, key, len(body)) + body)
            status = connection.recv(16)[9:12].decode()
            into = bytearray(1 << 20)
            while connection.recv_into(into):
                pass
            return status or "closed"
    except ConnectionError:
        return "reset"
    except TimeoutError:
        return "timeout"


# -- the measurements --------------------------------------------------------------------------------


@dataclass
class Found:
    """The results for one kind of requests: seconds, bytes, and the number of each status.

    control: the gap before the requests. step: the mean engine step. load: the machine's load average, over a
    minute.
    """

    control: float = 0.0
    gap: float = 0.0
    step: float = 0.0
    health: float = 0.0
    memory: int = 0
    load: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def is_within(self) -> bool:
        """Return whether the limits are kept."""
        return self.gap < max(GAP_SECONDS, 2 * self.step) and self.health < HEALTH_SECONDS


class Watch:
    """A monitor of the other client's stream, /health and the server's memory, while it is open."""

    def __init__(self, server: serve_load.Running, port: int) -> None:
        self.found = Found()
        self._port, self._process = port, psutil.Process(server.pid)
        self._memory, self._steps = self._used(), self._counted()
        self._ended, self._streams = threading.Event(), threading.Event()
        works = (self._stream, self._look, self._weigh)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        if not self._streams.wait(_REPLY_SECONDS):
            sys.exit("the stream does not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        n, seconds = (after - before for after, before in zip(self._counted(), self._steps, strict=True))
        self.found.step = seconds / max(n, 1.0)

    def _stream(self) -> None:
        """Request one answer after another; a gap is between two pieces of one answer."""
        asked = {
            "model": MODEL,
            "prompt": "Once",
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "max_tokens": -1,
        }
        body = json.dumps(asked).encode()
        while not self._ended.is_set():
            with socket.create_connection(("127.0.0.1", self._port)) as connection:
                connection.sendall(_head("/v1/completions", STREAM_KEY, len(body)) + body)
                last = 0.0
                while not self._ended.is_set() and (part := connection.recv(1 << 16)):
                    now = time.perf_counter()
                    if b"data: {" in part:
                        self.found.gap = max(self.found.gap, now - last if last else 0.0)
                        last = now
                        self._streams.set()
                if last and not self._ended.is_set():
                    continue
                self.found.gap = max(self.found.gap, time.perf_counter() - last)

    def _look(self) -> None:
        while not self._ended.wait(_HEALTH_SECONDS):
            began = time.perf_counter()
            with socket.create_connection(("127.0.0.1", self._port)) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                if b" 200 " not in connection.recv(1 << 12):
                    sys.exit("/health does not answer 200")
            self.found.health = max(self.found.health, time.perf_counter() - began)

    def _weigh(self) -> None:
        while not self._ended.wait(0.05):
            self.found.memory = max(self.found.memory, self._used() - self._memory)

    def _counted(self) -> tuple[float, float]:
        """Return the number of the engine's steps so far, and their seconds."""
        head = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nx-api-key: {STREAM_KEY}\r\n"
        head += "Connection: close\r\n\r\n"
        data = b""
        with socket.create_connection(("127.0.0.1", self._port), _REPLY_SECONDS) as connection:
            connection.sendall(head.encode())
            while part := connection.recv(1 << 16):
                data += part
        found = [
            re.search(rb"^hotset_%b_total\S* (\S+)" % name, data, re.M)
            for name in (b"steps", b"step_seconds")
        ]
        steps, seconds = (float(one[1]) if one else 0.0 for one in found)
        return steps, seconds

    def _used(self) -> int:
        """Return the memory of the server and of its child processes."""
        used = 0
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended
                used += process.memory_info().rss
        return used


def measure(server: serve_load.Running, kind: str, args: argparse.Namespace) -> Found:
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    job = args.port, kind, AT_ONCE.get(kind, args.at_once), args.seconds, theirs
    process = spawned.Process(target=hostile, args=job, daemon=True)
    process.start()
    ours.recv()  # its bodies are prepared
    with Watch(server, args.port) as control:
        time.sleep(_CONTROL_SECONDS)
    with Watch(server, args.port) as watch:
        ours.send("begin")
        watch.found.statuses = ours.recv()
    process.join()
    watch.found.control, watch.found.load = control.found.gap, os.getloadavg()[0]
    return watch.found


def _create(home: str) -> None:
    """Fill a store with created models of 50 MB in total."""
    os.environ["HOTSET_HOME"] = home
    for i in range(64):
        created.add(f"created-{i}", created.Created(base="none", template="x" * 800_000))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=8, help="of each kind (8)")
    parser.add_argument("--at-once", type=int, default=4, help="requests of the hostile clients")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--port", type=int, default=18081)
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()
    if unknown := set(args.only) - set(KINDS):
        sys.exit(f"There is no {' or '.join(unknown)}; there are {', '.join(KINDS)}.")
    peers.wait_until_quiet(args.force)
    command = serve_load.hotset_command(args.model, args.port, 16, args.threads)
    command += [part for key in (STREAM_KEY, *HOSTILE_KEYS) for part in ("--api-key", key)]
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as home:
        _create(home)
        with peers.Others() as others, serve_load.running(command, args.port) as server:
            for kind in args.only:
                found[kind] = measure(server, kind, args)
    rows = [
        [
            kind, f"{1e3 * one.control:.0f}", f"{1e3 * one.gap:.0f}", f"{1e3 * one.step:.0f}",
            f"{1e3 * one.health:.0f}", peers.verdict(one.is_within), f"{one.memory / 1e6:.0f}",
            f"{one.load:.1f}",
            ", ".join(f"{n} × {status}" for status, n in sorted(one.statuses.items())),
        ]
        for kind, one in found.items()
    ]  # fmt: skip
    head = [
        "requests",
        "control, ms",
        "longest gap, ms",
        "step, ms",
        "/health at most, ms",
        "limits",
        "memory, MB",
        "load",
        "replies",
    ]
    peers.print_table(head, rows)
    print(f"Others used {others.cores:.2f} cores.\n")
    results = {kind: asdict(one) | {"is_within": one.is_within} for kind, one in found.items()}
    peers.print_json("hostile_load", machine=peers.machine(), found=results, others=others.cores)


if __name__ == "__main__":
    main()
