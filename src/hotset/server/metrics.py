"""Metrics of a server for Prometheus.

Names and labels are a contract: no label has values that a request could invent.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.api import Model
from hotset.report.experts import expert_counts
from hotset.server.answers import Answer
from hotset.server.key_limits import Holder
from hotset.server.vectors import Vectors

# Counters of the engine (engine/counters.py): name → its field, its description.
ENGINE_COUNTERS = {
    "hotset_steps": ("steps", "Steps (batches of tokens) that the engine computed."),
    "hotset_step_seconds": ("step_seconds", "Seconds that the engine's steps took."),
    "hotset_prompt_tokens": ("prompt_tokens", "Prompt tokens that were computed."),
    "hotset_cached_prompt_tokens": ("reused_tokens", "Prompt tokens that were found in the prefix cache."),
    "hotset_restored_prompt_tokens": (
        "restored_tokens",
        "Prompt tokens that were read from the prompt cache on disk.",
    ),
    "hotset_generated_tokens": ("generated_tokens", "Tokens of answers that were generated."),
    "hotset_answer_steps": ("answer_steps", "Steps in which an answer got tokens, summed over answers."),
    "hotset_drafted_tokens": ("drafted_tokens", "Drafted tokens that were verified."),
    "hotset_accepted_tokens": ("accepted_tokens", "Drafted tokens that were accepted."),
    "hotset_preemptions": (
        "preemptions",
        "Sequences that were preempted: their KV cache blocks were freed, and are computed again.",
    ),
    "hotset_refused": ("refused", "Requests that were refused because the queue was full."),
}
PROMPT_CACHE_COUNTERS = {  # with a prompt cache on disk
    "hotset_prompt_cache_blocks_read": (
        "blocks_read",
        "Blocks that were read from the prompt cache on disk.",
    ),
    "hotset_prompt_cache_read_bytes": ("bytes_read", "Bytes that were read from the prompt cache on disk."),
    "hotset_prompt_cache_blocks_written": (
        "blocks_written",
        "Blocks that were written to the prompt cache on disk.",
    ),
    "hotset_prompt_cache_written_bytes": (
        "bytes_written",
        "Bytes that were written to the prompt cache on disk.",
    ),
    "hotset_prompt_cache_blocks_evicted": (
        "blocks_evicted",
        "Blocks of the prompt cache on disk that were deleted to free space.",
    ),
    "hotset_prompt_cache_blocks_damaged": (
        "blocks_damaged",
        "Blocks of the prompt cache on disk that were damaged, and were deleted.",
    ),
    "hotset_prompt_cache_sequences_dropped": (
        "sequences_dropped",
        "Answers that were not stored in the prompt cache on disk, because too many waited.",
    ),
    "hotset_prompt_cache_write_errors": (
        "write_errors",
        "Answers that were not stored in the prompt cache, because writing to the disk failed.",
    ),
}
PROMPT_CACHE_GAUGES = {
    "hotset_prompt_cache_bytes": (
        "bytes",
        "Size of the prompt cache on disk, of all models, when it was last measured.",
    ),
}
DISK_COUNTERS = {  # under a budget of memory
    "hotset_row_hits": ("hits", "Rows of neurons that were in memory when they were needed."),
    "hotset_row_misses": ("misses", "Rows of neurons that were read from the disk."),
    "hotset_disk_read_bytes": ("bytes_read", "Bytes of neuron rows that were read from the disk."),
    "hotset_disk_reads": ("n_reads", "Disk reads of neuron rows."),
    "hotset_disk_wait_seconds": (
        "seconds_waited",
        "Seconds that steps waited for neuron rows from the disk.",
    ),
    "hotset_disk_streamed_bytes": (
        "bytes_streamed",
        "Bytes of weights that do not fit in memory, read from the disk in each step.",
    ),
}
EXPERT_COUNTERS = {  # of an MoE model with a cache of experts
    "hotset_expert_hits": ("hits", "Experts of tokens that were in the cache of experts."),
    "hotset_experts_streamed": ("streamed", "Experts of tokens that a device fetched and computed."),
    "hotset_experts_on_cpu": ("on_cpu", "Experts of tokens that the CPU computed for a device."),
    "hotset_experts_fetched": ("fetched", "Experts that were copied into a device's memory."),
    "hotset_experts_read": ("misses", "Experts that were read from the disk."),
}
IMAGE_COUNTERS = {  # of a model that reads images (images.py)
    "hotset_images": ("read", "Images in prompts."),
    "hotset_image_tokens": ("tokens", "Tokens of images in prompts."),
    "hotset_images_encoded": ("encoded", "Images that the encoder computed; the others were kept."),
    "hotset_image_encoder_seconds": ("seconds", "Seconds that the encoder took."),
}
IMAGE_GAUGES = {"hotset_image_cache_bytes": ("cached_bytes", "Size of the encoded images that are kept.")}
ENGINE_GAUGES = {
    "hotset_sequences_running": ("running", "Sequences that are running."),
    "hotset_sequences_waiting": ("waiting", "Sequences that wait in the queue."),
    "hotset_cache_blocks": ("blocks", "Blocks of the KV cache, each of 64 tokens."),
    "hotset_cache_blocks_used": ("blocks_used", "Blocks of the KV cache that running sequences use."),
    "hotset_cache_blocks_idle": (
        "blocks_cached",
        "Blocks of the KV cache that hold a prefix for later requests.",
    ),
}
ENGINE_MOST = {"hotset_sequences_most": ("most", "Most sequences that run at the same time.")}
STEP_SIZES = (
    "hotset_step_size_seconds",
    "Seconds that a step of n_tokens tokens takes, as measured for speculative decoding.",
)

# Metrics of a server with several models.
MODELS_LIMIT = ("hotset_models_memory_limit_bytes", "Memory limit of all loaded models together.")
MODEL_GAUGES = {
    "hotset_model_loaded": ("loaded", "1 for a model that is loaded."),
    "hotset_model_memory_bytes": ("memory", "Memory of a model: weights, cache and buffers."),
    "hotset_model_requests": ("holds", "Requests that use a model."),
    "hotset_model_requests_waiting": ("waiting", "Requests that wait for a model to be loaded."),
    "hotset_model_load_progress": ("progress", "Progress of the current stage of a load, from 0 to 1."),
}
MODEL_COUNTERS = {
    "hotset_model_loads": (("model", "result"), "Loads of models, by result: loaded or failed."),
    "hotset_model_unloads": (("model", "reason"), "Unloaded models, by reason: idle, memory or request."),
}

_TO_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The counters of one service, in a registry of their own. now: returns the metrics of each scrape."""

    def __init__(self, now: Callable[[], Iterator[Metric]]) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Now(now))
        self.requests = Counter(
            "hotset_http_requests", "Requests by route and status.", ("route", "status"), registry=registry
        )
        self.answers = Counter("hotset_answers", "Answers by how they ended.", ("reason",), registry=registry)
        self.to_first = Histogram(
            "hotset_time_to_first_token_seconds",
            "From a request's arrival to the first token of an answer.",
            buckets=_TO_FIRST,
            registry=registry,
        )
        self.per_token = Histogram(
            "hotset_time_per_token_seconds",
            "Mean time of a token after the first, by answer.",
            buckets=_PER_TOKEN,
            registry=registry,
        )
        self.whole = Histogram(
            "hotset_request_seconds",
            "From a request's arrival to the end of its last answer.",
            buckets=_WHOLE,
            registry=registry,
        )
        for reason in ("stop", "length", "cancelled", "error"):  # there from the first scrape on
            self.answers.labels(reason)

    def count(self, answer: Answer | Vectors) -> None:
        """Count an answer or vectors that are closed."""
        self.whole.observe(time.perf_counter() - answer.asked)
        for reason, n in Counts(answer.reasons).items():
            self.answers.labels(reason).inc(n)
        for generation in answer.generations if isinstance(answer, Answer) else ():
            sequence = generation.sequence
            if sequence.first_token:
                self.to_first.observe(sequence.first_token - answer.asked)
            if sequence.predicted_per_second:
                self.per_token.observe(1 / sequence.predicted_per_second)


def engine_metrics(models: Sequence[tuple[tuple[str, ...], Model]]) -> Iterator[Metric]:
    """Yield the metrics of engines. Each model comes with the values of its labels: none, or its name."""
    labels = ("model",) if any(values for values, _ in models) else ()

    def families(
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        named: Mapping[str, tuple[str, str]],
        counts: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]],
    ) -> Iterator[Metric]:
        for name, (field, what) in named.items() if counts else ():
            family = kind(name, what, labels=labels)
            for values, count in counts:
                family.add_metric(values, count[field])
            yield family

    engines = [(values, asdict(model.thread.counters())) for values, model in models]
    yield from families(CounterMetricFamily, ENGINE_COUNTERS, engines)
    yield from families(GaugeMetricFamily, ENGINE_GAUGES, engines)
    disks = [(values, asdict(model.stored.counts())) for values, model in models if model.stored is not None]
    yield from families(CounterMetricFamily, DISK_COUNTERS, disks)
    caches = [
        (values, asdict(cache.counts))
        for values, model in models
        if (cache := model.engine.scheduler.prompt_cache) is not None
    ]
    yield from families(CounterMetricFamily, PROMPT_CACHE_COUNTERS, caches)
    yield from families(GaugeMetricFamily, PROMPT_CACHE_GAUGES, caches)
    images = [(values, asdict(model.images.counts)) for values, model in models if model.images is not None]
    yield from families(CounterMetricFamily, IMAGE_COUNTERS, images)
    yield from families(GaugeMetricFamily, IMAGE_GAUGES, images)
    counted = [
        (values, expert_counts(model.decided.graph, model.backend, model.stored)) for values, model in models
    ]
    fields = [field for field, _ in EXPERT_COUNTERS.values()]
    experts = [
        (values, {field: getattr(counts, field) for field in fields})
        for values, counts in counted
        if counts is not None
    ]
    yield from families(CounterMetricFamily, EXPERT_COUNTERS, experts)
    most = [(values, {"most": model.engine.max_sequences}) for values, model in models]
    yield from families(GaugeMetricFamily, ENGINE_MOST, most)
    sizes = GaugeMetricFamily(*STEP_SIZES, labels=(*labels, "n_tokens"))
    for values, model in models:
        speculator = model.engine.speculator
        measured = speculator.step_times.measured if speculator is not None else {}
        for n, seconds in measured.items():
            sizes.add_metric((*values, str(n)), seconds)
    if sizes.samples:
        yield sizes


class _Now(Collector):
    """A collector of the metrics that are computed at each scrape."""

    def __init__(self, now: Callable[[], Iterator[Metric]]) -> None:
        self._now = now

    def collect(self) -> Iterator[Metric]:
        return self._now()


class OfHolder(Collector):
    """A view of a registry for the holder of a key: without models that the holder may not use."""

    def __init__(self, registry: CollectorRegistry, holder: Holder) -> None:
        self._registry, self._holder = registry, holder

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                one
                for one in metric.samples
                if "model" not in one.labels or self._holder.may_ask(one.labels["model"])
            ]
            yield metric


class RequestCounter:
    """Middleware that counts requests, refused or not, by their route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, noted)
