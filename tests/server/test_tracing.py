"""Traces: the spans that a collector receives, and that it does not delay requests."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tiny_server import client_of
from waiting import WATCHDOG, until

import hotset
from hotset.cli import serve
from hotset.cli.serve import ServerOptions
from hotset.server.settings import ServerSettings

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
BODY = {"model": "tiny", "prompt": "secret words"} | GREEDY
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A server for OTLP over HTTP, which decodes the spans that it receives.

    status: of its replies. open: an event that requests wait for.
    """

    def __init__(self) -> None:
        self.status, self.bodies, self.headers, self.paths = (
            200,
            list[bytes](),
            list[dict[str, str]](),
            list[str](),
        )
        self.resource: dict[str, Any] = {}
        self.spans: list[Span] = []
        self.n_refused = 0
        self.open = threading.Event()
        self.open.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.open.wait(WATCHDOG)
                collector.take(self.path, dict(self.headers), body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        if self.status != 200:
            self.n_refused += 1
            return
        self.paths.append(path)
        self.headers.append(headers)
        self.bodies.append(body)
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = attributes(batch.resource)
            self.spans += [span for scope in batch.scope_spans for span in scope.spans]

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WATCHDOG)


def attributes(of: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return (
            [value(each) for each in one.array_value.values] if kind == "array_value" else getattr(one, kind)
        )

    return {one.key: value(one.value) for one in of.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    collector = Collector()
    yield collector
    collector.close()


async def test_a_span_has_the_content_of_a_log_line(path: Path, tmp_path: Path, collector: Collector) -> None:
    log = tmp_path / "log"
    began = time.time_ns()
    async with client_of(path, request_log=str(log), otlp_traces_endpoint=f"{collector.url}/custom/path") as (
        client,
        _,
    ):
        parent = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        await client.post("/v1/completions", json=BODY | {"n": 2, "top_k": 7}, headers=parent)
        stream = {"messages": [{"role": "user", "content": "secret words"}], "stream": True} | GREEDY
        await client.post("/v1/chat/completions", json=stream)
        await client.post("/v1/embeddings", json={"input": ["secret words", "ok"]})
        await client.post("/v1/completions", json=BODY | {"logit_bias": {"99999": 1}})
        await client.post("/v1/messages", json={"model": "secret model", "max_tokens": 3, "messages": []})
        await client.get("/health")
        await client.get("/metrics")
    lines = [json.loads(line) for line in log.read_text().splitlines()][:5]
    assert not any(b"secret" in body for body in collector.bodies)
    assert set(collector.paths) == {"/custom/path"}
    assert collector.resource["service.name"] == "hotset"
    assert collector.resource["service.version"] == version("hotset")
    assert [span.name for span in collector.spans] == [
        "text_completion tiny", "chat tiny", "embeddings tiny", "text_completion tiny", "chat",
    ]  # fmt: skip
    for span, line in zip(collector.spans, lines, strict=True):
        found = attributes(span)
        assert span.kind == Span.SPAN_KIND_SERVER
        assert began <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(line["seconds"], abs=1e-6)
        assert found["gen_ai.operation.name"] == span.name.partition(" ")[0]
        assert found["gen_ai.provider.name"] == "hotset"
        for name, field in (
            ("gen_ai.request.id", "id"), ("gen_ai.request.model", "model"),
            ("gen_ai.response.model", "model"), ("http.request.method", "method"), ("http.route", "path"),
            ("http.response.status_code", "status"),
            ("gen_ai.usage.input_tokens", "prompt_tokens"), ("gen_ai.usage.prompt_tokens", "prompt_tokens"),
            ("gen_ai.usage.output_tokens", "completion_tokens"),
            ("gen_ai.usage.completion_tokens", "completion_tokens"),
            ("gen_ai.usage.cache_read.input_tokens", "cached_tokens"),
            ("gen_ai.response.finish_reasons", "reasons"), ("gen_ai.latency.e2e", "seconds"),
            ("gen_ai.latency.time_in_queue", "queue_seconds"),
            ("gen_ai.latency.time_to_first_token", "first_token_seconds"),
        ):  # fmt: skip
            assert found.get(name) == line.get(field), name
    first, _, vectors, refused, none = map(attributes, collector.spans)
    asked = {"temperature": 0.0, "top_p": 0.95, "top_k": 7, "n": 2, "max_tokens": 4}
    assert {name: first[f"gen_ai.request.{name}"] for name in asked} == asked
    assert first["gen_ai.usage.num_sequences"] == 2
    assert 0 < first["gen_ai.latency.time_in_queue"] < first["gen_ai.latency.time_to_first_token"]
    assert "gen_ai.usage.output_tokens" not in vectors
    assert (refused["error.type"], none["error.type"], first.get("error.type")) == ("400", "400", None)
    spans = collector.spans
    assert (spans[0].trace_id.hex(), spans[0].parent_span_id.hex()) == (TRACE, PARENT)
    assert spans[1].trace_id.hex() != TRACE
    assert not spans[1].parent_span_id


async def test_a_fault_of_the_server_is_an_error_in_the_span(path: Path, collector: Collector) -> None:
    async with client_of(path, otlp_traces_endpoint=f"{collector.url}?tenant=a", max_seconds=0.0) as (
        client,
        _,
    ):
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        await client.post("/v1/completions", json=BODY, headers={"traceparent": "00-" + "z" * 9000})
    assert [span.status.code for span in collector.spans] == [Status.STATUS_CODE_ERROR] * 2
    assert not collector.spans[1].parent_span_id, "which was none"
    assert collector.paths[0] == "/v1/traces?tenant=a"


async def test_opentelemetrys_environment_variables_take_effect(
    path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20k")

    async with client_of(path, otlp_traces_endpoint=collector.url + "/") as (client, _):
        await client.post("/v1/completions", json=BODY)
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}  # its parent is not sampled
        await client.post("/v1/completions", json=BODY, headers=unsampled)
    assert collector.resource["service.name"] == "mine"
    assert collector.resource["deployment.environment.name"] == "test"
    assert collector.headers[0]["authorization"] == "Bearer k"
    assert len(collector.spans) == 1


def test_a_collector_that_refuses_loses_only_spans(
    path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400

    async def work() -> None:
        endpoint = collector.url.replace("127.0.0.1", "user:pass@127.0.0.1")
        async with client_of(path, otlp_traces_endpoint=endpoint) as (client, _):
            for n in (1, 2):
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
                await asyncio.to_thread(until, lambda n=n: collector.n_refused >= n, "nothing is sent")
            collector.status = 200
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            await asyncio.to_thread(until, lambda: bool(collector.spans), "nothing is sent again")

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert len(collector.spans) == 1
    messages = [record.getMessage() for record in caplog.records]
    shown = f"{collector.url}/v1/traces"
    assert messages == [
        f"traces cannot be sent to {shown}; spans are lost until it takes them",
        f"traces are sent to {shown} again; 2 spans were lost",
    ]


async def test_a_collector_that_hangs_does_not_delay_answers(path: Path, collector: Collector) -> None:
    collector.open.clear()

    # the server ends too
    async with client_of(path, otlp_traces_endpoint=collector.url) as (client, _):
        for _ in range(3):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert not collector.bodies
    assert not collector.spans


@pytest.mark.parametrize(
    "url",
    ["localhost:4318", "grpc://a:4317", "http://", "http://a:99999/", "http://[::1/", "", "file:///etc"],
)
def test_a_wrong_address_of_a_collector_is_refused(url: str) -> None:
    with pytest.raises(hotset.InvalidRequestError, match="OTLP over HTTP"):
        ServerSettings(otlp_traces_endpoint=url)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(serve, "find_spec", missing)
    with pytest.raises(hotset.HotsetError, match=r"traces need opentelemetry\.sdk.*\.\[serve,otel\]"):
        ServerOptions(otlp_traces_endpoint="http://localhost:4318").settings()
