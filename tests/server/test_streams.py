"""Streams before the first token: events that keep the timers of agents from expiring."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_server import Serving
from waiting import WATCHDOG

pytest.importorskip("hotset._core", reason="the native module is not built")

MESSAGES = [{"role": "user", "content": "hello"}]
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
}
SIGNS = {"/v1/messages": "event: ping", "/v1/responses": "event: response.in_progress"}


@pytest.mark.parametrize("route", ANSWERS)
def test_a_waiting_stream_sends_keep_alive_events(path: Path, route: str) -> None:
    sign, body = (
        SIGNS.get(route, ": keep-alive"),
        {"model": "tiny", "stream": True, "temperature": 0, **ANSWERS[route]},
    )
    with Serving(path, keep_alive_seconds=0.01) as server:
        step, gate = server.model.backend.step, threading.Event()

        def held(batch: Any) -> Any:
            assert gate.wait(WATCHDOG)
            return step(batch)

        server.model.backend.step = held  # type: ignore[method-assign]
        lines = []
        with server.client.stream("POST", route, json=body) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                if lines.count(sign) == 5:
                    gate.set()
        server.model.backend.step = step  # type: ignore[method-assign]
    assert lines.count(sign) >= 5
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if route == "/v1/responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert all("response" in event for event in events if event["type"] == "response.in_progress")
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
    if route == "/v1/messages":
        assert events[-1]["type"] == "message_stop"
