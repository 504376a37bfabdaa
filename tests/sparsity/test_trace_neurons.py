"""Traces of neurons, and their replays compared with a real store under a budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, tokens
from byte_models import write_sparse
from cli_runs import inside
from expert_models import FORMS
from expert_models import model as write_experts
from random_traces import TEXT, simulate
from sparse_runs import prepared, write
from stored_weights import stored

import hotset
from hotset.backends.base import BLOCK_SIZE
from hotset.backends.cpu.backend import CpuBackend
from hotset.convert.reorder import reorder
from hotset.errors import FormatError, InvalidRequestError
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType
from hotset.offload.cache_stats import CacheStats
from hotset.report.replay import POLICIES, policies, replay
from hotset.sparsity import recorder, taps
from hotset.sparsity.recorder import record
from hotset.sparsity.trace import EVERY, NeuronTrace, RouteTrace, StoredGroup, open_trace, trace_path

N_TOKENS = 24


def random_trace(n_tokens: int = 60, seed: int = 0) -> NeuronTrace:
    """Return a trace of three layers, two without whole bytes of neurons. Tokens resemble those before."""
    rng = np.random.default_rng(seed)
    sizes = (16, 21, 13)
    fires = [np.cumsum(rng.standard_normal((n_tokens, n)), axis=0) > 1.5 for n in sizes]
    return NeuronTrace(
        bits=tuple(np.packbits(one, axis=1, bitorder="little") for one in fires), n_neurons=sizes,
        neuron_bytes=(100, 101, 102), sparsity="exact", layers=(1, 2, 5), starts=(0, 7), model="m", name="n",
        data="d", stored=(
            StoredGroup(EVERY, 16, 64, 50, 800, 16), StoredGroup(0, 16, 128, 4096, 2000, 2),
            StoredGroup(1, 21, 128, 4096, 2500, 3), StoredGroup(2, 13, 128, 8192, 1500, 13),
        ),
    )  # fmt: skip


def traced(gguf: GGUFFile, mode: str, predictor: str | None = None) -> NeuronTrace | RouteTrace:
    """Return some of test_cpu_backend's tokens."""
    ready, graph = prepared(gguf, mode, predictor)
    options: Any = {"n_blocks": 8, "max_batch": 128, "n_threads": 2, "sparse": mode != "dense"}
    backend = cpu_backend(ready.weights, graph, **options)

    def steps(ids: Any, names: Any) -> Iterator[Any]:
        return taps.of_backend(backend)(ids, names)

    return record(steps, graph, ready.weights, tokens(N_TOKENS), model="m", name="n")


# ---- recording and files ----


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_a_trace_has_the_neurons_that_a_step_needs(tmp_path: Path, mode: str) -> None:
    gguf = write(tmp_path, "bamboo", GGMLType.Q8_0)
    trace = traced(gguf, mode, "svd" if mode == "predicted" else None)
    assert isinstance(trace, NeuronTrace)
    assert trace.sparsity == mode
    ready, graph = prepared(gguf, mode, "svd" if mode == "predicted" else None)
    backend = cpu_backend(ready.weights, graph, n_blocks=8, max_batch=1, n_threads=1, sparse=True)
    for i, id in enumerate(tokens(N_TOKENS)):
        backend.step(batch([(np.array([id]), i, [0])]))
        stats = backend.stats()
        assert stats is not None
        each = [int(trace.chosen(layer)[i].sum()) for layer in range(len(trace.layers))]
        # exact: rows of up are those whose gate fires
        assert each == (stats.up_rows if mode == "exact" else stats.selected).tolist()
    assert trace.cycle == sum(np.sum(counts) for counts in trace.counts) / N_TOKENS
    assert trace.n_tokens == N_TOKENS


def test_requests_are_neurons_in_order() -> None:
    trace = random_trace()
    ids, counts = trace.requests(10, 40)
    assert counts.shape == (30, 3)
    at = 0
    for token in range(10, 40):
        for layer in range(3):
            n = counts[token - 10, layer]
            np.testing.assert_array_equal(ids[at : at + n], np.flatnonzero(trace.chosen(layer)[token]))
            at += n
    assert at == len(ids)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = random_trace()
    trace.save(tmp_path / "t.gguf")
    found = open_trace(tmp_path / "t.gguf")
    assert isinstance(found, NeuronTrace)
    for mine, theirs in zip(found.bits, trace.bits, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert replace(found, bits=trace.bits) == trace
    with pytest.raises(FormatError, match="a trace of experts is needed"):
        RouteTrace.open(tmp_path / "t.gguf")


def damaged() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return changes of a hostile file."""
    beyond = random_trace().bits[1].copy()
    beyond[3, -1] |= 1 << 6
    stored = np.array([0, 16, 128, 1, 1, 1, 21, 128, 1, 1, 2, 13, 128, 1, 1])

    def changed(at: int, value: int) -> np.ndarray:
        made = stored.copy()
        made[at] = value
        return made

    yield "a mode that is none", {"sparsity": "dense"}
    yield "modes", {"sparsity": np.array([True, False])}
    yield "more neurons than bits", {"n_neurons": np.array([16, 21, 17])}
    yield "fewer neurons than bits", {"n_neurons": np.array([16, 21, 8])}
    yield "no neurons", {"n_neurons": np.array([16, 21, 0])}
    yield "too many neurons", {"n_neurons": np.array([16, 21, 1 << 40])}
    yield "fewer sizes than layers", {"neuron_bytes": np.array([100])}
    yield "a size of nothing", {"neuron_bytes": np.array([100, 0, 1])}
    yield "a neuron that is not there", {"bits": beyond}
    yield "another type", {"type": GGMLType.F16}
    yield "a layer of experts", {"tensor": "blk.1.routes"}
    yield "a store of nothing", {"stored": np.zeros(0, np.int64)}
    yield "half a group", {"stored": stored[:7]}
    yield "a layer that is none", {"stored": changed(0, 3)}
    yield "a layer below", {"stored": changed(0, -3)}
    yield "a layer twice", {"stored": changed(0, 1)}
    yield "a layer without a group", {"stored": changed(10, EVERY)}
    yield "another number of rows", {"stored": changed(1, 17)}
    yield "slots of nothing", {"stored": changed(2, 0)}
    yield "slots beyond all memory", {"stored": changed(2, 1 << 50)}


@pytest.mark.parametrize(("what", "change"), [("nothing", {}), *damaged()], ids=lambda value: str(value)[:40])
def test_other_file_than_a_trace_is_refused(tmp_path: Path, what: str, change: dict[str, Any]) -> None:
    trace = random_trace()
    keys: dict[str, Any] = {
        "model": "m", "name": "n", "data": "d", "starts": np.array([0]), "sparsity": "exact",
        "n_neurons": np.array([16, 21, 13]), "neuron_bytes": np.array([100, 101, 102]),
    }  # fmt: skip
    writer = GGUFWriter(tmp_path / "t.gguf", "hotset")
    for key, value in (keys | {k: v for k, v in change.items() if k in (*keys, "stored")}).items():
        writer.add(f"hotset.trace.{key}", value)
    for i, (layer, bits) in enumerate(zip(trace.layers, trace.bits, strict=True)):
        data = change.get("bits", bits) if i == 1 else bits
        name = change.get("tensor", "blk.1.neurons") if i == 0 else f"blk.{layer}.neurons"
        kind = change.get("type", GGMLType.I8) if i == 0 else GGMLType.I8
        width = data.shape[1] // (2 if kind == GGMLType.F16 else 1)
        writer.add_tensor(name, data, kind, (width, len(data)))
    writer.write()
    if what == "nothing":
        assert open_trace(tmp_path / "t.gguf").n_tokens == 60
        return
    with pytest.raises(FormatError, match="is not a trace of experts or neurons"):
        open_trace(tmp_path / "t.gguf")


def test_a_trace_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_BITS", 2 * 736 * 20)
    with pytest.raises(InvalidRequestError, match=r"trace at most 20 of them \(n_tokens=20\)"):
        traced(write(tmp_path, "llama", GGMLType.Q8_0), "exact")


# ---- replaying ----


@pytest.mark.parametrize("seed", [0, 1])
def test_hit_rates_equal_plain_simulations(seed: int) -> None:
    """Compare with a plain simulation, as for experts, with lookups of any length."""
    trace = random_trace(seed=seed)
    replayed = replay(trace)
    assert list(policies(trace)) == [name for name in POLICIES if name != "hotset"]
    requests = [[np.flatnonzero(trace.chosen(i)[t]).tolist() for i in range(3)] for t in range(60)]
    assert replayed.n_counted == sum(len(ids) for layers in requests[30:] for ids in layers)
    for point in replayed.points:
        assert point.n_bytes == point.n_slots * 102
        for policy in ("lru", "optimum"):
            hits = simulate(requests, trace.sizes, policy, point.n_slots)
            assert point.hit_rates[policy] == hits / replayed.n_counted, (policy, point)


def of_rows(weights: Any) -> CacheStats:
    """Return a store's counters, without the embedding."""
    return CacheStats(*weights.store.counts())


def counted(backend: CpuBackend, weights: Any) -> tuple[float, float, int]:
    """Return cache_hit_rate and disk_bytes_per_token of the second half, token by token, and the reads."""
    before = None
    for i, id in enumerate(tokens(N_TOKENS)):
        if i == N_TOKENS // 2:
            before = of_rows(weights)
        backend.step(batch([(np.array([id]), i, [2])]))
    assert before is not None
    done = of_rows(weights) - before
    return done.hit_rate, done.bytes_read / (N_TOKENS - N_TOKENS // 2), done.n_reads


@pytest.mark.parametrize("bundled", [False, True], ids=["plain", "bundled"])
@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("model", ["llama", "opt"])
def test_replay_equals_a_store(tmp_path: Path, model: str, mode: str, bundled: bool) -> None:
    """Check that hits are exactly a store's at any size, and that it reads no more bytes for missing rows."""
    gguf = write(tmp_path, model, GGMLType.Q8_0)
    if bundled:
        reorder(gguf.path, tmp_path / "bundled.gguf", None, bundle=True)
        gguf = open_gguf(tmp_path / "bundled.gguf")
    predictor = "svd" if mode == "predicted" else None
    trace = traced(gguf, mode, predictor)
    for share in (0.0, 0.05, 0.3, 0.7, 1.0):
        backend, weights = stored(gguf, mode, share, predictor=predictor, gap=0)
        [point] = replay(trace, (), sizes=[weights.shares.rows]).points
        hit_rate, n_bytes, n_reads = counted(backend, weights)
        assert point.cache_hit_rate == hit_rate, share
        assert n_bytes <= point.disk_bytes_per_token * (1 + 1e-9)
        assert (n_reads == 0) == (point.disk_bytes_per_token == 0)
        backend.close()


def test_records_of_whole_pages_are_read_as_was_said(tmp_path: Path) -> None:
    """Check that bytes are exact for records of whole pages, as in all but the smallest models."""
    wide = write(tmp_path, "bamboo", GGMLType.F32, n_embd=512, n_ff=96)
    reorder(wide.path, tmp_path / "bundled.gguf", None, bundle=True)
    gguf = open_gguf(tmp_path / "bundled.gguf")
    trace = traced(gguf, "predicted", "svd")
    assert {group.read_bytes for group in trace.stored} == {8192}
    backend, weights = stored(gguf, "predicted", 0.2, predictor="svd", gap=0)
    assert weights.store is not None
    least, most = weights.store.least_bytes, weights.store.most_bytes
    [point] = replay(trace, (), sizes=[least + int(0.2 * (most - least))]).points
    hit_rate, n_bytes, _ = counted(backend, weights)
    assert (point.cache_hit_rate, point.disk_bytes_per_token) == (hit_rate, n_bytes)


@pytest.mark.parametrize("form", list(FORMS)[:2])
def test_replay_equals_a_store_of_experts(tmp_path: Path, form: str) -> None:
    gguf = write_experts(tmp_path, **FORMS[form])
    trace = traced(gguf, "dense")
    assert isinstance(trace, RouteTrace)
    for share in (0.0, 0.3, 0.7, 1.0):
        backend, weights = stored(gguf, "dense", share)
        [point] = replay(trace, (), sizes=[weights.shares.rows]).points
        assert point.cache_hit_rate == counted(backend, weights)[0], share
        assert point.hit_rates["budget"] == point.cache_hit_rate
        backend.close()


# ---- the command line ----


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_trace_and_replay(tmp_path: Path, mode: str) -> None:
    model, text = write_sparse(tmp_path / "m.gguf"), tmp_path / "text.txt"
    text.write_text(TEXT)
    how = ["--sparsity", "exact"] if mode == "exact" else []  # the file has predictors
    done = inside("trace", model, "-f", text, "-c", 64, "--json", *how)
    facts = json.loads(done.stdout)
    trace = open_trace(trace_path(model))
    assert isinstance(trace, NeuronTrace)
    assert trace.sparsity == mode
    assert facts["n_neurons"] == list(trace.n_neurons)
    assert facts["token_cycle"] == trace.token_cycle
    done = inside("trace", "--replay", trace_path(model), "--rows", 0.0001, "--rows", 0.001, "--json")
    points = json.loads(done.stdout)["points"]
    assert [point["n_bytes"] for point in points] == [int(0.0001 * 2**30), int(0.001 * 2**30)]
    done = inside("trace", "--replay", trace_path(model))
    assert "read" in done.stdout
    assert "budget: what --ram-budget does" in done.stderr
    inside("trace", model, "-f", text, "--rows", 1, "-o", tmp_path / "x", returns=2)
    done = inside("trace", model, "-f", text, "--sparsity", "dense", "-o", tmp_path / "x", returns=None)
    assert (done.returncode, "nothing to trace" in done.stderr) == (2, True)


def test_run_under_a_budget_has_the_predicted_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a run from a model's name to its answer: the prompt, then the answer's tokens one by one."""
    from hotset.placement import ram

    monkeypatch.setattr(ram, "own_memory", lambda: 0)
    monkeypatch.setattr(ram, "PROGRAM", 0)
    model = write_sparse(tmp_path / "m.gguf")
    settings: dict[str, Any] = {"n_ctx": BLOCK_SIZE, "device": "cpu", "max_batch": 1}
    with hotset.load(model, **settings, ram_budget=0.5) as roomy:
        assert roomy.ram is not None
        fixed = roomy.ram.total - roomy.ram.neurons
        room = roomy.ram.all_rows * 4 // 5  # half of it is for the larger layer
    with hotset.load(model, **settings, ram_budget=(fixed + room) / 2**30) as under:
        assert under.ram is not None
        assert under.stored is not None
        prompt = list(range(3, 13))
        answer = under.generate(prompt, max_tokens=9, temperature=0, ignore_eos=True)
        ids = [*prompt, *answer.tokens][: 10 + 8]  # the last token is not computed
        rows, counts = under.ram.neurons, under.stored.counts()
    with hotset.load(model, **settings) as mapped:
        trace = record(mapped.tap_steps, mapped.graph, mapped.weights, np.array(ids), model="m", name="n")
    assert isinstance(trace, NeuronTrace)
    # After equally many tokens that need nothing, so that all of its own are counted.
    behind = tuple(np.concatenate([np.zeros_like(bits), bits]) for bits in trace.bits)
    replayed = replay(replace(trace, bits=behind), (), sizes=[rows])
    assert counts.hits + counts.misses == replayed.n_counted
    assert counts.hits / replayed.n_counted == replayed.points[0].cache_hit_rate
    assert 0 < counts.hits < replayed.n_counted
