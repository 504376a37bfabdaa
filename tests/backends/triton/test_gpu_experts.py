"""MoE models on a device, with CPU tensors in place of the GPU's: the same bits with any cache of experts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, logits_of, tokens
from cases import quick_are
from expert_models import FORMS, model
from worker_runs import offload

torch = pytest.importorskip("torch")

from fake_cuda import LateStream  # noqa: E402
from gpu_runs import Recorder  # noqa: E402
from hybrid_runs import EVEN, LINK_ONLY, SMALL, hybrid  # noqa: E402
from sparse_runs import TOLERANCE, relative_error  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402
from waiting import within  # noqa: E402

from hotset.backends.pipeline import ChainBackend  # noqa: E402
from hotset.backends.reference import ReferenceBackend  # noqa: E402
from hotset.backends.triton import fallback  # noqa: E402
from hotset.backends.triton.experts import GpuExpertCache, can_hold  # noqa: E402
from hotset.backends.triton.stage import GpuStage  # noqa: E402
from hotset.backends.triton.weights import DeviceWeights  # noqa: E402
from hotset.errors import DeviceError  # noqa: E402
from hotset.formats.gguf import GGUFFile  # noqa: E402
from hotset.formats.quants import GGMLType as T  # noqa: E402
from hotset.model.config import config_from_gguf  # noqa: E402
from hotset.model.decoder import describe  # noqa: E402
from hotset.model.graph import Graph  # noqa: E402
from hotset.model.operations import Ffn, Heads, Route, Value  # noqa: E402
from hotset.offload.cache_stats import CacheStats  # noqa: E402
from hotset.offload.misses import Fetching, MissRates  # noqa: E402


@pytest.mark.parametrize("form", ["floats", "biased", "shared", "groups", "chosen", "neuron-major"])
def test_a_moe_on_a_device_is_the_references(tmp_path: Path, form: str) -> None:
    gguf = model(tmp_path, **(FORMS[form] | FORMS["floats"]))
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    ids, splits = tokens(20), [18, 19]
    reference = ReferenceBackend(gguf, graph, n_blocks=8, max_batch=128, kv_type="f32")
    expected = logits_of(reference, ids, splits, [2])
    backend = hybrid(gguf)
    found = within(120, lambda: logits_of(backend, ids, splits, [2]))
    backend.close()
    assert relative_error(found, expected) < TOLERANCE


def alone(gguf: GGUFFile, layer: int, h: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the CPU engine's route and sum of one layer's experts, for any input and scores."""
    whole_graph = describe(config_from_gguf(gguf), gguf.tensors)
    ffn = whole_graph.ffns[layer]
    assert isinstance(ffn.select, Route)
    graph = Graph()
    both = graph.value("both", h.shape[1] + scores.shape[1])
    x = graph.add(Heads(graph.value("h", h.shape[1]), both, 1))
    routed = graph.add(Heads(graph.value("scores", scores.shape[1]), both, 1, h.shape[1]))
    own = {value: graph.value(value.name, value.width) for value in inner_values(ffn)}
    graph.add(moved(ffn, own | {ffn.x: x, ffn.select.x: routed}))
    backend = cpu_backend(gguf, graph, n_blocks=8, max_batch=len(h), n_threads=2)
    name = ffn.select.out.name
    rows = backend.run(batch([(tokens(len(h)), 0, [0, 1])], (name,)), np.concatenate([h, scores], 1)).copy()
    return backend.tapped[name], rows


def inner_values(ffn: Ffn) -> list[Value]:
    return [op.out for op in ffn.primitives]


def moved(op: Any, to: dict[Value, Value]) -> Any:
    """Return the operation, with its inner operations, on other values."""
    made = {}
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, Value):
            value = to[value]
        elif is_dataclass(value):
            value = moved(value, to)
        made[field.name] = value
    return type(op)(**made)


@pytest.mark.parametrize("form", FORMS)
def test_experts_and_their_sum_have_the_cpus_bits(tmp_path: Path, form: str) -> None:
    gguf = model(tmp_path, **FORMS[form])
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    route = graph.ffns[1].route
    assert route is not None
    rng = np.random.default_rng(0)
    h = rng.standard_normal((70, graph.ffns[1].x.width)).astype(np.float32)
    routed, expected = alone(gguf, 1, h, rng.standard_normal((70, route.x.width)).astype(np.float32))
    ids, weights = torch.from_numpy(routed).split(route.n_used, dim=1)
    for n_threads, n in ((1, 1), (2, 2), (2, 9), (2, 70)):
        worker = offload(gguf, graph, {}, experts=[0, 1], max_batch=n, n_threads=n_threads)
        with worker.step(n):
            worker.submit(1, torch.from_numpy(h[:n]), ids[:n].to(torch.int32))
            parts = worker.collect(1).view(n, route.n_used, -1)
        np.testing.assert_array_equal(fallback.sum_experts(parts, weights[:n]).numpy(), expected[:n])
        np.testing.assert_array_equal(worker.route(1), ids[:n])
        assert worker.route(0).shape == (0, route.n_used)
        worker.close()


def test_experts_of_the_device_are_not_requested_from_the_cpu(tmp_path: Path) -> None:
    gguf = model(tmp_path)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    worker = offload(gguf, graph, {}, experts=[0], max_batch=4, n_threads=2)
    h = torch.ones(2, graph.ffns[0].x.width)
    for asked in ([[3, -1 - 2, 8], [-1 - 3, -1 - 8, -1]], [[-1, -2, -3], [-4, -5, -6]]):
        ids = torch.tensor(asked, dtype=torch.int32)
        with worker.step(2):
            worker.submit(0, h, ids)
            parts = worker.collect(0).view(2, 3, -1)
        assert worker.route(0).tolist() == asked
        n_rows = graph.ffns[0].n_ff // 9
        assert worker.counts()[:, 0].tolist() == [n_rows * int((ids >= 0).sum())]
    assert parts.shape == (2, 3, graph.ffns[0].out.width)
    worker.close()


CACHED = {name: form for name, form in FORMS.items() if name != "one used"}
CACHED["mxfp4"] = {"type_of": lambda name: T.MXFP4 if "_exps" in name else T.F32, "biased": True}


@pytest.mark.parametrize("form", quick_are(("mixed", "groups"), CACHED))
def test_the_same_bits_with_any_cache(tmp_path: Path, form: str) -> None:
    gguf = model(tmp_path, **CACHED[form])
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    route = graph.ffns[0].route
    assert route is not None
    ids, splits = tokens(30), [18, *range(25, 30)]
    expected = None
    for n_slots in (0, 2 * route.n_used + 1, 2 * route.x.width):
        backend = hybrid(gguf, expert_slots=n_slots, n_threads=1 + n_slots % 2)
        found = within(120, lambda backend=backend: logits_of(backend, ids, splits, [2]))
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected)
        counts = counted(backend)
        assert counts.hits + counts.on_cpu == 30 * 2 * route.n_used
        assert (counts.hits > 0) == (n_slots > 0)
        if n_slots == 2 * route.x.width:
            assert counts.fetched == sum(len(np.unique(r)) for r in all_routes(gguf, ids, splits))
        backend.close()


def all_routes(gguf: GGUFFile, ids: np.ndarray, splits: list[int]) -> list[np.ndarray]:
    """Return the experts of each layer, as the device's router chose them."""
    backend = hybrid(gguf)
    names = ("blk.0.ffn_route", "blk.1.ffn_route")
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for first, last in zip([0, *splits], [*splits, len(ids)], strict=True):
        result = backend.step(batch([(ids[first:last], first, [2])], names))
        for name in names:
            found[name].append(result.taps[name][:, : result.taps[name].shape[1] // 2])
    backend.close()
    return [np.concatenate(found[name]) for name in names]


@pytest.mark.slow
def test_a_captured_step_knows_nothing_of_experts(tmp_path: Path) -> None:
    """Check a captured step that is replayed while experts change: it uses only the capture's addresses."""
    gguf = model(tmp_path)
    ids, splits, recorder = tokens(24), [*range(6, 24)], Recorder()
    expected = logits_of(hybrid(gguf), ids, splits, [2])
    backend = hybrid(gguf, expert_slots=8, capture=recorder)
    np.testing.assert_array_equal(within(120, lambda: logits_of(backend, ids, splits, [2])), expected)
    assert recorder.made[-1].n_replays == len(splits) - 1
    counts = counted(backend)
    assert counts.fetched > 8
    assert counts.hits > 0
    assert counts.on_cpu > 0
    backend.close()


def test_slots_are_refilled_during_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a copying thread, as on a GPU: an expert is used after its arrival, not during the copy."""
    made, caches = GpuExpertCache.__init__, list[GpuExpertCache]()

    def with_thread(self: GpuExpertCache, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        self._copies = ThreadPoolExecutor(1)
        caches.append(self)

    monkeypatch.setattr(GpuExpertCache, "__init__", with_thread)
    gguf = model(tmp_path)
    ids, splits = tokens(30), [18, *range(22, 30)]
    expected = logits_of(hybrid(gguf), ids, splits, [2])
    for n_slots in (5, 18):
        backend = hybrid(gguf, expert_slots=n_slots)
        np.testing.assert_array_equal(within(120, lambda b=backend: logits_of(b, ids, splits, [2])), expected)
        caches[-1].settle()
        assert counted(backend).fetched >= n_slots
        backend.close()


def test_prompt_does_not_flush_entries_of_decoding(tmp_path: Path) -> None:
    gguf = model(tmp_path)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    weights = DeviceWeights(gguf, torch.device("cpu"))
    cache = GpuExpertCache(weights, graph.ffns, 6, sparse=False)
    used = np.array([[0, 1, 2]], np.int32)
    for _ in range(3):
        cache.begin_step()
        cache.learn({0: used, 1: used})
    many = np.tile(np.array([3, 4, 5], np.int32), (20, 1))
    cache.learn({0: many, 1: many})
    cache.begin_step()
    for layer in (0, 1):
        assert (cache.table(layer)[:3] >= 0).all()
        assert (cache.table(layer)[3:] < 0).all()
    assert cache.n_fetched == 6
    assert cache.nbytes > 6 * 3 * 256 * 256 // 2


def test_layers_of_other_types_have_slots_of_their_own(tmp_path: Path) -> None:
    types = {"blk.0.ffn_down_exps": T.Q6_K, "blk.1.ffn_down_exps": T.Q8_0}
    gguf = model(tmp_path, type_of=lambda name: types.get(name.removesuffix(".weight"), T.Q4_0))
    ids, splits = tokens(20), [*range(10, 20)]
    expected = logits_of(hybrid(gguf), ids, splits, [2])
    backend = hybrid(gguf, expert_slots=9)
    np.testing.assert_array_equal(within(120, lambda: logits_of(backend, ids, splits, [2])), expected)
    assert counted(backend).hits > 0
    backend.close()
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    cache = GpuExpertCache(DeviceWeights(gguf, torch.device("cpu")), graph.ffns, 9, sparse=False)
    for _ in range(9):
        for id in range(9):
            cache.begin_step()
            cache.learn(dict.fromkeys((0, 1), np.array([[id]], np.int32)))
    cache.begin_step()
    assert [int((cache.table(layer) >= 0).sum()) for layer in (0, 1)] == [4, 5]


def test_which_experts_a_device_can_hold(tmp_path: Path) -> None:
    def held(device: str = "cpu", **options: Any) -> bool:
        gguf = model(tmp_path, **options)
        ffn = describe(config_from_gguf(gguf), gguf.tensors).ffns[0]
        return can_hold(ffn, gguf.tensors, torch.device(device))

    assert held()
    assert held("cuda")
    assert not held("mps")  # without float64
    assert not held(type_of=lambda _: T.IQ4_NL)
    assert not held(keys={"llama.hidden_activation": "gelu"})  # erf comes from a library
    neuron_major = FORMS["neuron-major"]
    assert held(**neuron_major)
    assert not held("cuda", **neuron_major)


# ---- fetching missing experts

CPU_ONLY = MissRates(cpu=1e9, cpu_beside=1e9, many=1e9, link=0.0, link_beside=0.0)


def counted(backend: ChainBackend) -> CacheStats:
    [stage] = backend.stages
    assert isinstance(stage, GpuStage)
    return stage.expert_counts()


@pytest.mark.parametrize("form", quick_are(("biased",), ["mixed", "biased", "neuron-major"]))
def test_same_bits_for_any_processor_of_missing_experts(tmp_path: Path, form: str) -> None:
    gguf = model(tmp_path, **(CACHED[form] | SMALL))
    route = describe(config_from_gguf(gguf), gguf.tensors).ffns[0].route
    assert route is not None
    ids, splits = tokens(21), [12, 18, 19, 20]
    backend = hybrid(gguf)
    expected = within(120, lambda: logits_of(backend, ids, splits, [2]))
    backend.close()
    for rates, n_slots in ((CPU_ONLY, 5), (EVEN, 0), (EVEN, 5), (LINK_ONLY, 0), (LINK_ONLY, 5)):
        n_spare = route.x.width if rates is LINK_ONLY else 3
        given: dict[str, Any] = {"expert_slots": n_slots, "fetching": Fetching(rates, n_spare)}
        backend = hybrid(gguf, **given)
        found = within(120, lambda backend=backend: logits_of(backend, ids, splits, [2]))
        np.testing.assert_array_equal(found, expected)
        counts = counted(backend)
        assert counts.needed == 21 * 2 * route.n_used
        assert (counts.streamed > 0) == (rates is not CPU_ONLY)
        assert (counts.on_cpu > 0) == (rates is not LINK_ONLY)
        assert (counts.hits > 0) == (n_slots > 0)
        if n_slots == 0:  # nothing is cached
            fetched = [
                len(np.unique(routes[first:last]))
                for routes in all_routes(gguf, ids, splits)
                for first, last in zip([0, *splits], [*splits, len(ids)], strict=True)
            ]
            most = sum(fetched)  # each expert once per step
            assert counts.fetched == most if rates is LINK_ONLY else 0 < counts.fetched < most
        backend.close()


def test_a_captured_step_fetches_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a captured step's fetches depend on its tokens and on the cache at that time."""
    plain = fallback.fetch_experts

    def unseen(*arguments: Any) -> None:  # a device reads the host's memory through addresses, not tensors
        with _disable_current_modes():
            plain(*arguments)

    monkeypatch.setattr(fallback, "fetch_experts", unseen)
    gguf = model(tmp_path, **SMALL)
    ids, splits, recorder = tokens(12), [*range(6, 12)], Recorder()
    expected = within(120, lambda: logits_of(hybrid(gguf), ids, splits, [2]))
    backend = hybrid(gguf, expert_slots=4, fetching=Fetching(EVEN, 4), capture=recorder)
    np.testing.assert_array_equal(within(120, lambda: logits_of(backend, ids, splits, [2])), expected)
    assert recorder.made[-1].n_replays == len(splits) - 1
    counts = counted(backend)
    assert min(counts.hits, counts.streamed, counts.on_cpu) > 0
    backend.close()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """Return the side stream of every backend that is made."""
    late = LateStream()
    monkeypatch.setattr("hotset.backends.triton.experts_fetch.SideStream", lambda device: late)
    return late


def test_fetched_experts_are_awaited(tmp_path: Path, late: LateStream) -> None:
    gguf = model(tmp_path, experts=(12, 4), **SMALL)
    ids, splits = tokens(60), [40, 45, 46]
    expected = within(120, lambda: logits_of(hybrid(gguf), ids, splits, [2]))
    backend = hybrid(gguf, expert_slots=4, fetching=Fetching(LINK_ONLY, 4))
    np.testing.assert_array_equal(within(120, lambda: logits_of(backend, ids, splits, [2])), expected)
    assert late.n_done > 2 * 4  # a prompt's experts arrive in more groups than there are buffer halves
    assert not late.waiting
    backend.close()


@pytest.mark.parametrize("architecture", ["smallthinker", "llama"])
def test_early_router_fetches_experts_during_attention(
    tmp_path: Path, late: LateStream, architecture: str
) -> None:
    gguf, is_early = model(tmp_path, architecture=architecture, **SMALL), architecture == "smallthinker"
    ids, splits = tokens(24), [18, 22, 23]
    expected = logits_of(hybrid(gguf), ids, splits, [2])
    # A second of attention is enough time to copy any experts, which otherwise takes as long as the CPU.
    backend = hybrid(gguf, expert_slots=2, fetching=Fetching(EVEN, 6, {0: 1.0, 1: 1.0}))
    [stage] = backend.stages
    assert isinstance(stage, GpuStage)
    attend, on_their_way = stage.kernels.attention, list[bool]()

    def attended(*arguments: Any, **options: Any) -> Any:
        on_their_way.append(bool(late.waiting))
        return attend(*arguments, **options)

    stage.kernels.attention = attended  # type: ignore[method-assign]
    np.testing.assert_array_equal(logits_of(backend, ids, splits, [2]), expected)
    assert any(on_their_way) == is_early
    before = counted(backend)
    backend.step(batch([(ids[:1], 24, [2])]))
    after = counted(backend)
    assert after.streamed > before.streamed
    assert (after.on_cpu == before.on_cpu) == is_early
    backend.close()


@pytest.mark.parametrize("n_tokens", [1, 20])
def test_failed_fetch_ends_only_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_tokens: int
) -> None:
    gguf = model(tmp_path, **SMALL)
    ids = tokens(n_tokens)
    expected = within(120, lambda: logits_of(hybrid(gguf), ids, [], [2]))
    plain, is_sound, n_calls = fallback.fetch_experts, False, 0

    def failing(*arguments: Any) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls > 3 and not is_sound:  # the second group, or layer
            raise RuntimeError("the link is down")
        plain(*arguments)

    monkeypatch.setattr(fallback, "fetch_experts", failing)
    backend = hybrid(gguf, expert_slots=2, fetching=Fetching(LINK_ONLY, 6))
    with pytest.raises(
        DeviceError, match=r"experts of layer \d could not be fetched to cpu: the link is down"
    ):
        within(60, lambda: logits_of(backend, ids, [], [2]))
    assert counted(backend).streamed == counted(backend).fetched == 0
    is_sound = True
    np.testing.assert_array_equal(within(60, lambda: logits_of(backend, ids, [], [2])), expected)
    assert counted(backend).streamed > 0
    backend.close()


class Pinned:
    """A registrar that gives memory other addresses, as devices may, and remembers the registered ranges."""

    def __init__(self, fails_at: int = 1 << 30) -> None:
        self.held: list[tuple[int, int]] = []
        self.fails_at = fails_at

    def register(self, memory: np.ndarray) -> int:
        first, last = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        assert first % 4096 == last % 4096 == 0
        assert all(last <= a or first >= b for a, b in self.held)  # no page twice
        if len(self.held) == self.fails_at:
            raise DeviceError("no more memory can be mapped")
        self.held.append((first, last))
        return first + 4096

    def unregister(self, memory: np.ndarray) -> None:
        self.held.remove((memory.ctypes.data, memory.ctypes.data + memory.nbytes))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_experts_are_pinned_where_they_lie(tmp_path: Path, one_by_one: bool) -> None:
    gguf = model(tmp_path, one_by_one=one_by_one, **({} if one_by_one else {"biased": True}))
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    weights, registrar = DeviceWeights(gguf, torch.device("cpu")), Pinned()
    cache = GpuExpertCache(weights, graph.ffns, 4, sparse=False, n_spare=2, registrar=registrar)
    assert cache.host.n_pinned == sum(last - first for first, last in registrar.held) > 0
    for parts in cache.host.parts.values():
        for part in parts.values():
            for rows, address in zip(part.rows, part.addresses.tolist(), strict=True):
                assert address == rows.ctypes.data + 4096
                assert any(a <= rows.ctypes.data < b for a, b in registrar.held)
    cache.close()
    cache.close()
    assert not registrar.held
    if not one_by_one:  # biases are separate from the file
        broken = Pinned(fails_at=1)
        with pytest.raises(DeviceError, match="no more memory"):
            GpuExpertCache(weights, graph.ffns, 4, sparse=False, n_spare=2, registrar=broken)
        assert not broken.held
