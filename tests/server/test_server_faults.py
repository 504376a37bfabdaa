"""Faults of clients, backends and signals: nothing leaks, and the next answer is correct."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cases import quick_are
from tiny_server import MESSAGES, Serving, events_of, held_steps, text_of, write_model
from waiting import WATCHDOG, until

import hotset

pytest.importorskip("hotset._core", reason="the native module is not built")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
LONG = {"temperature": 0, "ignore_eos": True}  # up to the end of the context
N_DISCONNECTS = int(os.environ.get("HOTSET_DISCONNECTS", "120"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder / "tiny.gguf", **{"llama.context_length": 1 << 16})


@pytest.fixture(scope="module")
def expected(path: Path) -> str:
    with hotset.load(path, device="cpu", n_threads=1, n_ctx=512) as model:
        return model.chat(MESSAGES, **GREEDY).content


def answer(server: Serving) -> str:
    reply = server.client.post(CHAT, json={"messages": MESSAGES} | GREEDY, timeout=WATCHDOG)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps({"model": "tiny"} | body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def test_clients_that_disconnect_at_any_moment(path: Path, expected: str):
    """Disconnect in the queue, in a long prompt, between tokens or before the end of the body."""
    draw = random.Random(7)

    def leave(port: int) -> None:
        text = draw.choice(["hi", "x" * draw.randrange(10, 1500)])
        stream = draw.random() < 0.5
        body = {
            "messages": [{"role": "user", "content": text}], "stream": stream, "n": draw.choice([1, 1, 3]),
        }  # fmt: skip
        sent = request_bytes(CHAT, body | LONG)
        how = draw.choice(["half", "at once", "soon", "after some"])
        with socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG) as connection:
            if how == "half":
                connection.sendall(sent[: draw.randrange(1, len(sent))])
                return
            connection.sendall(sent)
            if how == "soon":
                time.sleep(draw.random() * 0.03)
            elif how == "after some" and stream:
                for _ in range(draw.randrange(1, 6)):
                    if not connection.recv(200):
                        break
            if draw.random() < 0.5:  # a reset instead of a proper end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    with Serving(path, load={"n_ctx": 2048, "n_seqs": 2}, max_queue=200) as server:
        assert answer(server) == expected
        process = psutil.Process()
        server.wait_until_idle()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: leave(server.port), range(N_DISCONNECTS // 4)))  # all have started before
        until(lambda: not server.service.n_open)
        server.wait_until_idle()
        gc.collect()
        before = process.num_fds(), threading.active_count(), len(server.server.server_state.tasks)
        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(leave, server.port) for _ in range(N_DISCONNECTS)]
            texts = [answer(server) for _ in range(3)]
            for job in jobs:
                job.result()
        assert texts == [expected] * 3
        server.wait_until_idle()
        until(lambda: not server.server.server_state.connections)
        gc.collect()
        assert not server.service.n_open
        after = process.num_fds(), threading.active_count(), len(server.server.server_state.tasks)
        assert after[0] <= before[0]
        assert after[1] <= before[1] + 1  # the engine's own thread may or may not exist
        assert after[2] == 0
        assert answer(server) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_ends_a_long_prompt(path: Path, stream: bool):
    """A step with only this sequence is cancelled."""
    with Serving(path, load={"n_ctx": 4096}) as server, held_steps(server.model) as held:
        with socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG) as connection:
            body = {"prompt": [65] * 3000, "stream": stream, "max_tokens": 5, "temperature": 0}
            connection.sendall(request_bytes(COMPLETIONS, body))
            assert held.begun.wait(WATCHDOG)
        until(lambda: not server.service.n_open)
        held.gate.set()
        server.wait_until_idle()


def test_slow_reader_delays_no_client_and_is_disconnected(path: Path, expected: str):
    with Serving(path, load={"n_ctx": 1024}, max_write_seconds=0.5) as server:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            body = {"messages": MESSAGES, "stream": True, "n": 4, "logprobs": True, "top_logprobs": 20} | LONG
            connection.sendall(request_bytes(CHAT, body))
            until(lambda: server.service.n_open)
            assert answer(server) == expected
            server.wait_until_idle()
        assert answer(server) == expected


def test_a_backend_that_fails_in_a_step(path: Path, expected: str):
    with Serving(path) as server:
        model = server.model
        step = model.backend.step
        failures = {"left": 0}

        def failing(batch: Any) -> Any:
            if failures["left"]:
                failures["left"] -= 1
                raise RuntimeError("the tiny backend burst")
            time.sleep(0.002)
            return step(batch)

        model.backend.step = failing  # type: ignore[method-assign]
        body = {"messages": MESSAGES} | GREEDY
        failures["left"] = 1
        reply = server.client.post(CHAT, json=body, timeout=WATCHDOG)
        assert reply.status_code == 500
        assert "RuntimeError" in reply.json()["error"]["message"]
        assert "burst" not in reply.text  # internal errors appear only in the log
        with server.client.stream("POST", CHAT, json=body | {"stream": True}, timeout=WATCHDOG) as streamed:
            lines = []
            for line in streamed.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    failures["left"] = 1
        events, done = events_of("\n".join(lines))
        assert not done
        assert events[-1]["error"]["type"] == "server_error"
        assert expected.startswith(text_of(events[:-1]))
        server.wait_until_idle()
        assert answer(server) == expected


@pytest.mark.usefixtures("any_seed")  # a changed byte may be a digit of the temperature
def test_garbage_instead_of_requests(path: Path, expected: str):
    draw = random.Random(3)
    with Serving(path) as server:
        for garbage in (
            b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", draw.randbytes(3000),
            b"\n" * 9,
        ):  # fmt: skip
            with socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG) as connection:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1000)
        for _ in range(40):  # almost a request
            asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "temperature": 0}
            body = bytearray(json.dumps(asked).encode())
            for _ in range(draw.randrange(1, 4)):
                body[draw.randrange(len(body))] = draw.randrange(256)
            reply = server.client.post(CHAT, content=bytes(body), timeout=WATCHDOG)
            assert reply.status_code in (200, 400, 404), (bytes(body), reply.text)  # 404: another model
        assert answer(server) == expected


# -- the process ------------------------------------------------------------------------------------


@pytest.fixture
def started(path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Yield a function that starts `hotset serve` and returns the process and the address."""
    running: list[subprocess.Popen[str]] = []

    def start(*options: str, model: Path = path, ready: bool = True) -> tuple[subprocess.Popen[str], str]:
        command = [
            sys.executable, "-m", "hotset.cli.main", "serve", str(model), "--port", "0", "-t", "1",
            *options,
        ]  # fmt: skip
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server ended"
            found = re.search(r"http://\S+", line)
        if ready:
            until(lambda: httpx.get(f"{found[0]}/health").status_code == 200)
        return process, found[0]

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def answers(url: str) -> bool:
    """Return whether the server accepts connections."""
    try:
        return httpx.get(f"{url}/health", timeout=WATCHDOG).status_code == 200
    except httpx.HTTPError:
        return False


def streaming(url: str) -> tuple[list[str], threading.Thread, threading.Event]:
    """Run a stream in a thread. Return its lines, the thread, and an event for the first text."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"model": "tiny", "messages": MESSAGES, "stream": True} | LONG
        with httpx.stream("POST", url + CHAT, json=body, timeout=WATCHDOG) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                if len(lines) > 4:
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(WATCHDOG)
    return lines, thread, begun


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_a_stream_finish(started: Callable[..., Any], how: signal.Signals):
    process, url = started("-c", "700", "--grace", "60")
    lines, thread, _ = streaming(url)
    process.send_signal(how)
    thread.join(WATCHDOG)
    events, done = events_of("\n".join(lines))
    assert done
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert process.wait(WATCHDOG) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")


@pytest.mark.parametrize("second", quick_are((True,), [False, True]))
def test_after_the_grace_period_or_a_second_signal_a_stream_ends_with_an_error(
    started: Callable[..., Any], second: bool
):
    process, url = started("-c", str(1 << 16), "-np", "1", "--grace", "600" if second else "0")
    lines, thread, _ = streaming(url)
    process.send_signal(signal.SIGTERM)
    if second:
        until(lambda: not answers(url))  # the first signal was handled
        process.send_signal(signal.SIGTERM)
    thread.join(WATCHDOG)
    events, done = events_of("\n".join(lines))
    assert not done
    assert "shut down" in events[-1]["error"]["message"]
    assert process.wait(WATCHDOG) == 0


def test_a_file_that_is_not_a_model_ends_the_server_with_one_message(
    started: Callable[..., Any], tmp_path: Path
):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    process, _ = started(model=broken, ready=False)
    assert process.wait(WATCHDOG) == 1
    assert process.stderr is not None
    rest = process.stderr.read()
    assert "broken.gguf" in rest
    assert "Traceback" not in rest


def test_a_port_that_is_taken(path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "hotset.cli.main", "serve", str(path), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "Traceback" not in done.stderr
