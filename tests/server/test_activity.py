"""The numbers that a chat stream reports about each token equal the step statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import TEMPLATE, write_sparse
from drafters import steady
from tiny_server import MESSAGES, client_of, events_of, text_of, write_model

import hotset
from hotset.backends.base import StepStats
from hotset.server.activity import ActivityReport

__all__ = ["steady"]  # the fixture
BODY = {
    "messages": MESSAGES, "stream": True, "stream_options": {"include_activity": True}, "temperature": 0,
    "max_tokens": 12, "ignore_eos": True,
}  # fmt: skip
CHAT = {"tokenizer.chat_template": TEMPLATE}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("model") / "sparse.gguf", CHAT, dialect="gguf")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def activity_of(text: str, index: int = 0) -> list[dict[str, Any]]:
    events, done = events_of(text)
    assert done
    entries: list[dict[str, Any]] = []
    for event in events:
        if event["choices"] and event["choices"][0]["index"] == index:
            entries += event.get("hotset", {}).get("activity", [])
    return entries


async def test_every_token_has_the_numbers_of_its_step(sparse: Path) -> None:
    async with client_of(sparse) as (client, service):
        model = service.model
        reply = await client.post("/v1/chat/completions", json=BODY)
        entries = activity_of(reply.text)
        chunks = list(model.stream(model.encode_chat(MESSAGES), reuse_prefix=False, **_sampling()))
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert [entry["token"] for entry in entries] == tokens
        decoded = [model.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
        assert [entry["text"] for entry in entries] == decoded
        for entry, chunk in zip(entries, chunks, strict=True):
            stats = chunk.stats
            assert stats is not None
            assert entry["active_share"] == round(stats.active_share, 4)
            assert entry["bytes_touched"] == round(stats.bytes_touched_per_token)
            assert entry["bytes_total"] == round(stats.bytes_total_per_token)
            assert entry["step_tokens"] == stats.n_tokens
            layers = entry["layers"]
            assert layers["active_share"] == [round(layer.active_share, 4) for layer in stats.layers]
            assert layers["bytes"] == [round(layer.bytes) for layer in stats.layers]
            assert "cpu_share" not in layers
        assert entries[0]["step_tokens"] == len(model.encode_chat(MESSAGES))
        seconds = [entry["seconds"] for entry in entries]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
        kv = [entry["bytes_kv"] for entry in entries]
        assert set(np.diff(kv).tolist()) == {model.cost.kv_bytes_per_token(model.kv_type)}


def _sampling() -> dict[str, Any]:
    return {name: BODY[name] for name in ("temperature", "max_tokens", "ignore_eos")}


async def test_a_dense_model_reports_bytes_and_times(dense: Path) -> None:
    async with client_of(dense) as (client, service):
        entries = activity_of((await client.post("/v1/chat/completions", json=BODY)).text)
        assert len(entries) == 12
        model = service.model
        for i, entry in enumerate(entries):
            assert "layers" not in entry
            assert "active_share" not in entry
            depth = len(model.encode_chat(MESSAGES)) + i - 1
            assert entry["bytes_touched"] + entry["bytes_kv"] == round(
                model.cost.bytes_per_token(depth, model.kv_type)
            )


async def test_drafted_tokens_are_marked(dense: Path) -> None:
    """Drafted tokens belong to the step of the token before them.

    The model drafts itself, mostly correctly.
    """
    async with client_of(dense, load={"draft": dense}) as (client, service):
        entries = activity_of((await client.post("/v1/chat/completions", json=BODY)).text)
        marked = [entry.get("drafted", False) for entry in entries]
        assert not marked[0]
        assert all(
            mark == (entry["seconds"] == before["seconds"])
            for before, entry, mark in zip(entries[:-1], entries[1:], marked[1:], strict=True)
        )
        accepted = service.model.thread.counters().accepted_tokens
        # A step gives the accepted tokens and one more, unless the answer ends earlier.
        assert accepted - 1 <= sum(marked) <= accepted
        assert sum(marked) >= 1


async def test_each_choice_has_its_own_tokens(sparse: Path) -> None:
    async with client_of(sparse) as (client, service):
        body = BODY | {"n": 2, "temperature": 1.0, "seed": 3}
        text = (await client.post("/v1/chat/completions", json=body)).text
        for index in (0, 1):
            entries = activity_of(text, index)
            assert len(entries) == 12
            assert text_of(events_of(text)[0], index) == "".join(
                entry["text"] for entry in entries if not service.model.tokenizer.is_special(entry["token"])
            )
        assert [entry["token"] for entry in activity_of(text, 0)] != [
            entry["token"] for entry in activity_of(text, 1)
        ]


async def test_nothing_is_reported_unless_requested(sparse: Path) -> None:
    async with client_of(sparse) as (client, _):
        for options in ({}, {"stream_options": {"include_usage": True}}):
            body = {name: value for name, value in BODY.items() if name != "stream_options"} | options
            assert "hotset" not in (await client.post("/v1/chat/completions", json=body)).text
        whole = {name: value for name, value in BODY.items() if name != "stream"}
        reply = await client.post("/v1/chat/completions", json=whole)
        assert reply.status_code == 200
        assert "hotset" not in reply.json()


def test_cpus_part_is_reported_next_to_a_device(sparse: Path) -> None:
    with hotset.load(sparse, device="cpu", n_threads=1) as model:
        generation = model.prepare(
            [1, 2, 3], hotset.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        )
        with generation:
            for _ in generation.chunks():
                pass
        step = generation.sequence.step_stats[1]
        cold = step.active // 3
        shared = StepStats(
            **{name: getattr(step, name) for name in step.__dataclass_fields__} | {"active_on_cpu": cold}
        )
        generation.sequence.step_stats[1] = shared
        layers = ActivityReport(model).of_token(generation, 1)["layers"]
        n_ff = [ffn.n_ff for ffn in model.graph.ffns]
        assert layers["cpu_share"] == pytest.approx(cold / n_ff, abs=1e-4)
