"""The GPU backend compared with the reference, on CPU tensors in place of the GPU's, both in float32.

Only the order of sums may differ: by 1e-4 of the largest logit, as for the CPU engine with float weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import assert_close, batch, logits_of, tokens
from cases import quick_are, quick_if
from fake_cold import FakeCpuWorker
from gpu_runs import N_FF, N_LAYER, T, gpu, gpu_stage, masks, run, split, write
from sparse_runs import ACTIVATIONS, MODELS, ONE_BY_ONE, Replayed, prepared
from tiny_gguf import write_llama

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.reference import ReferenceBackend
from hotset.backends.stage import WHOLE, Span
from hotset.backends.triton.kernels import Kernels
from hotset.errors import DeviceError, InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import Mask

TYPES = [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1]


def assert_is_reference(gguf: GGUFFile, kv_type: Any = "f32", **options: Any) -> None:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    ids, blocks = tokens(70), [3, 1]
    expected = logits_of(ReferenceBackend(gguf, graph, n_blocks=8, kv_type=kv_type), ids, [], blocks)
    backend = gpu(gguf, graph, kv_type=kv_type, **options)
    for splits in ([64], [1, 2, 40, 68, 69]):
        assert_close(logits_of(backend, ids, splits, blocks), expected)


# ---- dense models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", [*TYPES, T.Q4_K, T.Q6_K], ids=lambda t: t.name)
def test_every_tensor_type(tmp_path: Path, type_: GGMLType) -> None:
    path = write_llama(tmp_path / "m.gguf", n_embd=256, n_ff=256, head_dim=64, type_of=lambda _: type_)
    assert_is_reference(open_gguf(path))


# ---- ReLU models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "sparse"),
    quick_if(lambda dialect, sparse: sparse == (dialect == "gguf"), ["powerinfer", "gguf"], [True, False]),
)
@pytest.mark.parametrize("model", MODELS)
def test_exact(tmp_path: Path, model: str, dialect: Any, sparse: bool) -> None:
    ready, graph = prepared(write(tmp_path, model, dialect=dialect), "exact")
    ids = tokens(40)
    expected = logits_of(ReferenceBackend(ready.weights, graph, n_blocks=1), ids, [], [0])
    backend = gpu(ready.weights, graph, sparse=sparse)
    assert_close(logits_of(backend, ids, [7, 8, 9, 30], [0]), expected)


@pytest.mark.parametrize("dialect", ["powerinfer", "gguf"])
@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_exact_of_every_type(tmp_path: Path, type_: GGMLType, dialect: Any) -> None:
    ready, graph = prepared(write(tmp_path, "bamboo", type_, dialect=dialect), "exact")
    ids = tokens(20)
    expected = logits_of(ReferenceBackend(ready.weights, graph, n_blocks=1), ids, [], [0])
    assert_close(logits_of(gpu(ready.weights, graph), ids, [7, 8], [0]), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(tmp_path: Path, activation: str) -> None:
    keys = {"llama.hidden_activation": activation, **ACTIVATIONS[activation]}
    ready, graph = prepared(write(tmp_path, "llama", dialect="gguf", keys=keys), "exact")
    ids = tokens(30)
    expected = logits_of(ReferenceBackend(ready.weights, graph, n_blocks=1), ids, [], [0])
    assert_close(logits_of(gpu(ready.weights, graph), ids, [7, 8], [0]), expected)


def prepared_clearly(
    path: Path, model: str, mode: str, predictor: str | None, ids: np.ndarray, *given: Any, **how: Any
) -> Any:
    """Return a model and graph whose predictor is certain about every neuron of these tokens.

    If a score differs from the threshold only by rounding, one side names the neuron and the other does not,
    which is not a fault. Seeds without such scores depend on the machine's products, so they are searched.
    """
    for seed in range(1, 30):
        (folder := path / str(seed)).mkdir()
        ready, graph = prepared(write(folder, model, *given, seed=seed, **how), mode, predictor)
        if mode != "predicted":  # no scores
            return ready, graph
        limits = {op.scores.name: op.threshold for op in graph.primitives if isinstance(op, Mask)}
        assert limits
        backend = ReferenceBackend(ready.weights, graph, n_blocks=1)
        scores = backend.step(batch([(ids, 0, [0])], tuple(limits))).taps
        if all(
            np.abs(found - limits[name]).min() > 1e-5 * np.abs(found).max() for name, found in scores.items()
        ):
            return ready, graph
    raise AssertionError("every model has a neuron in doubt")


def masked_reference(
    ready: Any, graph: Any, backend: Any, ids: np.ndarray, splits: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return the backend's logits, and the reference's for the backend's scores. Steps end at `splits`.

    A score close to its threshold may change sides with the size of the step.
    """
    names = tuple(value.name for value in graph.values if value.name.endswith(".ffn_pred"))
    assert len(names) == N_LAYER
    reference = Replayed(ready.weights, graph, n_blocks=1, scores={})
    found, expected, at = [], [], 0
    for thresholded in [*splits, len(ids)]:
        step = batch([(ids[at:thresholded], at, [0])], names)
        result = backend.step(step)
        reference.scores = dict(result.taps)
        found.append(result.logits.copy())
        expected.append(reference.step(replace(step, taps=())).logits)
        at = thresholded
    return np.concatenate(found), np.concatenate(expected)


@pytest.mark.parametrize("predictor", quick_are((None, "svd:32"), [None, "mlp:q8_0", "svd:32"]))
@pytest.mark.parametrize("model", MODELS)
def test_predicted(tmp_path: Path, model: str, predictor: str | None) -> None:
    ready, graph = prepared(write(tmp_path, model), "predicted", predictor)
    ids, backend = tokens(30), gpu(ready.weights, graph)
    for splits in ([], ONE_BY_ONE):
        assert_close(*masked_reference(ready, graph, backend, ids, splits))


@pytest.mark.parametrize("model", ["bamboo", "opt"])
def test_always_computed_neurons_need_no_score(tmp_path: Path, model: str) -> None:
    """Check that neurons below `first` need no row in the predictor."""
    from dataclasses import replace

    ready, _ = prepared(write(tmp_path, model), "predicted", "svd:32")
    config = config_from_gguf(write(tmp_path / "again", model))
    tensors = dict(ready.weights.tensors)
    first = 40
    for i in range(N_LAYER):
        info = tensors[f"blk.{i}.svd_b.weight"]
        tensors[info.name] = replace(info, shape=(info.shape[0], info.shape[1] - first))
        tensors.pop(f"blk.{i}.always.bias", None)

    source = ready.weights

    class Fewer:
        @property
        def tensors(self) -> Any:
            return tensors

        def data(self, name: str) -> np.ndarray:
            data = source.data(name)
            info = tensors[name]
            n_bytes = first * row_bytes(info.type, info.shape[0])
            return data[n_bytes:] if name.endswith(".svd_b.weight") else data

        def check(self) -> None:
            source.check()

    assert ready.predictor is not None
    weights = Fewer()
    graph = describe(config, tensors, replace(ready.predictor, first=(first,) * N_LAYER))
    ready.weights = weights  # type: ignore[assignment]
    ids, backend = tokens(20), gpu(weights, graph)
    found, expected = masked_reference(ready, graph, backend, ids)
    assert_close(found, expected)
    hot = masks(0.3)
    stage, cold = split(weights, graph, hot)
    assert_close(run(stage, ids), expected)
    assert cold.n_posts == N_LAYER


# ---- sequences, blocks, taps -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", ["dense", "predicted"])
def test_taps(tmp_path: Path, model: str, mode: str) -> None:
    predictor = "svd:32" if mode == "predicted" else None
    ready, graph = prepared_clearly(tmp_path, model, mode, predictor, tokens(30))
    names = tuple(value.name for value in graph.values)
    step = batch([(tokens(30), 0, [1])], names)
    backend = gpu(ready.weights, graph)
    plain = backend.step(batch([(tokens(30), 0, [1])])).logits.copy()
    tapped = backend.step(step)
    assert_close(tapped.logits, plain)
    expected = ReferenceBackend(ready.weights, graph, n_blocks=2).step(step).taps
    assert set(tapped.taps) == set(names)
    for name in names:
        assert_close(tapped.taps[name], expected[name], 2e-4)
    with pytest.raises(InvalidRequestError, match="no value named 'nonsense'"):
        backend.step(batch([(tokens(3), 0, [1])], ("nonsense",)))


def test_statistics_are_the_references(tmp_path: Path) -> None:
    for model, predictor in (("bamboo", "svd:32"), ("llama", None), ("opt", "svd:32"), ("falcon-40b", None)):
        mode = "exact" if predictor is None else "predicted"
        (tmp_path / model).mkdir()
        ready, graph = prepared_clearly(tmp_path / model, model, mode, predictor, tokens(5))
        backend = gpu(ready.weights, graph)
        reference = ReferenceBackend(ready.weights, graph, n_blocks=2, sparse=True)
        for ids in (tokens(1), tokens(5)):
            for engine in (backend, reference):
                engine.step(batch([(ids, 0, [0])]))
            found, expected = backend.stats(), reference.stats()
            assert found is not None
            assert expected is not None
            assert found.n_tokens == len(ids)
            for name in ("selected", "active", "gate_rows", "up_rows", "down_rows"):
                np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    silu = open_gguf(write_llama(tmp_path / "silu.gguf"))
    dense = gpu(silu, describe(config_from_gguf(silu), silu.tensors))
    dense.step(batch([(tokens(3), 0, [0])]))
    assert dense.stats() is None


@pytest.mark.parametrize("model", MODELS)
def test_a_dense_step_reads_every_row(tmp_path: Path, model: str) -> None:
    """Compare numbers and counts with the reference, for a model whose neurons fire seldom."""
    ready, graph = prepared_clearly(tmp_path, model, "exact", None, tokens(5))
    backend = gpu(ready.weights, graph, sparse=False)
    reference = ReferenceBackend(ready.weights, graph, n_blocks=2, sparse=False)
    for ids in (tokens(1), tokens(5)):
        given = batch([(ids, 0, [0])])
        assert_close(backend.step(given).logits, reference.step(given).logits)
        found, expected = backend.stats(), reference.stats()
        assert found is not None
        assert expected is not None
        assert (found.active < found.selected).all()
        for name in ("selected", "active", "gate_rows", "up_rows", "down_rows"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


# ---- hot and cold, stages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", quick_are((0.3,), [0.0, 0.3, 1.0]))
@pytest.mark.parametrize("predictor", quick_are(("mlp:q8_0",), [None, "mlp:q8_0", "svd:32"]))
@pytest.mark.parametrize("model", MODELS)
def test_hot_and_cold_make_a_whole(tmp_path: Path, model: str, predictor: str | None, share: float) -> None:
    ids = tokens(24)
    mode = "exact" if predictor is None else "predicted"
    ready, graph = prepared_clearly(tmp_path, model, mode, predictor, ids)
    expected = logits_of(gpu(ready.weights, graph), ids, [], [2, 0])
    stage, cold = split(ready.weights, graph, masks(share))
    splits = [3, 4, 5, 20]
    assert_close(run(stage, ids, splits), expected)
    assert cold.n_posts == (0 if share == 1 else N_LAYER * (len(splits) + 1))  # one round trip per layer
    assert (cold.n_selected > 0) == (share < 1)


HOT_TYPES = [(type, dialect) for type in (T.F16, T.Q8_0, T.Q4_0) for dialect in ("powerinfer", "gguf")]
HOT_TYPES.append((T.Q4_1, "powerinfer"))  # its plain files have no neuron-major down projection


@pytest.mark.parametrize(("type_", "dialect"), HOT_TYPES, ids=str)
def test_hot_rows_of_every_type(tmp_path: Path, type_: GGMLType, dialect: Any) -> None:
    ready, graph = prepared(write(tmp_path, "bamboo", type_, dialect=dialect), "exact")
    ids = tokens(12)
    expected = logits_of(gpu(ready.weights, graph), ids, [], [2, 0])
    stage, cold = split(ready.weights, graph, masks(0.3))
    assert_close(run(stage, ids, [3]), expected)
    assert cold.n_posts == 2 * N_LAYER


@pytest.mark.parametrize("dialect", ["powerinfer", "gguf"])
@pytest.mark.parametrize("predictor", [None, "svd:32"])
@pytest.mark.parametrize("model", ["bamboo", "opt"])
def test_cold_rows_stream_in_for_prompts(
    tmp_path: Path, model: str, predictor: str | None, dialect: Any
) -> None:
    mode = "exact" if predictor is None else "predicted"
    ids = tokens(40)
    ready, graph = prepared_clearly(tmp_path, model, mode, predictor, ids, T.Q4_0, dialect=dialect)
    expected = logits_of(gpu(ready.weights, graph), ids, [], [2, 0])
    stage, cold = split(ready.weights, graph, masks(0.3), stream_from=16, stream_bytes=3000)
    assert_close(run(stage, ids, [32, 38]), expected)
    assert cold.n_steps == 2  # the prompt of 32 did not use the CPU worker
    assert cold.n_posts == 2 * N_LAYER


@pytest.mark.parametrize("predictor", [None, "mlp:q8_0", "svd:32"])
@pytest.mark.parametrize("model", MODELS)
def test_an_ffn_that_can_go_first_is_posted_before_attention(
    tmp_path: Path, model: str, predictor: str | None
) -> None:
    ready, graph = prepared(write(tmp_path, model), "exact" if predictor is None else "predicted", predictor)
    hot, events = masks(0.3), []
    cold = FakeCpuWorker(ready.weights, graph, hot, max_batch=64)
    kernels = Kernels("cpu", triton=False)

    def noted(name: str, call: Any) -> Any:
        return lambda *given, **options: (events.append(name), call(*given, **options))[1]

    kernels.attention = noted("attention", kernels.attention)  # type: ignore[method-assign]
    cold.submit = noted("submit", cold.submit)  # type: ignore[method-assign]
    cold.collect = noted("collect", cold.collect)  # type: ignore[method-assign]
    stage = gpu_stage(ready.weights, graph, hot=hot, worker=cold, kernels=kernels)
    run(stage, tokens(5))
    first = ["submit", "attention"] if "falcon" in model else ["attention", "submit"]
    assert events == [*first, "collect"] * N_LAYER


@pytest.mark.parametrize("predictor", [None, "mlp:q8_0"])
@pytest.mark.parametrize("model", MODELS)
def test_two_stages_are_one(tmp_path: Path, model: str, predictor: str | None) -> None:
    ready, graph = prepared(write(tmp_path, model), "exact" if predictor is None else "predicted", predictor)
    ids = tokens(20)
    middle = graph.layer_starts[1]
    spans = Span(0, middle), Span(middle), WHOLE
    first, second, whole = (gpu_stage(ready.weights, graph, span=span) for span in spans)
    for part, at in ((ids[:13], 0), (ids[13:], 13)):
        step = batch([(part, at, [1])])
        x = first.run(step)
        assert x.shape == (len(part), 64)
        np.testing.assert_array_equal(second.run(step, x).numpy(), whole.run(step).numpy())
        np.testing.assert_array_equal(second.run(step, x.numpy()).numpy(), whole.run(step).numpy())
        for wrong in (x[:1], x[:, :32]):  # neither is repeated to fit
            with pytest.raises(InvalidRequestError, match=r"the input rows must be"):
                second.run(step, wrong)
    for kind in ("weights", "kv"):
        assert first.nbytes[kind] + second.nbytes[kind] == whole.nbytes[kind]


def test_a_graph_is_cut_between_layers(tmp_path: Path) -> None:
    gguf = write(tmp_path, "bamboo")
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    starts = graph.layer_starts
    assert len(starts) == N_LAYER + 1
    part, entering = graph.split(starts[1], starts[2])
    assert entering is not None
    assert entering.name == "blk.0.out"
    assert part.result.name == "blk.1.out"
    with pytest.raises(InvalidRequestError, match="split only between layers"):
        graph.split(starts[1] + 1, starts[2])
    with pytest.raises(InvalidRequestError, match="no part"):
        graph.split(3, 3)


def test_unsupported_split_layers_are_refused(tmp_path: Path) -> None:
    ready, graph = prepared(write(tmp_path, "bamboo"), "exact")
    stage, _ = split(ready.weights, graph, masks(0.3))
    with pytest.raises(InvalidRequestError, match=r"blk\.0\.ffn_act .* split"):
        stage.run(batch([(tokens(3), 0, [0])], ("blk.0.ffn_act",)))
    names = ("blk.1.ffn_norm", "blk.1.ffn_down", "blk.1.out")
    stage.run(batch([(tokens(3), 0, [0])], names))
    assert set(stage.tapped) == set(names)
    dense = open_gguf(write_llama(tmp_path / "m.gguf"))
    with pytest.raises(UnsupportedModelError, match=r"layer 0 .* split"):
        split(dense, describe(config_from_gguf(dense), dense.tensors), masks(0.3, 96))
    with pytest.raises(InvalidRequestError, match="needs a CPU worker"):
        gpu_stage(ready.weights, graph, n_blocks=1, max_batch=8, hot=masks(0.3))


# ---- memory, errors, capture -------------------------------------------------------------------------------


def test_the_bytes_of_a_stage(tmp_path: Path) -> None:
    """Check the bytes of weights, except the embedding, and of keys and values, exactly."""
    gguf = write(tmp_path, "llama", T.Q4_0)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    options: Any = {"max_batch": 8, "n_blocks": 4, "kv_type": "f16"}
    whole = gpu_stage(gguf, graph, **options)
    left_out = ("token_embd.weight", "fc1", "fc2")
    expected = sum(info.nbytes for name, info in gguf.tensors.items() if not any(x in name for x in left_out))
    assert whole.nbytes["weights"] == expected
    assert whole.nbytes["kv"] == N_LAYER * 2 * 4 * BLOCK_SIZE * 32 * 2
    before = dict(whole.nbytes)
    whole.run(batch([(tokens(8), 0, [0])]))
    assert whole.nbytes == before
    hot = {i: np.arange(N_FF) < 64 for i in range(N_LAYER)}
    cold = FakeCpuWorker(gguf, graph, hot, 8)
    part = gpu_stage(gguf, graph, hot=hot, worker=cold, **options)
    row, numbers = 64 // 32 * 18, 4 * 64 + 8 * (N_FF // 32)  # the neurons of the rows
    less = N_LAYER * (3 * (N_FF - 64) * row - numbers)
    assert whole.nbytes["weights"] - part.nbytes["weights"] == less


def test_errors_are_single_messages(tmp_path: Path) -> None:
    import torch

    gguf = open_gguf(write_llama(tmp_path / "m.gguf"))
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    with pytest.raises(InvalidRequestError, match="gpu is not a device of PyTorch"):
        gpu(gguf, graph, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match=r"cuda:7 .*(install|driver)"):
            gpu(gguf, graph, device="cuda:7")
    for kv_type in ("q8_0", "q4_0", "q8_0/q4_0"):
        with pytest.raises(UnsupportedModelError, match=f"a {kv_type} cache runs on the CPU only"):
            gpu(gguf, graph, kv_type=kv_type)
    backend = gpu(gguf, graph)
    with pytest.raises(InvalidRequestError, match="1 to 64 tokens"):
        backend.step(batch([(tokens(65), 0, [0, 1])]))
    with pytest.raises(InvalidRequestError, match="no KV block"):
        backend.step(batch([(tokens(65)[:10], 60, [0])]))
    backend.close()
    backend.close()
    learned = write(tmp_path, "opt", n_ctx=20)
    opt = gpu(learned, describe(config_from_gguf(learned), learned.tensors))
    with pytest.raises(InvalidRequestError, match="past 19"):
        opt.step(batch([(tokens(21), 0, [0])]))
