"""Threads that prepare the text of requests: clients take turns, and long work does not delay short work."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from json_schemas import LONG_TO_COMPILE
from tiny_server import client_of

from hotset.errors import QueueFullError
from hotset.server.preparation import TurnTaking
from hotset.text import constraint
from hotset.text.constraint import Grammars

WATCHDOG = 60.0


@pytest.fixture
def turns() -> Iterator[TurnTaking]:
    """Return a queue of one thread."""
    with closing(TurnTaking("test", 1)) as turns:
        yield turns


async def test_clients_take_turns(turns: TurnTaking):
    done: list[str] = []
    gate = threading.Event()

    jobs = [turns.run("one", gate.wait, WATCHDOG)]
    jobs += [turns.run(name[0], done.append, name) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    tasks = [asyncio.create_task(job) for job in jobs]
    while turns.n_waiting < 6:
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_client_that_leaves_before_its_turn_costs_nothing(turns: TurnTaking):
    done: list[str] = []
    gate = threading.Event()

    first = asyncio.create_task(turns.run("a", gate.wait, WATCHDOG))
    left = [asyncio.create_task(turns.run("a", done.append, "left")) for _ in range(3)]
    stays = asyncio.create_task(turns.run("a", done.append, "stays"))
    while turns.n_waiting < 4:
        await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert turns.n_waiting == 1
    first.cancel()  # it has begun, so its thread is free only when it ends
    gate.set()
    await stays
    assert done == ["stays"]
    with pytest.raises(ZeroDivisionError):
        await turns.run("a", lambda: 1 // 0)
    assert await turns.run("a", lambda: 3) == 3


async def test_the_number_of_waiting_clients_is_limited(turns: TurnTaking):
    gate = threading.Event()

    turns.max_waiting = 2
    tasks = [asyncio.create_task(turns.run("a", gate.wait, WATCHDOG)) for _ in range(3)]
    while turns.n_waiting < 2:
        await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="2 requests are already waiting"):
        await turns.run("b", gate.wait)
    gate.set()
    await asyncio.gather(*tasks)


def grammar_asked(client: httpx.AsyncClient, key: str, i: int) -> Awaitable[httpx.Response]:
    body = {"prompt": "x", "max_tokens": 1, "seed": 1, "regex": f"a{{{i}}}"}
    return client.post("/v1/completions", json=body, headers={"x-api-key": key})


async def test_grammars_of_one_client_do_not_delay_another(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Queue forty slow grammars: a short request overtakes them, and another grammar waits for two."""
    gate, compiled, lock = threading.Event(), [], threading.Lock()
    real = Grammars.constraint

    def slow(self: Grammars, kind: str, text: str, *rest: Any) -> Any:
        with lock:
            compiled.append(text)
        assert gate.wait(WATCHDOG)
        return real(self, "regex", "a", *rest)

    monkeypatch.setattr(Grammars, "constraint", slow)

    async with client_of(path, api_keys=("one", "two")) as (client, service):
        flood = [asyncio.create_task(grammar_asked(client, "one", i)) for i in range(1, 41)]
        turns = service.preparation.text(long=True)
        while turns.n_waiting < 38:
            assert not any(task.done() for task in flood)
            await asyncio.sleep(0)
        other = asyncio.create_task(grammar_asked(client, "two", 99))
        while turns.n_waiting < 39:
            await asyncio.sleep(0)
        plain = {"prompt": "hi", "max_tokens": 2, "seed": 1}
        for key in ("one", "two"):  # another client's, and the same client's
            reply = await client.post("/v1/completions", json=plain, headers={"x-api-key": key})
            assert reply.status_code == 200
        assert not any(task.done() for task in flood)
        gate.set()
        assert {reply.status_code for reply in await asyncio.gather(other, *flood)} == {200}
    assert "a{99}" in compiled[:4]  # after the two that had begun, and at most one more per thread


async def test_a_grammar_that_is_too_slow_is_refused_by_its_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(constraint, "LIMITS", replace(constraint.LIMITS, seconds=0.2))

    async with client_of(path) as (client, _):
        body = {"prompt": "x", "max_tokens": 1, "json_schema": json.loads(LONG_TO_COMPILE)}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 400
        assert "does not compile within 0.2 s of computing and 1024 MiB" in reply.json()["error"]["message"]
