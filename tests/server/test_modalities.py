"""Requests with sound or pictures get 501 and the name of the requested model."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import MESSAGES, Serving, client_of, key_of

from hotset.server import modalities
from hotset.server.app import create_app
from hotset.server.modalities import Excerpt
from hotset.server.service import Service

TRANSCRIBE = "/v1/audio/transcriptions"
FIELDS = {"model": (None, "whisper-1"), "language": (None, "de")}
NESTED = b'[[[[{"model": "inner", "' * 1000


def sound(n_bytes: int) -> bytes:
    return random.Random(3).randbytes(n_bytes)


def message(reply: httpx.Response) -> str:
    assert reply.status_code == 501, reply.text
    assert reply.headers["x-should-retry"] == "false"
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("not_supported_error", "not_supported")
    return str(error["message"])


@pytest.mark.parametrize("where", modalities.ROUTES)
async def test_routes_name_the_model(where: str, client: httpx.AsyncClient) -> None:
    file = {"file": ("a.wav", NESTED)}

    for form in (FIELDS | file, file | FIELDS):  # the name before the sound, and after it
        assert "with the model 'whisper-1' is not supported" in message(await client.post(where, files=form))
    body = {"input": "a", "model": "voice\n2", "nested": {"model": "other"}}
    assert "the model 'voice\\n2'" in message(await client.post(where, json=body))
    nameless: list[dict[str, Any]] = [
        {"files": file}, {"json": {"input": "a"}}, {"json": ["model"]}, {"json": {"model": 3}},
        {"content": b"{"}, {"content": NESTED}, {},
    ]  # fmt: skip
    for body in nameless:
        assert "with the model 'tiny' is not supported" in message(await client.post(where, **body)), body
    assert (await client.get(where)).status_code == 405


def test_a_large_form_is_read_and_not_stored(path: Path) -> None:
    """Send a form that is larger than other bodies may be, with the name first or last."""
    file = {"file": ("a.wav", sound(9 << 20))}
    with Serving(path) as serving:
        for form in (FIELDS | file, file | FIELDS):
            assert "'whisper-1'" in message(serving.client.post(TRANSCRIBE, files=form))
        assert "'tiny'" in message(serving.client.post(TRANSCRIBE, files=file))
        assert serving.client.get("/health").status_code == 200


async def test_a_form_without_an_end_is_not_read_to_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modalities, "MOST_BYTES", 1 << 20)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield bytes(1 << 16)

    async with client_of(path) as (client, _):
        form = {"content-type": "multipart/form-data; boundary=a"}
        assert "'tiny'" in message(await client.post(TRANSCRIBE, content=endless(), headers=form))
    assert sent == (1 << 20) + (1 << 16)
    with Serving(path) as serving, socket.create_connection(("127.0.0.1", serving.port), 60) as connection:
        connection.sendall(
            f"POST {TRANSCRIBE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
        )
        connection.sendall(bytes((1 << 20) + 1))
        assert connection.recv(100).startswith(b"HTTP/1.1 501 ")
        while connection.recv(1 << 16):
            pass  # until the connection is closed


def test_a_body_that_does_not_arrive_is_given_up(path: Path) -> None:
    head = f"POST {TRANSCRIBE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n".encode()
    with (
        Serving(path, max_body_seconds=0.1) as serving,
        socket.create_connection(("127.0.0.1", serving.port), 60) as connection,
    ):
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(("at", "found"), [(0, {"model": "a"}), (32, {}), (63, {"model": "a"})])
def test_only_both_ends_of_a_form_are_kept(at: int, found: dict[str, str]) -> None:
    excerpt, field = Excerpt(), b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--b'
    for i in range(64):
        assert excerpt.take((field if i == at else b"").ljust(1 << 16, b"\0"))
    assert json.loads(excerpt.body("multipart/form-data", 64)) == found
    assert excerpt.body("application/json", 64) == b"{}"


@pytest.mark.parametrize(
    ("part", "model"),
    [
        ('Content-Disposition: form-data; name="model"\r\n\r\nwhisper', "whisper"),
        ("Content-Type: text/plain\r\nContent-Disposition: form-data; name=model\r\n\r\nwhisper", "whisper"),
        ('Content-Disposition: form-data; name="model_size"\r\n\r\nlarge', None),
        ('Content-Disposition: form-data; name="model"\r\n\r\n' + "a" * 257, None),
    ],
)
def test_the_model_field_of_a_form_is_found(part: str, model: str | None) -> None:
    excerpt = Excerpt()
    excerpt.take(f"--b\r\n{part}\r\n--b--\r\n".encode())
    found = json.loads(excerpt.body("Multipart/Form-Data; boundary=b", 64))
    assert found.get("model") == model


@pytest.mark.parametrize(
    "form", [";name=model" * 6000, ";name=model\r\n" * 5000, ";name=model" * 2900 + "\r\n" + "a\r\n" * 10_000]
)
def test_a_hostile_form_is_parsed_quickly(form: str) -> None:
    """Limit the time for forms that once blocked the event loop for 20 s."""
    excerpt = Excerpt()
    excerpt.take(form.encode())
    began = time.process_time()
    assert excerpt.body("multipart/form-data; boundary=b", 64) == b"{}"
    assert time.process_time() - began < 1


async def test_keys_are_checked_first(path: Path) -> None:
    named = key_of("a", models=("tiny",)), key_of("b", models=("other",))
    async with client_of(path, named_keys=named) as (client, _):

        async def asked(key: str) -> httpx.Response:
            headers = {"x-api-key": key} if key else {}
            return await client.post("/v1/images/generations", json={}, headers=headers)

        assert [(await asked(key)).status_code for key in ("", "c")] == [401, 401]
        assert "with the model 'tiny' is" in message(await asked("a"))
        assert "with any model of this server is" in message(await asked("b")), "which is no model of b's"
        sound = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
        body = {"model": "tiny", "messages": [sound]}
        for key, status in (("a", 501), ("b", 404)):
            reply = await client.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
            assert reply.status_code == status, reply.text


@pytest.mark.parametrize("kind", ["input_audio", "file", "video_url"])
async def test_parts_of_messages_name_the_model(kind: str, client: httpx.AsyncClient) -> None:
    text = {"type": "text", "text": "a"}
    messages = [*MESSAGES, {"role": "user", "content": [text, {"type": kind, kind: {}}]}]

    for where in ("/v1/chat/completions", "/tokenize"):
        for named in ({"model": "tiny"}, {"model": "other:style"}, {"model": None}):
            reply = await client.post(where, json={"messages": messages} | named)
            assert message(reply) == (
                f"messages.1: a part of type {kind} cannot be read: the model 'tiny' reads and writes "
                "only text"
            )
            assert reply.json()["error"]["param"] == "messages.1"


async def test_requests_for_audio_answers_are_refused(client: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "modalities": ["text", "audio"], "audio": {"voice": "alloy"}}
    reply = await client.post("/v1/chat/completions", json=body)
    assert message(reply).startswith("modalities.1: audio cannot be written: the model 'tiny'")


async def test_refusals_do_not_wait_for_a_model_that_loads() -> None:
    def load() -> Any:
        raise AssertionError("it was not requested")

    app = create_app(Service(load, name="tiny"))

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert "'tts-1'" in message(await client.post("/v1/audio/speech", json={"model": "tts-1"}))
        assert (await client.post("/v1/audio/speech", json={})).status_code == 503
