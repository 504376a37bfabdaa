"""OpenTelemetry spans of requests for answers, with the figures of the request log.

Names follow the semantic conventions for generative AI, or vLLM where these have no name or had another one.
Spans never have the texts of requests or answers. The SDK sends batches in its own thread: if a collector is
slow or away, spans are lost, but answers are not delayed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from hotset.escaping import clause
from hotset.server.answers import Answer
from hotset.server.request_log import Handled
from hotset.server.streams import ADAPTER

log = logging.getLogger("hotset.server")

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    **dict.fromkeys(("/v1/rerank", "/v1/reranking", "/rerank", "/reranking", "/v2/rerank"), "rerank"),
}
"""The routes whose requests have spans, and the names of their operations."""

_FIELDS = {
    "id": ("gen_ai.request.id",),
    "method": ("http.request.method",),
    "path": ("http.route",),
    "status": ("http.response.status_code",),
    "seconds": ("gen_ai.latency.e2e",),
    "prompt_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "cached_tokens": ("gen_ai.usage.cache_read.input_tokens",),
    "completion_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "reasons": ("gen_ai.response.finish_reasons",),
    "queue_seconds": ("gen_ai.latency.time_in_queue",),
    "first_token_seconds": ("gen_ai.latency.time_to_first_token",),
}
"""Attributes by the field of the request log."""

_CLOSE_SECONDS = 3.0  # to send the remaining spans when the server ends
_DEFAULT_PATH = "/v1/traces"


class Traces:
    """A sender of spans to a collector by OTLP over HTTP; a URL without a path gets the usual one.

    The SDK's own environment variables (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, ...) apply.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.path in ("", "/"):
            endpoint = parts._replace(path=_DEFAULT_PATH).geturl()
        # The SDK logs a line for each attempt; _Exporter logs one for all.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        own = Resource({"service.name": "hotset", "service.version": version("hotset")})
        self._provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(endpoint)))
        self._tracer = self._provider.get_tracer("hotset", version("hotset"))
        self._propagator = TraceContextTextMapPropagator()

    def write(self, request: Handled) -> None:
        fields = request.fields
        operation = _OPERATIONS.get(request.scope["path"])
        if operation is None:
            return
        end = time.time_ns()
        attributes = {name: fields[of] for of, names in _FIELDS.items() if of in fields for name in names}
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "hotset"}
        if (model := fields.get("model")) is not None:
            adapter = request.scope.get(ADAPTER)
            attributes["gen_ai.request.model"] = f"{model}:{adapter}" if adapter else model
            attributes["gen_ai.response.model"] = model
        for answer in request.answers:
            if isinstance(answer, Answer):
                attributes |= _parameters(answer)
        if (status := fields["status"]) >= 400:
            attributes["error.type"] = str(status)
        headers = Headers(scope=request.scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"{operation} {model}" if model else operation,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=end - round(fields["seconds"] * 1e9),
        )
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans, if that does not take long."""
        ending = threading.Thread(target=self._provider.shutdown, name="hotset-traces-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_SECONDS)


def _parameters(answer: Answer) -> dict[str, Any]:
    request, params = answer.request, answer.request.params
    found: dict[str, Any] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.n": request.n,
        "gen_ai.usage.num_sequences": len(answer.generations),
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    return found


class _Exporter(SpanExporter):
    """An exporter that logs when spans are lost, and when they arrive again."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._shown = clause(
            urlsplit(endpoint)._replace(netloc=urlsplit(endpoint).netloc.rpartition("@")[2]).geturl()
        )
        self._n_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._n_lost:
                log.warning("traces cannot be sent to %s; spans are lost until it takes them", self._shown)
            self._n_lost += len(spans)
        elif self._n_lost:
            log.warning("traces are sent to %s again; %d spans were lost", self._shown, self._n_lost)
            self._n_lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
