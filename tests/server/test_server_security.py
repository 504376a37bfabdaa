"""Who may send requests, under which host name, from which page, and how much at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

import hotset
from hotset.server.errors import RequestError
from hotset.server.json_limits import check_json
from hotset.server.security import ApiKeys, BodyLimits
from hotset.server.settings import ServerSettings


def app_of(**settings: Any) -> Any:
    """Return the app around a model that is never loaded: /health gives 503 if no guard refuses."""
    from hotset.server.app import create_app
    from hotset.server.service import Service

    def load() -> hotset.Model:
        raise AssertionError("it was not requested")

    return create_app(Service(load, ServerSettings(**settings), name="tiny"))


def asked(
    app: Any,
    method: str = "GET",
    path: str = "/v1/models",
    headers: dict[str, str] | None = None,
    **more: Any,
) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080"
        ) as client:
            return await client.request(method, path, headers=headers, **more)

    return asyncio.run(ask())


PASSED = 503  # a server without a model


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:99", "[::1]", "[::1]:8080"]
)
def test_loopback_names_are_allowed(host: str):
    assert asked(app_of(), headers={"host": host}).status_code == PASSED


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "localhost.evil.example", "192.168.1.7", "[::2]"],
)
def test_other_host_names_are_refused(host: str):
    reply = asked(app_of(), headers={"host": host})
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "host",
    ["", "a b", "@", "localhost:80:80", "localhost:x", "me@localhost", "localhost/", "[::1", "::1", "[::1]80",
     "localhost:123456", "localhost\\@evil.example"],
)  # fmt: skip
def test_a_malformed_host_header_is_refused(host: str):
    reply = asked(app_of(), headers={"host": host})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_host"


def test_two_host_headers_are_refused():
    assert asked(app_of(), headers=[("host", "localhost"), ("host", "localhost")]).status_code == 400


def test_allowed_hosts():
    app = app_of(allowed_hosts=("chat.example", "[fe80::1]"))
    assert asked(app, headers={"host": "chat.example:443"}).status_code == PASSED
    assert asked(app, headers={"host": "[fe80::1]:443"}).status_code == PASSED
    assert asked(app, headers={"host": "other.example"}).status_code == 403
    assert asked(app_of(allowed_hosts=("*",)), headers={"host": "other.example"}).status_code == PASSED


def test_a_server_on_all_addresses_allows_addresses_and_no_other_names():
    app = app_of(host="0.0.0.0", allow_no_api_key=True)
    assert asked(app, headers={"host": "192.168.1.7:8080"}).status_code == PASSED
    assert asked(app, headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8080"]
)
def test_pages_of_other_origins_are_refused(origin: str):
    """This includes requests that a browser sends without a preflight: a POST of plain text."""
    body = {"content": "{}", "headers": {"origin": origin, "content-type": "text/plain"}}
    reply = asked(app_of(), "POST", "/v1/chat/completions", **body)
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_may_only_link_to_the_chat_page(site: str):
    """A browser requests an image without an Origin header."""
    image, link = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}, {"sec-fetch-site": site}
    link["sec-fetch-mode"] = "navigate"
    reply = asked(app_of(), path="/props?model=tiny", headers=image)
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "origin_not_allowed"
    assert asked(app_of(), path="/", headers=image).status_code == 403
    assert asked(app_of(), path="/", headers=link).status_code == 200
    assert asked(app_of(), path="/props", headers=link).status_code == 403
    named = {"origin": "https://chat.example"}
    allowed = app_of(cors_origins=("https://chat.example",))
    assert asked(allowed, headers=named | image).status_code == PASSED
    assert asked(allowed, headers=image).status_code == 403
    for own in ("same-origin", "none"):
        assert asked(app_of(), headers={"sec-fetch-site": own}).status_code == PASSED


def test_the_chat_page_and_allowed_origins_may_send_requests():
    own = {"origin": "http://127.0.0.1:8080"}
    assert asked(app_of(), headers=own).status_code == PASSED
    app = app_of(cors_origins=("https://chat.example",), api_keys=("k",))
    named = {"origin": "https://chat.example"}
    reply = asked(app, headers=named | {"x-api-key": "k"})
    assert reply.status_code == PASSED
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"
    ask_first = named | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-api-key",
    }
    preflight = asked(app, "OPTIONS", "/v1/chat/completions", ask_first)
    assert preflight.status_code == 200
    assert "x-api-key" in preflight.headers["access-control-allow-headers"]
    refused = asked(app, headers=named)  # the key is missing, and the page may read the refusal
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    assert asked(app, headers={"origin": "https://other.example"}).status_code == 403
    assert asked(app_of(), "OPTIONS", "/v1/chat/completions", ask_first).status_code == 403


def test_api_keys():
    app = app_of(api_keys=("first-key", "second-key"))
    for headers in (
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer second-key"},
        {"x-api-key": "second-key"},
    ):
        assert asked(app, headers=headers).status_code == PASSED, headers
    for headers in (
        {}, {"authorization": "Bearer"}, {"authorization": "Bearer first-key2"},
        {"authorization": "Bearer first-ke"}, {"authorization": "Basic first-key"},
        {"authorization": "Bearer wrong", "x-api-key": "first-key"}, {"x-api-key": "first-key,second-key"},
        {"x-api-key": b"\xff"},
    ):  # fmt: skip
        reply = asked(app, headers=headers)
        assert reply.status_code == 401, headers
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"
    for path in ("/openapi.json", "/nothing", "/page/../v1/models", "/health/x"):
        assert asked(app, path=path).status_code == 401, path
    assert asked(app, path="/health").status_code == 503


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("hotset.server.security.hmac.compare_digest", compare)
    keys = ApiKeys(lambda *_: None, ["a", "long-key", "c"])  # type: ignore[arg-type,return-value]
    assert keys.find("c") == 2
    assert keys.find("") is None
    assert compared == [(32, 32)] * 6


def test_errors_have_the_shape_of_the_api_schema():
    app = app_of(api_keys=("k",))
    anthropic = asked(app, "POST", "/v1/messages").json()
    assert anthropic["type"] == "error"
    assert anthropic["error"]["type"] == "authentication_error"
    assert isinstance(asked(app, "POST", "/api/chat").json()["error"], str)


def test_listening_for_other_machines_needs_a_key():
    with pytest.raises(hotset.InvalidRequestError, match="--allow-no-api-key"):
        ServerSettings(host="0.0.0.0")
    with pytest.raises(hotset.InvalidRequestError, match="other machines"):
        ServerSettings(host="192.168.1.7")
    with pytest.raises(hotset.InvalidRequestError, match="other machines"):
        ServerSettings(host="")
    ServerSettings(host="0.0.0.0", api_keys=("k",))
    ServerSettings(host="0.0.0.0", allow_no_api_key=True)
    for local in ("127.0.0.1", "localhost", "::1", "[::1]", "127.5.0.1"):
        ServerSettings(host=local)


@pytest.mark.parametrize(
    "wrong",
    [
        {"api_keys": ("",)}, {"api_keys": ("a b",)}, {"api_keys": ("schlüssel",)}, {"port": 70000},
        {"max_queue": -1}, {"cors_origins": ("chat.example",)}, {"allowed_hosts": (" ",)},
        {"max_seconds": -1}, {"grace_seconds": float("nan")},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong: dict[str, Any]):
    with pytest.raises(hotset.InvalidRequestError):
        ServerSettings(**wrong)


def test_large_bodies_are_refused_before_they_are_read():
    app = app_of(max_body_bytes=1000)
    small = asked(app, "POST", "/v1/chat/completions", content=b"x" * 1000)
    assert small.json()["error"]["code"] == "invalid_json"
    large = asked(app, "POST", "/v1/chat/completions", content=b"x" * 1001)
    assert large.status_code == 413
    assert large.json()["error"]["code"] == "body_too_large"

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100

    assert asked(app, "POST", "/v1/chat/completions", content=endless()).status_code == 413


def test_nesting_is_limited():
    app = app_of()
    deep = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    reply = asked(app, "POST", "/v1/chat/completions", content=deep)
    assert reply.status_code == 400
    assert "deeper than 64" in reply.json()["error"]["message"]
    check_json(b"[" * 3 + b"]" * 3, 3)
    with pytest.raises(RequestError):
        check_json(b"[" * 4 + b"]" * 4, 3)
    check_json(b"[]" * 100, 1)  # not nested
    check_json(b'["[[[[\\"[[[[", "]"]', 1)  # in strings
    with pytest.raises(RequestError):
        check_json(b'[["\\\\", [{"a": [1]}]]]', 4)
    check_json(b'["' + b"[" * 10, 1)  # brackets in an unterminated string
    with pytest.raises(RequestError):
        check_json(b"]]]" + b"[" * 5, 1)


async def test_slow_bodies_time_out():
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing came")

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    guard = BodyLimits(app, ServerSettings(max_body_seconds=0.01))
    began = time.monotonic()
    await guard(scope, receive, send)
    assert sent[0]["status"] == 408
    assert time.monotonic() - began < 30


async def test_a_client_gets_half_of_the_free_memory_for_long_bodies():
    leave = asyncio.Event()
    reached: list[str] = []
    refused: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["client"][0])
        await leave.wait()

    guard = BodyLimits(app, ServerSettings(max_held_bytes=1000 << 10))

    async def ask(client: str, n_bytes: int) -> None:
        parts = [{"type": "http.request", "body": b" " * n_bytes, "more_body": False}]

        async def receive() -> Message:
            return parts.pop()

        async def send(message: Message) -> None:
            if message.get("status") == 429:
                refused.append(client)

        headers: list[tuple[bytes, bytes]] = []
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "client": (client, 1)}
        await guard(scope, receive, send)

    tasks: list[asyncio.Task[None]] = []

    async def asked(client: str, n_bytes: int) -> None:
        n = len(reached) + len(refused)
        tasks.append(asyncio.create_task(ask(client, n_bytes)))
        while len(reached) + len(refused) == n:
            await asyncio.sleep(0)

    for client, size in (("a", 250), ("a", 250), ("a", 70), ("a", 1), ("b", 251), ("b", 250), ("c", 125)):
        await asked(client, size << 10)
    assert (reached, refused) == (["a", "a", "a", "b", "c"], ["a", "b"])  # 1 KiB is not long
    leave.set()
    await asyncio.gather(*tasks)
    reached.clear()
    await asked("a", 500 << 10)
    assert reached == ["a"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"3", b'"a"', b"{}", b"\xff", b'{"messages": 3}', b'{"messages": [3]}', b"{,}",
        b"NaN",
    ],
)  # fmt: skip
def test_malformed_bodies_are_400(body: bytes):
    for path in ("/v1/chat/completions", "/v1/completions"):
        reply = asked(app_of(), "POST", path, content=body)
        assert reply.status_code == 400, (path, reply.text)
        assert reply.json()["error"]["message"]


def test_a_body_is_parsed_as_json_under_any_content_type():
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data"):
        headers = {"content-type": kind}
        content = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}'
        reply = asked(app_of(), "POST", "/v1/chat/completions", headers, content=content)
        assert reply.status_code == PASSED


def test_surrogates_in_an_error_are_refused_properly():
    reply = asked(app_of(), "POST", "/v1/chat/completions", content=b'{"messages": [], "\\ud800": 1}')
    assert reply.status_code == 400


def test_api_key_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    typer = pytest.importorskip("typer")
    from hotset.cli.serve import ServerOptions

    keys = tmp_path / "keys"
    keys.write_text("# ours\none\n\n  two \n")
    monkeypatch.setenv("HOTSET_API_KEY", "three")
    options = ServerOptions(api_key=["zero"], api_key_file=keys, host="0.0.0.0")
    assert options.settings().api_keys == ("zero", "three", "one", "two")
    keys.write_text("# nothing\n")
    with pytest.raises(typer.BadParameter, match="no key"):
        ServerOptions(api_key_file=keys).settings()
