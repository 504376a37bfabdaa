"""The front of several replicas, without a cluster: the choice of replicas, and lost replicas.

Replicas are servers of this process; tests/cluster/ has the tests that need Ray.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_models import write_model
from tiny_server import MESSAGES, events_of, text_of
from waiting import WATCHDOG

import hotset
from hotset.scale import front as front_module
from hotset.scale.front import Front
from hotset.scale.guard import FromFront
from hotset.scale.metrics import with_replicas
from hotset.scale.routing import PrefixTable, prefix_keys
from hotset.server.app import create_app
from hotset.server.listen import Server, bound_socket
from hotset.server.service import Service
from hotset.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SECRET = "between us"


# --- which replica


def chat(*turns: str, system: str = "") -> bytes:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return json.dumps({"messages": messages}).encode()


def test_keys_of_a_conversation_begin_with_its_earlier_turns_keys():
    first, second = prefix_keys(chat("a" * 300)), prefix_keys(chat("a" * 300, "b" * 200, "c" * 90))
    assert len(first) >= 4
    assert second[: len(first)] == first
    assert len(second) > len(first)
    assert prefix_keys(chat("a" * 299 + "b"))[:4] == first[:4]
    assert prefix_keys(chat("b" + "a" * 299))[0] != first[0]
    text = prefix_keys(json.dumps({"prompt": "x" * 200}).encode())
    assert len(text) == 3
    assert prefix_keys(json.dumps({"prompt": [5] * 200}).encode())
    for other in (
        json.dumps({"prompt": "x" * 200}).encode("utf-16"), b"", b"[]", b"{", b'{"input": ""}',
        b"[" * 100_000, chat("short"),
    ):  # fmt: skip
        assert prefix_keys(other) == []


def test_a_conversation_stays_where_its_prefix_is():
    table = PrefixTable()
    loads = {"a": 0, "b": 0}
    turns: dict[int, list[str]] = {i: [f"{i} " * 100] for i in range(8)}
    where: dict[int, str] = {}
    for _ in range(4):
        for i, said in turns.items():
            keys = prefix_keys(chat(*said, system="You are of help to everyone. " * 20))
            found = table.order(keys, loads)[0]
            assert where.setdefault(i, found) == found
            table.note(keys, found)
            said += [f"answer {i} " * 30, f"and then {i} " * 30]
    of_each = [list(where.values()).count(name) for name in "ab"]
    assert min(of_each) >= 3, "what all share, the system message, does not bring all to one"


def test_a_replica_that_has_far_more_to_do_is_passed_over():
    table = PrefixTable(ahead=3)
    keys = prefix_keys(chat("a" * 500))
    table.note(keys, "a")
    assert table.order(keys, {"a": 3, "b": 0}) == ["a", "b"]
    assert table.order(keys, {"a": 4, "b": 0}) == ["b", "a"]
    assert table.order([], {"a": 1, "b": 0, "c": 2}) == ["b", "a", "c"]
    table.forget("a")
    table.note([*keys[:1], "other"], "b")
    assert table.order(keys, {"a": 0, "b": 0})[0] == "b"


def test_metrics_of_replicas_have_labels():
    text = (
        '# HELP a What.\n# TYPE a counter\na_total{x="1"} 2.0\na_total 3.0\n'
        "# HELP b B.\n# TYPE b gauge\nb 1\n"
    )
    assert with_replicas({"r1": text, "r2": text}) == (
        '# HELP a What.\n# TYPE a counter\na_total{x="1",replica="r1"} 2.0\na_total{replica="r1"} 3.0\n'
        'a_total{x="1",replica="r2"} 2.0\na_total{replica="r2"} 3.0\n'
        '# HELP b B.\n# TYPE b gauge\nb{replica="r1"} 1\nb{replica="r2"} 1\n'
    )


# --- forwarded requests


class Replica:
    """A server behind the front, with its own port."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.service = Service(
            lambda: hotset.load(path, device="cpu", n_threads=1, max_sequences=4),
            ServerSettings(port=0, allow_no_api_key=True, allowed_hosts=("*",), **settings),
            name="tiny",
        )
        bound = bound_socket("127.0.0.1", 0)
        self.where = f"http://127.0.0.1:{bound.getsockname()[1]}"
        app = FromFront(create_app(self.service), SECRET)
        self.server = Server(self.service, bound, lambda where: None, app)
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[bound])), daemon=True
        )
        self.thread.start()
        while not self.service.is_ready:
            assert self.service.error is None
            self.thread.join(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)


@contextmanager
def two(path: Path) -> Iterator[list[Replica]]:
    found = [Replica(path), Replica(path)]
    try:
        yield found
    finally:
        for one in found:
            one.close()


class Place:
    """Like Ray Serve's stream of one request: an address, and then nothing until the replica dies."""

    def __init__(self, where: str) -> None:
        self._where: str | None = where
        self.died = asyncio.Event()
        self.cancelled = False

    async def __anext__(self) -> str:
        where, self._where = self._where, None
        if where is not None:
            return where
        await self.died.wait()
        raise RuntimeError("the actor died")

    def cancel(self) -> None:
        self.cancelled = True


class Watched:
    """An application that notes when a part of a reply's body is sent."""

    def __init__(self, app: Any, places: Places) -> None:
        self._app, self._places = app, places

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            await send(message)
            if message.get("body"):
                self._places.replied.set()

        await self._app(scope, receive, noted)


class Places:
    """Gives addresses in turn."""

    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.given: list[Place] = []
        self.keys: list[list[str]] = []
        self.replied = asyncio.Event()

    def hold(self, keys: list[str]) -> Place:
        self.keys.append(keys)
        self.given.append(Place(self.order[min(len(self.given), len(self.order) - 1)]))
        return self.given[-1]

    async def all(self) -> list[tuple[str, str]]:
        return [(f"r{i}", where) for i, where in enumerate(dict.fromkeys(self.order))]


@asynccontextmanager
async def fronted(order: list[str], **settings: Any) -> Any:
    places = Places(order)
    front = Front(places, ServerSettings(**settings), SECRET)
    app = front.app()
    async with app.router.lifespan_context(app):
        front.ready.set()
        transport = httpx.ASGITransport(Watched(app, places), raise_app_exceptions=False)
        where = "http://localhost"
        async with httpx.AsyncClient(transport=transport, base_url=where, timeout=WATCHDOG) as client:
            yield client, places, front


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def replicas(path: Path) -> Iterator[list[Replica]]:
    with two(path) as found:
        yield found


async def test_client_gets_the_replicas_reply(replicas: list[Replica]):
    async with fronted([one.where for one in replicas]) as (client, places, _):
        body = {"messages": [{"role": "user", "content": "hello " * 25}]} | GREEDY
        replies = [(await client.post(CHAT, json=body)).json() for _ in range(2)]
        first, second = (one["choices"][0]["message"]["content"] for one in replies)
        assert first == second
        stream = await client.post(CHAT, json=body | {"stream": True})
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert text_of(events_of(stream.text)[0]) == first
        assert all(place.cancelled for place in places.given), "each gives its place back"
        assert places.keys[0] == prefix_keys(json.dumps(body).encode())
        wrong = await client.post(CHAT, json={"messages": "nonsense"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")
        odd = await client.post(CHAT, json=body | {"nonsense": 1})
        assert (odd.status_code, odd.headers["x-hotset-ignored"]) == (200, "nonsense")
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await client.get("/page/main.js")).status_code == 200
        assert (await client.get("/nowhere?x=1")).status_code == 404
        assert (await client.get("/health")).json() == {"status": "ok"}
        text = (await client.get("/metrics")).text
        assert 'hotset_ready{replica="r1"} 1.0' in text
        assert text.count("# TYPE hotset_answers ") + text.count("# TYPE hotset_answers_total ") == 1


async def test_bodies_are_read_outside_the_loop(replicas: list[Replica], monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []

    def noted(body: bytes) -> list[str]:
        threads.append(threading.current_thread())
        return prefix_keys(body)

    monkeypatch.setattr(front_module, "prefix_keys", noted)

    async with fronted([replicas[0].where]) as (client, places, _):
        assert (await client.post(CHAT, json={"messages": MESSAGES} | GREEDY)).status_code == 200
        assert threading.current_thread() not in threads
        assert places.keys == [prefix_keys(json.dumps({"messages": MESSAGES} | GREEDY).encode())]
    assert len(threads) == 1


async def test_front_checks_keys_and_replicas_accept_only_the_front(replicas: list[Replica]):
    async with fronted([replicas[0].where], api_keys=("k",)) as (client, places, _):
        assert (await client.post(CHAT, json={"messages": MESSAGES})).status_code == 401
        assert not places.given
        body = {"messages": MESSAGES} | GREEDY
        allowed = await client.post(CHAT, json=body, headers={"x-api-key": "k"})
        assert allowed.status_code == 200
    async with httpx.AsyncClient() as stranger:
        for headers in ({}, {"x-hotset-front": "guess"}):
            assert (await stranger.get(f"{replicas[0].where}/v1/models", headers=headers)).status_code == 403


async def test_request_without_a_reply_is_sent_to_another_replica(replicas: list[Replica]):
    with bound_socket("127.0.0.1", 0) as unheard:
        nobody = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        unheard.close()
        async with fronted([nobody, nobody, replicas[1].where]) as (client, places, _):
            for stream in (False, True):
                reply = await client.post(CHAT, json={"messages": MESSAGES, "stream": stream} | GREEDY)
                assert reply.status_code == 200
            assert len(places.given) == 4


async def test_a_replica_that_dies_before_its_answer_costs_nothing_and_within_it_an_error(
    replicas: list[Replica],
):

    slow = replicas[0].service.model.backend
    step, gate, begun = slow.step, threading.Event(), threading.Event()

    def held(batch: Any) -> Any:
        begun.set()
        assert gate.wait(WATCHDOG)
        return step(batch)

    slow.step = held  # type: ignore[method-assign]
    try:
        async with fronted([replicas[0].where, replicas[1].where]) as (client, places, _):
            body = {"prompt": "hello", **GREEDY}
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            while not begun.is_set():
                await asyncio.sleep(0.01)
            places.given[0].died.set()
            reply = await asked
            assert reply.status_code == 200
            assert len(places.given) == 2
            # A chat's stream begins at once: its first event has no text.
            places.order = [replicas[0].where]
            stream = asyncio.create_task(
                client.post(CHAT, json={"messages": MESSAGES, "stream": True} | GREEDY)
            )
            places.replied.clear()
            await places.replied.wait()
            places.given[2].died.set()
            last = events_of((await stream).text)[0][-1]
            assert last["error"]["code"] == "not_ready"
            assert "the replica that answered was lost" in last["error"]["message"]
    finally:
        gate.set()
        slow.step = step  # type: ignore[method-assign]


def test_refusal_of_a_replica_is_final(path: Path):
    replica = Replica(path, max_seconds=0.0)

    async def work() -> None:
        async with fronted([replica.where]) as (client, places, _):
            reply = await client.post(CHAT, json={"messages": MESSAGES} | GREEDY)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "timeout")
            assert len(places.given) == 1

    try:
        asyncio.run(work())
    finally:
        replica.close()


async def test_before_there_are_replicas_and_when_it_ends(replicas: list[Replica]):
    async with fronted([replicas[0].where]) as (client, _, front):
        front.ready.clear()
        for path in ("/health", "/v1/models"):
            reply = await client.get(path)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        front.ready.set()
        front.stopping = True
        assert (await client.post(CHAT, json={"messages": MESSAGES})).status_code == 503
