"""Images in requests of every API schema, with a stand-in encoder."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from byte_models import write_model
from stand_in_encoder import asks, decoded, file_of, give_images
from tiny_server import WATCHDOG, Serving, client_of

import hotset
from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.server.remote_images import answer_of, fetched, is_public, with_fetched
from hotset.server.settings import ServerSettings
from hotset.text.image_parts import from_base64
from hotset.text.image_text import GivenImage, text_of_image

FILE = file_of(16, 24)  # 96 tokens
DATA = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{DATA}"
QUESTION = "What is this?"
N_TOKENS = 96


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"llama.context_length": 512}
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", more_tokens=["<|image|>"], **keys)


def in_chat(image: dict[str, Any] | str, text: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": image}, {"type": "text", "text": text}]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}


def in_responses(image: str, text: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": text}]
    return "/v1/responses", {"input": [{"role": "user", "content": parts}]}


def in_message(source: dict[str, Any], text: str) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    return "/v1/messages", {"messages": [{"role": "user", "content": parts}], "max_tokens": 8}


BASE64 = {"type": "base64", "media_type": "image/png", "data": DATA}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": in_chat({"url": URL, "detail": "high"}, QUESTION),
    "chat with a plain url": in_chat(URL, QUESTION),
    "responses": in_responses(URL, QUESTION),
    "messages": in_message(BASE64, QUESTION),
    "ollama chat": (
        "/api/chat",
        {"messages": [{"role": "user", "content": QUESTION, "images": [DATA]}], "stream": False},
    ),
    "ollama generate": ("/api/generate", {"prompt": QUESTION, "images": [DATA], "stream": False}),
}


def prompt_tokens(reply: dict[str, Any]) -> int:
    usage = reply.get("usage", reply)
    names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    found = next(usage[name] for name in names if name in usage)
    return int(found) + int(usage.get("cache_read_input_tokens") or 0)


@pytest.fixture(scope="module")
def n_expected(path: Path) -> dict[bool, int]:
    """Return the tokens of the prompt: with the text after the image, and with a line between them."""
    with hotset.load(path, device="cpu", n_threads=1) as model:
        give_images(model)
        plain, lined = (model.encode_chat([asks(FILE, f"{n}{QUESTION}")]) for n in ("", "\n"))
        assert plain.count(-1) == N_TOKENS
        return {False: len(plain), True: len(lined)}


@pytest.mark.anyio
@pytest.mark.parametrize("name", REQUESTS)
async def test_every_schema_gives_the_model_the_image(path: Path, name: str, n_expected: dict[bool, int]):
    route, body = REQUESTS[name]
    async with client_of(path) as (client, service):
        encoder = give_images(service.model)
        reply = await client.post(route, json={"model": "tiny", "temperature": 0} | body)
        assert reply.status_code == 200, reply.text
        assert encoder.n_encoded == 1
        assert prompt_tokens(reply.json()) == n_expected[route == "/v1/messages"]
        text = (await client.get("/metrics")).text
        assert "hotset_images_total 1.0" in text
        assert f"hotset_image_tokens_total {N_TOKENS}.0" in text


@pytest.mark.anyio
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_model_without_an_encoder_refuses_an_image(path: Path, name: str):
    route, body = REQUESTS[name]
    async with client_of(path) as (client, _):
        reply = await client.post(route, json={"model": "tiny", "temperature": 0} | body)
        assert reply.status_code == 400
        assert "there is no projector next to tiny.gguf" in reply.text
        assert str(path.parent) not in reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_encoding_of_its_image(path: Path, stream: bool):
    begun, ended = threading.Event(), threading.Event()
    route, body = REQUESTS["chat"]
    sent = json.dumps({"model": "tiny", "stream": stream} | body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"

    def held(picture: Any, detail: str, max_tokens: int | None, stops: Any) -> Any:
        begun.set()
        assert cancelled.wait(WATCHDOG)
        assert stops()
        ended.set()
        raise StepCancelledError

    with Serving(path) as server:
        encoder, cancelled = give_images(server.model), threading.Event()
        first, encoder.encode = encoder.encode, held  # type: ignore[method-assign]
        encoder.cancel = cancelled.set  # type: ignore[method-assign]
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + sent)
            assert begun.wait(WATCHDOG)
        assert ended.wait(WATCHDOG)
        encoder.encode = first  # type: ignore[method-assign]
        assert server.client.post(route, json={"model": "tiny", "temperature": 0} | body).status_code == 200


TOKENIZED = "/tokenize", {"messages": REQUESTS["chat"][1]["messages"]}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        REQUESTS["chat"], ("/v1/messages/count_tokens", REQUESTS["messages"][1]),
        ("/v1/responses/input_tokens", REQUESTS["responses"][1]), TOKENIZED,
    ],
)  # fmt: skip
def test_a_client_that_leaves_ends_the_decoding_of_its_image(path: Path, route: str, body: dict[str, Any]):
    begun, ended = threading.Event(), threading.Event()
    sent = json.dumps({"model": "tiny"} | body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"

    def held(_data: bytes, *, stop: threading.Event) -> Any:
        begun.set()
        assert stop.wait(WATCHDOG)
        ended.set()
        raise StepCancelledError

    with Serving(path) as server:
        give_images(server.model, decode=held)
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + sent)
            assert begun.wait(WATCHDOG)
        assert ended.wait(WATCHDOG)


RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": BASE64}]}
IN_RESULT = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
    {"role": "user", "content": [RESULT]},
]


@pytest.mark.anyio
@pytest.mark.parametrize("sees", [True, False])
async def test_a_tools_result_may_have_an_image(path: Path, sees: bool):
    """Check that a text model gets a note, so that an agent's conversation goes on."""
    async with client_of(path) as (client, service):
        encoder = give_images(service.model) if sees else None
        body = {"model": "tiny", "messages": IN_RESULT, "max_tokens": 4, "temperature": 0}
        reply = await client.post("/v1/messages", json=body)
        assert reply.status_code == 200, reply.text
        assert encoder is None or encoder.n_encoded == 1
        counted = await client.post("/v1/messages/count_tokens", json=body)
        assert counted.json()["input_tokens"] == prompt_tokens(reply.json())


@pytest.mark.anyio
async def test_facts_say_that_a_model_reads_images(path: Path):
    async with client_of(path) as (client, service):
        for sees in (False, True):
            if sees:
                give_images(service.model)
            assert (await client.get("/props")).json()["modalities"]["vision"] is sees
            [model] = (await client.get("/v1/models")).json()["data"]
            assert ("architecture" in model) is sees
            shown = (await client.post("/api/show", json={"model": "tiny"})).json()
            assert ("vision" in shown["capabilities"]) is sees


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("data:image/png;base64,@@@", "is not valid base64"),
        ("data:text/html,hello", "must begin with data:image"),
        ("/etc/passwd", "must be a data URL or begin with https://"),
        ("file:///etc/passwd", "must be a data URL or begin with https://"),
        ({"url": URL, "detail": "huge"}, "the detail of an image must be one of auto, low, high"),
        ({"url": None}, "must be a text"),
        ("data:image/png;base64,aGVsbG8=", "is in no known format"),
        ("https://example.com/a.png", "start the server with --allow-remote-images"),
    ],
)
async def test_bad_images_get_one_clear_error(path: Path, image: Any, message: str):
    async with client_of(path) as (client, service):
        give_images(service.model)
        route, body = in_chat(image, QUESTION)
        reply = await client.post(route, json={"model": "tiny"} | body)
        assert reply.status_code == 400
        assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "192.88.99.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
        "fd12::1", "ff02::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::",
        "64:ff9b::7f00:1", "::127.0.0.1",
    ],
)  # fmt: skip
def test_private_addresses_are_never_fetched(address: str):
    assert not is_public(address)
    with pytest.raises(InvalidRequestError, match="not on the public internet"):
        fetched("http://images.example/a.png", 1e12, lambda *_: ["93.184.215.14", address])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_base64_may_have_lines(end: str):
    lines = [DATA[i : i + 76] for i in range(0, len(DATA), 76)]
    assert from_base64(f"data:image/png;base64,{end.join(lines)}{end}") == FILE


def test_public_addresses_are_public():
    assert is_public("93.184.215.14")
    assert is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://images.example/a.png", "must be http or https"),
        ("http://user:secret@images.example/a.png", "must be http or https, without a user"),
        ("http://images.example/a\r\nHost: b", "white space"),
    ],
)
def test_odd_addresses_are_not_fetched(url: str, message: str):
    with pytest.raises(InvalidRequestError, match=message):
        fetched(url, 1e12, lambda *_: ["93.184.215.14"])


def test_fetched_images_replace_addresses(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def answer(address: str, _until: float, stop: threading.Event) -> bytes:
        assert not stop.is_set()
        asked.append(address)
        return FILE

    monkeypatch.setattr("hotset.server.remote_images.fetched", answer)
    image = text_of_image(GivenImage(detail="low", address="https://images.example/a.png"))
    messages = [{"role": "user", "content": image}, {"role": "user", "content": "and a text"}]
    first, second = with_fetched(messages, ServerSettings(allow_remote_images=True), threading.Event())
    [found] = first["content"].images.values()
    assert (found.data, found.detail, found.address) == (FILE, "low", "")
    assert second is messages[1]
    assert asked == ["https://images.example/a.png"]
    assert decoded(found.data).pixels.shape == (16, 24, 3)


def test_a_redirect_to_a_private_address_is_refused():
    places: list[str] = []

    def answer(_parts: Any, place: str, _until: float) -> tuple[bytes, str | None]:
        places.append(place)
        return b"", "http://inside.example/a.png"

    addresses = {"outside.example": ["93.184.215.14"], "inside.example": ["127.0.0.1"]}
    with pytest.raises(InvalidRequestError, match="not on the public internet"):
        fetched("http://outside.example/a.png", 1e12, lambda host, _: addresses[host], answer)
    assert places == ["93.184.215.14"]


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_sends_byte_by_byte_is_cut_off(head: bytes):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(head)
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.01)

        thread = threading.Thread(target=drip)
        thread.start()
        url = urlsplit(f"http://images.example:{server.getsockname()[1]}/a.png")
        with pytest.raises(TimeoutError):
            answer_of(url, "127.0.0.1", time.monotonic() + 0.2, stop=threading.Event())
        thread.join()


@pytest.mark.parametrize("accepts", [True, False])
def test_fetching_ends_once_it_is_stopped(accepts: bool):
    """Stop while the server sends nothing, or does not even accept the connection."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def leave() -> None:
            if accepts:
                held.append(server.accept()[0])
            stop.set()

        held: list[socket.socket] = []
        thread = threading.Thread(target=leave)

        def ask(parts: Any, _place: str, until: float) -> tuple[bytes, str | None]:
            thread.start()
            return answer_of(parts, "127.0.0.1", until, stop=stop)

        url = f"http://images.example:{server.getsockname()[1]}/a.png"
        until = time.monotonic() + WATCHDOG
        with pytest.raises(StepCancelledError):
            fetched(url, until, lambda *_: ["93.184.215.14"], ask, stop)
        assert time.monotonic() < until
        thread.join()
        for connection in held:
            connection.close()


@pytest.mark.anyio
async def test_several_answers_share_the_images_of_their_prompt(path: Path):
    route, body = in_chat({"url": URL}, QUESTION)
    async with client_of(path) as (client, service):
        encoder = give_images(service.model, cache_bytes=0)
        reply = await client.post(route, json={"model": "tiny", "n": 2, "temperature": 0} | body)
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["choices"]) == 2
        assert encoder.n_encoded == 1


@pytest.mark.anyio
async def test_a_request_has_at_most_100_images(path: Path):
    parts = [{"type": "image_url", "image_url": {"url": URL}}] * 101
    route, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
    async with client_of(path) as (client, service):
        give_images(service.model)
        reply = await client.post(route, json={"model": "tiny"} | body)
        assert reply.status_code == 400
        assert "a request may have 100 images, not 101" in reply.json()["error"]["message"]
