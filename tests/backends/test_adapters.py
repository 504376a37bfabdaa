"""Adapters (LoRA) in a step: alone and with others, in every mode, and compared with merged models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sparse_runs
import threshold_models
from backend_runs import batch, cpu, logits_of, mixed_types, tokens
from derived_bounds import Oracle, U, gamma
from stored_weights import stored, streaming
from tiny_adapters import give, random_adapter, scales_of, write_merged
from tiny_gguf import write_llama

from hotset import _core
from hotset.backends.adapters import AdapterSet
from hotset.backends.base import AdapterScales, Batch
from hotset.backends.reference import ReferenceBackend
from hotset.errors import InvalidRequestError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.lora import LoraAdapter
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import LowRank

T = GGMLType
IDS = tokens(40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    path = tmp_path_factory.mktemp("adapters") / "model.gguf"
    return open_gguf(write_llama(path, type_of=mixed_types, n_embd=256, n_ff=512))


def adapter_of(backend: Any, **options: Any) -> LoraAdapter:
    return random_adapter(backend.graph, backend.weights.tensors, **options)


def step_of(*parts: tuple[np.ndarray, int, list[int], AdapterScales], taps: tuple[str, ...] = ()) -> Batch:
    """Return a step of sequences: (tokens, first position, KV blocks, adapter scales)."""
    made = batch([part[:3] for part in parts], taps)
    return replace(made, adapter_scales=[part[3] for part in parts])


def check_every_value(backend: Any, weights: Any, parts: list[Any]) -> None:
    """Check each operation of a step against the oracle within its bound. Taps must change no logit."""
    adapters = backend.adapters
    oracle = Oracle(weights, adapters.graph, n_blocks=backend.n_blocks, kv_type=backend.kv_type)
    oracle.adapters = adapters
    step = step_of(*parts, taps=tuple(value.name for value in oracle.graph.values if _is_made(oracle, value)))
    tapped = backend.step(step)
    logits = tapped.logits.copy()
    oracle.graph.values = [value for value in oracle.graph.values if value.name in step.taps]
    oracle.check(step, tapped)
    np.testing.assert_array_equal(backend.step(step_of(*parts)).logits, logits)


def _is_made(backend: Any, value: Any) -> bool:
    return any(op.out == value for op in backend.graph.primitives)


@pytest.mark.parametrize("type", [T.F32, T.F16, T.BF16], ids=lambda type: type.name)
def test_every_operation_with_adapters_is_right(model: GGUFFile, type: GGMLType) -> None:
    backend = cpu(model, kv_type="f32")
    one = adapter_of(backend, type=type)
    # This one adapts only some matrices, with an odd rank.
    other = adapter_of(
        backend, rank=19, seed=1, type=type, names=lambda name: "attn_q" in name or "up" in name
    )
    give(backend, [one, other])
    both = scales_of(one, other, scales=[0.75, -0.5])
    check_every_value(
        backend, model, [(IDS, 0, [0], both), (IDS[:9], 0, [1], ()), (IDS[:20], 0, [2], scales_of(other))]
    )


@pytest.mark.parametrize("kind", ["llama", "bamboo", "falcon-7b", "opt"])
@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_sparse_ffns_with_adapters(tmp_path: Path, kind: str, mode: str) -> None:
    """Compare the logits of `exact`, which leaves rows out, with `dense`, and both with the oracle."""
    gguf = sparse_runs.write(tmp_path, kind, T.Q8_0, dialect="gguf")
    backends = {name: sparse_runs.cpu(gguf, name, kv_type="f32") for name in ("dense", mode)}
    adapter = adapter_of(backends["dense"])
    for backend in backends.values():
        give(backend, [adapter], scales_of(adapter))
    dense = logits_of(backends["dense"], IDS, [7, 8], [0])
    np.testing.assert_array_equal(logits_of(backends[mode], IDS, [7, 8], [0]), dense)
    own = sparse_runs.cpu(gguf, mode, kv_type="f32")
    give(own, [adapter])
    check_every_value(own, own.weights, [(IDS, 0, [0], scales_of(adapter)), (IDS[:5], 0, [1], ())])
    check_every_value(own, own.weights, [(IDS[:1], 0, [0], scales_of(adapter))])


def test_exact_leaves_rows_out_with_adapters_too(tmp_path: Path) -> None:
    """Compare the counts with the reference's, whose active neurons include the adapters' part."""
    for kind in ("llama", "opt"):
        (tmp_path / kind).mkdir()
        gguf = sparse_runs.write(tmp_path / kind, kind, T.F32, dialect="gguf")
        ready, graph = sparse_runs.prepared(gguf, "exact")
        native = sparse_runs.cpu(gguf, "exact", kv_type="f32")
        reference = ReferenceBackend(ready.weights, graph, n_blocks=8, kv_type="f32", sparse=True)
        adapter = adapter_of(native)
        for one in (native, reference):
            give(one, [adapter], scales_of(adapter))
            one.step(batch([(IDS[:1], 0, [0])]))
        ours, theirs = native.stats(), reference.stats()
        assert ours is not None
        assert theirs is not None
        for name in ("selected", "active", "gate_rows", "up_rows", "down_rows"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), name)
        assert (ours.active < sparse_runs.N_FF).all()


@pytest.mark.parametrize("predictor", ["svd", "mlp"])
def test_predicted_neurons_with_adapters(tmp_path: Path, predictor: str) -> None:
    """Check that neurons that a predictor does not name are zero, whatever adapters add to them."""
    dialect = "powerinfer" if predictor == "mlp" else "gguf"
    gguf = sparse_runs.write(tmp_path, "llama", T.F32, dialect=dialect)
    name = None if predictor == "mlp" else "svd:8"
    backend = sparse_runs.cpu(gguf, "predicted", name, kv_type="f32")
    adapter = adapter_of(backend)
    give(backend, [adapter])
    check_every_value(backend, backend.weights, [(IDS, 0, [0], scales_of(adapter)), (IDS[:1], 0, [1], ())])
    check_every_value(backend, backend.weights, [(IDS[:1], 0, [0], scales_of(adapter))])


@pytest.mark.parametrize("sites", ["gate", "every"])
def test_thresholds_with_adapters(tmp_path: Path, sites: str) -> None:
    """Check that thresholds apply to inputs and activations that include the adapters' part."""
    gguf = threshold_models.write(tmp_path)
    backend = threshold_models.cpu(gguf, threshold_models.CASES[sites], kv_type="f32")
    adapter = adapter_of(backend)
    give(backend, [adapter], scales_of(adapter))
    flags = np.arange(len(IDS)) % 3 > 0
    plain = threshold_models.run(backend, IDS, flags)
    names = tuple(op.out.name for op in backend.adapters.graph.primitives)
    np.testing.assert_array_equal(threshold_models.run(backend, IDS, flags, [5, 6], names), plain)
    one_by_one = threshold_models.run(backend, IDS[:9], flags[:9], range(1, 9))
    np.testing.assert_array_equal(one_by_one, plain[:9])


@pytest.mark.parametrize("kind", ["llama", "bamboo", "falcon-7b", "opt"])
def test_weights_from_a_store_with_adapters(tmp_path: Path, kind: str) -> None:
    gguf = sparse_runs.write(tmp_path, kind, T.Q8_0, dialect="gguf")
    whole = sparse_runs.cpu(gguf, "exact")
    adapter = adapter_of(whole)
    give(whole, [adapter], scales_of(adapter))
    backend, _ = stored(gguf, "exact", 0.1)
    give(backend, [adapter], scales_of(adapter))
    expected = logits_of(whole, IDS[:12], range(1, 12), [0])
    np.testing.assert_array_equal(logits_of(backend, IDS[:12], range(1, 12), [0]), expected)
    backend.close()


def test_streamed_weights_with_adapters(tmp_path: Path) -> None:
    gguf = open_gguf(write_llama(tmp_path / "model.gguf", type_of=lambda name: T.Q8_0))
    whole = cpu(gguf)
    adapter = adapter_of(whole)
    give(whole, [adapter], scales_of(adapter))
    backend, _ = streaming(gguf, 0.2)
    give(backend, [adapter], scales_of(adapter))
    expected = logits_of(whole, IDS[:12], [5, 6], [0])
    np.testing.assert_array_equal(logits_of(backend, IDS[:12], [5, 6], [0]), expected)
    backend.close()


def test_logits_depend_on_nothing_but_the_own_adapters(model: GGUFFile) -> None:
    """Check that threads, chunks, neighbours and other loaded adapters do not change logits."""
    alone = cpu(model)
    adapters = [adapter_of(alone, rank=rank, seed=rank) for rank in (1, 8, 40)]
    choices: list[AdapterScales] = [
        (),
        *(scales_of(each) for each in adapters),
        scales_of(*adapters[:2], scales=[2, -1]),
    ]
    expected = []
    for choice in choices:
        used = [each for each in adapters if each.digest in dict(choice)]
        give(alone, used, choice)
        expected.append(logits_of(alone, IDS, [1, 2, 17], [3]))
    assert len({rows.tobytes() for rows in expected}) == len(choices)
    for n_threads in (1, 3):
        together = cpu(model, n_threads=n_threads, max_batch=256)
        give(together, adapters[::-1])
        at = 0
        for end in (3, 4, 5, 40):
            parts = [(IDS[at:end], at, [i], choice) for i, choice in enumerate(choices)]
            logits = together.step(step_of(*parts)).logits.reshape(len(choices), end - at, -1)
            for rows, own in zip(logits, expected, strict=True):
                np.testing.assert_array_equal(rows, own[at:end])
            at = end


def test_every_instruction_set_gives_the_same_bits(model: GGUFFile) -> None:
    expected = None
    for isa in _core.available_isas():
        backend = cpu(model, isa=isa)
        adapters = [adapter_of(backend, rank=rank, seed=rank, type=T.F16) for rank in (5, 16)]
        give(backend, adapters, scales_of(*adapters))
        logits = logits_of(backend, IDS[:12], [9, 10], [0])
        expected = logits if expected is None else expected
        np.testing.assert_array_equal(logits, expected)


def test_a_model_without_adapters_is_the_same(model: GGUFFile) -> None:
    plain, other = cpu(model), cpu(model)
    adapter = adapter_of(plain)
    give(other, [adapter])
    expected = logits_of(plain, IDS, [9], [0])
    np.testing.assert_array_equal(logits_of(other, IDS, [9], [0]), expected)
    give(other, [adapter], scales_of(adapter, scales=[0.0]))
    np.testing.assert_array_equal(logits_of(other, IDS, [9], [0]), expected)
    give(other, [])
    np.testing.assert_array_equal(logits_of(other, IDS, [9], [0]), expected)


@pytest.mark.parametrize("made", [cpu, None], ids=["cpu", "reference"])
def test_products_equal_the_merged_models(tmp_path: Path, made: Any) -> None:
    """Compare each product, with two adapters, with x times the merged matrix, within both roundings."""
    gguf = open_gguf(write_llama(tmp_path / "model.gguf", n_embd=96, n_ff=160))
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    backend = cpu(gguf, kv_type="f32") if made else ReferenceBackend(gguf, graph, n_blocks=4)
    adapters, scales = [adapter_of(backend, seed=seed) for seed in (0, 1)], (0.5, -1.25)
    give(backend, adapters, scales_of(*adapters, scales=scales))
    merged = open_gguf(
        write_merged(
            tmp_path / "merged.gguf", gguf, zip((each.pairs for each in adapters), scales, strict=True)
        )
    )
    ops = [op for op in backend.adapters.graph.primitives if isinstance(op, LowRank)]
    names = {value.name for op in ops for value in (op.x, op.out)}
    taps = backend.step(batch([(IDS, 0, [0])], tuple(sorted(names)))).taps
    for op in ops:
        x = taps[op.x.name].astype(np.float64)
        shape = merged.tensors[op.matrix].shape[::-1]
        matrix = merged.data(op.matrix).view(np.float32).reshape(shape).astype(np.float64)
        size = np.abs(x) @ np.abs(gguf.data(op.matrix).view(np.float32).reshape(shape)).T.astype(np.float64)
        for each, scale in zip(adapters, scales, strict=True):
            pair = each.pairs[op.matrix]
            a, b = (np.abs(m.floats.astype(np.float64)) for m in (pair.a, pair.b))
            size += np.abs(x) @ a.T @ b.T * abs(scale * pair.factor)
        bound = gamma(op.x.width + pair.rank + 4) * size + U * np.abs(x) @ np.abs(matrix).T
        assert (np.abs(taps[op.out.name] - x @ matrix.T) <= bound).all(), op.out.name


def test_refused_mixes(model: GGUFFile) -> None:
    backend = cpu(model)
    adapter = adapter_of(backend)
    give(backend, [adapter])
    with pytest.raises(InvalidRequestError, match="not loaded any more"):
        backend.step(step_of((IDS, 0, [0], (("0" * 32, 1.0),))))
    with pytest.raises(InvalidRequestError, match="finite"):
        backend.step(step_of((IDS, 0, [0], scales_of(adapter, scales=[1e39]))))
    with pytest.raises(InvalidRequestError, match="adapter_scales for each sequence"):
        backend.step(replace(batch([(IDS, 0, [0])]), adapter_scales=[]))
    with pytest.raises(InvalidRequestError, match="100 adapters"):
        AdapterSet(backend.graph, model.tensors, [adapter] * 101)
