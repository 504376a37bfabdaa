"""The request log: one line per request with its costs, never with its content; and HEAD."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from full_disk import room_for
from tiny_server import MESSAGES, Serving, client_of
from waiting import until

import hotset
from hotset.server import request_log
from hotset.server.settings import ServerSettings

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


def lines_of(log: Path) -> list[str]:
    return log.read_text("utf-8").splitlines()


async def test_a_line_has_the_costs_of_a_request(path: Path, tmp_path: Path) -> None:
    async with client_of(path, request_log=str(tmp_path / "log"), api_keys=()) as (client, _):
        body = {"prompt": "secret words", "n": 2} | GREEDY
        reply = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
        assert reply.headers["x-request-id"] == "mine-1"
        stream = {"messages": MESSAGES, "stream": True} | GREEDY
        await client.post("/v1/chat/completions", json=stream, headers={"x-request-id": "bad\tid"})
        await client.post("/v1/embeddings", json={"input": ["hello", "ok"]})
        await client.post("/v1/completions", json={"prompt": "secret words", "temperature": -1})
        await client.get("/health")
        await client.get("/none%0a%1b[31m" + "x" * 2000)
    lines = lines_of(tmp_path / "log")
    assert "secret" not in "".join(lines)
    first, stream, vectors, refused, health, none = (json.loads(line) for line in lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (first["id"], first["client"], first["method"]) == ("mine-1", "127.0.0.1", "POST")
    assert (first["path"], first["status"], first["model"]) == ("/v1/completions", 200, "tiny")
    assert (first["prompt_tokens"], first["cached_tokens"], first["completion_tokens"]) == (13, 0, 8)
    assert first["reasons"] == ["length"]
    assert 0 < first["queue_seconds"] < first["first_token_seconds"] <= first["seconds"]
    assert re.fullmatch(r"[0-9a-f]{32}", stream["id"])
    assert (stream["status"], stream["completion_tokens"]) == (200, 4)
    assert vectors["prompt_tokens"] > 0
    assert "completion_tokens" not in vectors
    assert (refused["status"], refused.get("prompt_tokens")) == (400, None)
    assert (health["path"], health["status"], health.get("model")) == ("/health", 200, None)
    assert none["path"].startswith(r"/none\n\x1b[31mx")
    assert len(none["path"]) < 400


async def test_lines_of_text_and_of_refusals(path: Path, tmp_path: Path) -> None:
    how = {"request_log": str(tmp_path / "log"), "log_form": "text"}
    async with client_of(path, api_keys=("k",), **how) as (client, _):
        await client.get("/v1/models")
        await client.get("/v1/models", headers={"x-api-key": "k"})
    lines = lines_of(tmp_path / "log")
    assert len(lines) == 2
    assert re.match(
        r"time=\S+ id=\S+ client=127.0.0.1 method=GET path=/v1/models status=401 seconds=", lines[0]
    )
    assert ' client="key 0" ' in lines[1]
    assert " status=200 " in lines[1]


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
async def test_a_new_log_is_readable_only_by_its_user(path: Path, tmp_path: Path) -> None:
    async with client_of(path, request_log=str(tmp_path / "log")) as (client, _):
        await client.get("/health")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


async def test_lines_are_appended(path: Path, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    for n in (2, 3):
        async with client_of(path, request_log=str(tmp_path / "log")) as (client, _):
            await client.get("/health")
        assert len(lines_of(tmp_path / "log")) == n


async def test_a_cancelled_request_has_a_line(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async with client_of(path, request_log=str(log)) as (client, service):
        body = {
            "prompt": "hello",
            "model": "tiny",
            "max_tokens": 200,
            "ignore_eos": True,
            "temperature": 0,
        }
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(60):
            while not service.n_open:
                await asyncio.sleep(0)
        (answer,) = service._answers
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        answer.fail(RuntimeError("what its cancelled sequences tell, before the line or behind it"))
        assert answer.reasons == ["cancelled"]
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["status"] == 499
    assert json.loads(line)["reasons"] == ["cancelled"]


async def test_the_short_form_equals_uvicorns(path: Path, tmp_path: Path) -> None:
    async with client_of(path, request_log=str(tmp_path / "log"), log_form="short") as (client, _):
        await client.get("/health")
        await client.get("/page/main.js")
        await client.get("/none")
        await client.post("/v1/completions", json={"model": "tiny", "prompt": "hello"} | GREEDY)
    health, none, answer = (tmp_path / "log").read_text().splitlines()
    assert health.endswith('- "GET /health HTTP/1.1" 200 OK')
    assert none.endswith('- "GET /none HTTP/1.1" 404 Not Found')
    assert re.fullmatch(
        r'INFO:     \S+ - "POST /v1/completions HTTP/1\.1" 200 OK - tiny, 6 \+ \d tokens, \d+\.\d\d s', answer
    )


def test_a_slow_disk_does_not_delay_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, written = threading.Event(), []

    class Slow:
        def seek(self, *_: int) -> int:
            return 0

        def write(self, line: memoryview) -> int:
            assert gate.wait(60)
            written.append(bytes(line).decode())
            return len(line)

        def close(self) -> None:
            pass

    monkeypatch.setattr(request_log, "MAX_WAITING", 3)
    monkeypatch.setattr(request_log, "_opened", lambda _: Slow())

    def line(i: int) -> request_log.Handled:
        return request_log.Handled({}, {"line": i}, [])

    writer = request_log.LogWriter(str(tmp_path / "log"), "text")
    writer.write(line(0))
    until(lambda: writer._lines.empty(), "the first line is not taken")
    for i in range(1, 6):
        writer.write(line(i))
    gate.set()
    with caplog.at_level(logging.WARNING, "hotset.server"):
        writer.close()
    assert written == [f"line={i}\n" for i in range(4)]
    assert "2 lines of the request log were left out" in caplog.text


def test_a_full_disk_loses_only_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines stay complete. The server's log reports the problem once, and the number of lost lines."""
    path = tmp_path / "log"
    writer = request_log.LogWriter(str(path), "text")
    with caplog.at_level(logging.WARNING, "hotset.server"), room_for(25):
        for i in range(9):
            writer.write(request_log.Handled({}, {"line": i}, []))
        until(lambda: "cannot be written" in caplog.text, "the full disk is not noticed")
        writer.close()
    assert path.read_text() == "line=0\nline=1\nline=2\n"
    assert caplog.text.count("cannot be written (File too large)") == 1
    assert "6 lines of the request log were lost" in caplog.text


async def test_a_log_that_cannot_be_written_is_refused(path: Path, tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "none" / "log"):
        with pytest.raises(hotset.InvalidRequestError):
            async with client_of(path, request_log=str(bad)):
                pytest.fail("it began")
    with pytest.raises(hotset.InvalidRequestError, match="must be one of json, text, short"):
        ServerSettings(log_form="xml")


def test_head_is_get_without_a_body(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Serving(path, request_log=str(log)) as serving:
        for where in ("/health", "/v1/models", "/api/tags", "/api/version", "/", "/metrics"):
            head, get = serving.client.head(where), serving.client.get(where)
            assert (head.status_code, head.content) == (200, b""), where
            assert head.headers["content-type"] == get.headers["content-type"]
        assert serving.client.head("/v1/chat/completions").status_code == 405
        assert serving.client.head("/none").status_code == 404
        assert serving.client.head("/health").status_code == 200, "the connection goes on"
    methods = [json.loads(line)["method"] for line in log.read_text().splitlines()]
    assert methods.count("HEAD") == 9
