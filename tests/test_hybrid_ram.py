"""A device beside a budget of this machine's memory: what the CPU computes comes through a store, what the
device has is not kept here, and the bits are those of the engine without a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cpu_backend import logits_of, tokens
from test_sparse_cpu import N_FF, prepared, write
from tiny_gguf import write_llama

torch = pytest.importorskip("torch")

from test_experts import FORMS  # noqa: E402
from test_experts import model as write_experts  # noqa: E402
from test_hybrid import ORDERS, hot_neurons, split, whole  # noqa: E402

from hotset import _core  # noqa: E402
from hotset.backends.chain import ChainBackend  # noqa: E402
from hotset.backends.stored import StoredWeights, sizes_of  # noqa: E402
from hotset.errors import DeviceError, ReadError  # noqa: E402
from hotset.formats.gguf import GGUFFile, open_gguf  # noqa: E402
from hotset.formats.overlay import Overlay  # noqa: E402
from hotset.formats.quants import GGMLType as T  # noqa: E402
from hotset.model.config import config_from_gguf  # noqa: E402
from hotset.model.decoder import describe  # noqa: E402
from hotset.model.graph import Graph  # noqa: E402
from hotset.placement.build import host_part, open_chain, open_placed  # noqa: E402
from hotset.placement.table import CPU, Placement  # noqa: E402

CUTS = [*range(20, 30)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def described(gguf: GGUFFile, mode: str) -> tuple[Graph, Overlay]:
    """mode: "": of a mixture."""
    if mode:
        ready, graph = prepared(gguf, mode)
        return graph, ready.weights
    return describe(config_from_gguf(gguf), gguf.tensors), Overlay(gguf)


def chains(
    gguf: GGUFFile, mode: str, placement: Placement, shares: Sequence[float], **options: Any
) -> Iterator[tuple[ChainBackend, StoredWeights | None]]:
    """The engine without a budget, and with the least that works and a share of what it has a use for beyond
    it."""
    graph, files = described(gguf, mode)
    given: dict[str, Any] = {
        "n_pages": 8, "max_batch": 48, "kv_type": "f32", "n_threads": 2, "sparse": mode != "dense", **options,
    }  # fmt: skip
    yield open_chain(placement, files, graph, timeout=30, **given), None
    part = host_part(placement, graph)
    for share in shares:
        how: dict[str, Any] = {"sparse": given["sparse"], "helped": part.helped, "step": 48}
        sizes = sizes_of(part.graph, files.tensors, **how)
        n_bytes = sizes.least_of_all + int(share * (sizes.all - sizes.least_of_all))
        weights = StoredWeights(files, part.graph, n_bytes, reader=_core.Reader(False, 4), gap=4096, **how)
        yield open_chain(placement, weights, graph, timeout=30, **given), weights


def assert_same_bits(found: Iterator[tuple[ChainBackend, StoredWeights | None]]) -> list[StoredWeights]:
    ids = tokens(30)
    expected, seen = None, []
    for backend, weights in found:
        logits = [logits_of(backend, ids, cuts, [2]) for cuts in (CUTS, [])]
        backend.close()
        if weights is not None:
            seen.append(weights)
        if expected is None:
            expected = logits
        for one, other in zip(logits, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    return seen


@pytest.mark.parametrize("type_", [T.F32, T.Q8_0, T.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("dialect", ["powerinfer", "gguf"])
@pytest.mark.parametrize("model", ["llama", "bamboo", "opt", "falcon-40b"])
def test_cold_neurons_come_through_the_store(tmp_path: Path, model: str, dialect: Any, type_: T) -> None:
    """With and without a gate, a predictor, and a down projection in planes; decoding, and a prompt whose
    cold rows stream to the device."""
    gguf = write(tmp_path, model, type_, dialect=dialect)
    for mode in ("exact", "predicted") if dialect == "powerinfer" else ("exact",):
        least, some, all_ = assert_same_bits(chains(gguf, mode, split(0.3), [0.0, 0.5, 1.0], stream_from=16))
        assert least.counts().misses > some.counts().misses > all_.counts().misses == 0
        assert all_.store is not None
        assert all_.store.is_whole


@pytest.mark.parametrize("owners", ORDERS, ids=str)
@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_layers_of_the_cpu_stay_or_stream(tmp_path: Path, owners: list[int], mode: str) -> None:
    """In any order of places, beside layers that are split; what does not fit of the CPU's own layers is read
    anew in each step."""
    gguf = write(tmp_path, "bamboo", T.Q8_0, ranks=(32, 64, 32))
    least, _, all_ = assert_same_bits(chains(gguf, mode, split(0.4, devices=owners), [0.0, 0.3, 1.0]))
    assert CPU in owners or least.counts().bytes_streamed == 0
    assert owners.count(CPU) < 2 or least.counts().bytes_streamed > 0
    assert all_.counts().bytes_streamed == 0


def test_a_dense_model_is_split_by_layers(tmp_path: Path) -> None:
    gguf = open_gguf(write_llama(tmp_path / "m.gguf", n_layer=4))
    least, _ = assert_same_bits(chains(gguf, "dense", whole([CPU, CPU, 0, 0]), [0.0, 1.0]))
    assert least.store is None
    assert least.counts().bytes_streamed > 0


def test_what_a_device_has_is_not_in_memory(tmp_path: Path) -> None:
    gguf = write(tmp_path, "bamboo", T.Q8_0)
    ready, graph = prepared(gguf, "predicted")
    placement = split(0.3)
    part = host_part(placement, graph)
    sizes = sizes_of(part.graph, ready.weights.tensors, sparse=True, helped=part.helped)
    n_cold = sum(int((~hot_neurons(0.3, N_FF, i)).sum()) for i in range(2))
    rows = 3 * 64 * 34 // 32  # of a neuron, 64 wide
    assert n_cold * rows <= sizes.most <= n_cold * (rows + 3 * 64)
    vectors = 4 * 64 * 4
    embedding = ready.weights.tensors["token_embd.weight"].nbytes
    assert sizes.fixed <= vectors
    assert sizes.pieces == ()
    assert sizes.all <= sizes.most + vectors + embedding + 64


def test_a_model_that_is_wholly_on_a_device_leaves_its_embedding(tmp_path: Path) -> None:
    gguf = write(tmp_path, "bamboo", T.Q8_0)
    ready, graph = prepared(gguf, "exact")
    placement, ids = whole([0, 0]), tokens(20)
    given: dict[str, Any] = {"n_pages": 8, "max_batch": 48, "kv_type": "f32", "sparse": True}
    expected = logits_of(open_placed(placement, ready.weights, graph, **given), ids, [], [2])
    part = host_part(placement, graph)
    sizes = sizes_of(part.graph, ready.weights.tensors, sparse=True, step=48)
    weights = StoredWeights(
        ready.weights,
        part.graph,
        sizes.least_of_all,
        sparse=True,
        reader=_core.Reader(False, 4),
        gap=0,
        step=48,
    )
    assert weights.store is None
    backend = open_placed(placement, weights, graph, **given)
    np.testing.assert_array_equal(logits_of(backend, ids, [], [2]), expected)
    assert weights.counts().bytes_read > 0


@pytest.mark.parametrize("n", [1, 30])
def test_a_read_that_fails_ends_its_step_alone(tmp_path: Path, n: int) -> None:
    """Of the embedding, in the service, and where rows stream to the device."""
    gguf = write(tmp_path, "bamboo", T.Q8_0)
    (plain, _), (backend, weights) = chains(gguf, "exact", split(0.3), [0.0], stream_from=16)
    assert weights is not None
    ids = tokens(n)
    expected = logits_of(plain, ids, [], [2])
    sentences = []
    for seed in range(12):
        weights.reader.inject_faults(0.3, seed)
        try:
            np.testing.assert_array_equal(logits_of(backend, ids, [], [2]), expected)
        except (DeviceError, ReadError) as error:
            sentences.append(str(error))
        weights.reader.inject_faults(0, 0)
        np.testing.assert_array_equal(logits_of(backend, ids, [], [2]), expected)
    assert all(str(gguf.path) in sentence for sentence in sentences)
    of_the_service = [sentence for sentence in sentences if "the CPU's half of layer" in sentence]
    assert len(of_the_service) < len(sentences)
    assert bool(of_the_service) == (n == 1)


@pytest.mark.parametrize("form", ["shared", "biased by neuron", "one by one"])
def test_experts_come_through_the_store(tmp_path: Path, form: str) -> None:
    """Those of the CPU; and those of a device's cache from the file, past it."""
    gguf = write_experts(tmp_path, **FORMS.get(form, {"one_by_one": True}))
    for n_slots in (0, 5):
        least, all_ = assert_same_bits(chains(gguf, "", whole([0, 0]), [0.0, 1.0], expert_slots=n_slots))
        assert all_.counts().misses == 0
        assert (least.store is None) == (form == "one by one")
        assert least.store is None or least.counts().misses > 0


def test_experts_of_the_cpu_and_of_devices(tmp_path: Path) -> None:
    gguf = write_experts(tmp_path, **FORMS["shared"])
    assert_same_bits(chains(gguf, "", whole([CPU, 0]), [0.0, 0.5, 1.0], expert_slots=3))


def test_an_expert_that_cannot_be_read_ends_its_step_alone(tmp_path: Path) -> None:
    gguf = write_experts(tmp_path, **FORMS["shared"])
    (plain, _), (backend, weights) = chains(gguf, "", whole([0, 0]), [0.0], expert_slots=64)
    assert weights is not None
    ids = tokens(12)
    expected = logits_of(plain, ids, [*range(4, 12)], [2])
    sentences: list[str] = []
    for seed in range(6):
        weights.reader.inject_faults(0.2, seed)
        try:
            np.testing.assert_array_equal(logits_of(backend, ids, [*range(4, 12)], [2]), expected)
        except (DeviceError, ReadError) as error:
            sentences.append(str(error))
        weights.reader.inject_faults(0, 0)
        np.testing.assert_array_equal(logits_of(backend, ids, [*range(4, 12)], [2]), expected)
    assert len(sentences) > 1
    assert all(str(gguf.path) in sentence for sentence in sentences)
    assert backend.expert_counts().hits > 0
