"""Every kernel of the Vulkan backend equals the reference within a derived bound, matrix products bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sparse_runs
from backend_runs import cpu, logits_of, tokens
from cases import quick_are, quick_if
from make_blocks import random_blocks
from tiny_gguf import write_llama, write_relu
from vulkan_runs import (
    assert_every_operation_is_right,
    cpu_product,
    device_product,
    stage_of,
    validated,
    vulkan,
)

from hotset import _core
from hotset.backends.vulkan import shapes
from hotset.backends.vulkan.devices import find_device
from hotset.backends.vulkan.kernels import Recorder, VulkanKernels
from hotset.backends.vulkan.shapes import DeviceShapes, ProductShapes
from hotset.backends.vulkan.weights import COMPUTED, FLOATS
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import TYPES, GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

__all__ = ["validated"]  # the fixture

T = GGMLType
SPLITS = [1, 4]  # gives steps of one token, of few, and of many


def check(path: Path, n_tokens: int = 18, kv_type: Any = "f32", **options: Any) -> None:
    with open_gguf(write_llama(path / "m.gguf", **{"n_layer": 1, **options})) as gguf:
        backend = vulkan(gguf, kv_type=kv_type, max_batch=n_tokens)
        assert_every_operation_is_right(gguf, backend, tokens(n_tokens), SPLITS, [3, 1])
        backend.close()


@pytest.mark.parametrize(
    "type_", quick_are((GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K), COMPUTED), ids=lambda t: t.name
)
def test_every_tensor_type(tmp_path: Path, type_: GGMLType) -> None:
    check(tmp_path, n_embd=256, n_ff=512, head_dim=64, type_of=lambda _: type_)


QUANTISED = [type_ for type_ in COMPUTED if type_ not in FLOATS]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("type_", quick_are((T.Q4_1, T.Q6_K), QUANTISED), ids=lambda t: t.name)
def test_products_of_rounded_inputs(monkeypatch: Any, type_: GGMLType, native: bool) -> None:
    """Compare bits with the CPU, with the device's instructions and without, for one, few and many tokens."""
    monkeypatch.setattr(VulkanKernels, "allows_native", native)
    rng = np.random.default_rng(int(type_))
    odd = 4864 if 416 % TYPES[type_].block_size else 416  # sums have different numbers of blocks
    for k, n_rows, n in ((256, 40, 3), (odd, 21, 2), (768, 70, 35)):
        data = random_blocks(type_, n_rows, k, rng)
        x = rng.standard_normal((n, k)).astype(np.float32)
        x[:, 32:64] *= 1e-30
        x[:, 64:96] = 0
        expected = cpu_product(data, type_, n_rows, x)
        for layout in ((0, ()), (1, (16, 16)), (4, (32, 8))):
            assert np.array_equal(device_product(data, type_, n_rows, x, *layout), expected), layout


@pytest.mark.parametrize(
    ("type_", "experts"), quick_if(lambda *case: case == (T.Q4_0, None), QUANTISED, (None, (6, 3)))
)
def test_the_shape_of_a_workgroup_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: GGMLType, experts: Any
) -> None:
    """Check every candidate in steps of one, few and many tokens, with skipped rows."""
    monkeypatch.setattr(shapes, "LARGE", 500)  # some matrices of a tiny model are larger
    path = write_llama(
        tmp_path / "m.gguf", n_layer=1, n_embd=256, n_ff=512, head_dim=64, type_of=lambda _: type_,
        experts=experts, keys={"llama.hidden_activation": "relu"},
    )  # fmt: skip
    with open_gguf(path) as gguf:
        backend, ids = vulkan(gguf), tokens(86)
        stage, splits = stage_of(backend), [1, 5, 13, 29, 53]
        expected = logits_of(backend, ids, splits, [3, 1])
        for i in range(len(shapes.SHAPES)):  # each field gets each of its candidates
            chosen = ProductShapes(**{name: of[i % len(of)] for name, of in shapes.CANDIDATES.items()})
            stage.take_shapes(DeviceShapes(ProductShapes(), {type_: chosen}))
            assert np.array_equal(logits_of(backend, ids, splits, [3, 1]), expected), chosen
        compiled = [key for key in stage.opened.kernels.compiled if key[0] == "rounded_few"]
        for n in (1, 4):
            assert {key[4:6] for key in compiled if key[2] == n} == set(shapes.SHAPES)
        backend.close()


def test_inputs_are_rounded_as_the_cpu_rounds_them(monkeypatch: Any) -> None:
    """Check codes, scales and sums, for blocks with NaN, tiny and huge values.

    Quotients are right even if the driver's division is inaccurate.
    """
    rng = np.random.default_rng(0)
    n, k = 60, 256
    x = rng.standard_normal((n, k)) * np.exp(rng.uniform(-87, 80, (n, k // 32)).repeat(32, axis=1))
    x = x.astype(np.float32)
    x[0, :32] = 0
    x[1, 5], x[2, 40], x[3, 41] = np.nan, np.inf, -np.inf
    device = _core.VulkanDevice(find_device("vulkan").index, True)
    given, out = device.allocate(x.nbytes, "to_device"), device.allocate(n * k // 32 * 48, "from_device")
    given.write(0, x.reshape(-1).view(np.uint8))
    blocks = x.reshape(n, -1, 32)
    with np.errstate(all="ignore"):
        largest = np.abs(blocks).max(axis=2)
        inverse, scales = np.float32(127) / largest, largest / np.float32(127)
        inverse[~np.isfinite(inverse)] = 0
        codes = np.rint(blocks * inverse[:, :, None])
    lost = ~np.isfinite(codes).all(axis=2)
    codes[lost], scales[lost] = 0, np.nan
    halves = codes.reshape(n, -1, 2, 16).sum(axis=3)
    for off in (0, 3, -3):
        recorder = Recorder(VulkanKernels(device))
        bindings = [(given, 0, given.size, False), (out, 0, out.size, True)]
        recorder.add("quantize", [off & 0xFFFFFFFF], bindings, (k // 32, k), (1, n, 1))
        recorder.program.finish()
        _core.vulkan_run([recorder.program], _core.VulkanCancel())
        found = out.read(0, out.size).view(np.uint32).reshape(n, k // 32, 12)
        assert np.array_equal(found[..., :8].copy().view(np.int8).reshape(codes.shape), codes)
        step, total = (found[..., i].copy().view(np.float32) for i in (8, 9))
        normal = ~(np.abs(scales) < 2.0**-126)
        np.testing.assert_array_equal(step[normal], scales[normal])
        np.testing.assert_array_equal(total[normal], (scales * halves.sum(axis=2).astype(np.float32))[normal])
        assert np.array_equal(found[..., 10:].copy().view(np.int32), halves)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_every_cache_type(tmp_path: Path, kv_type: Any) -> None:
    check(tmp_path, kv_type=kv_type)


@pytest.mark.parametrize("n_embd", [36, 100])
def test_widths_that_no_block_divides(tmp_path: Path, n_embd: int) -> None:
    check(tmp_path, n_embd=n_embd, n_ff=n_embd + 2, head_dim=10, type_of=lambda _: T.F16)


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "qwen2"},
        {"architecture": "qwen3", "keys": {"qwen3.attention.sliding_window": 7}},
        {"architecture": "bamboo"},
        {"keys": {"llama.hidden_activation": "gelu"}},
        {"keys": {"llama.rope.dimension_count": 16}, "tied": True},
        {"experts": (6, 3), "n_ff": 32, "type_of": lambda name: T.Q8_0 if "exps" in name else T.F32},
        {"experts": (5, 2), "n_ff": 32, "one_by_one": True, "n_ff_shared": 32},
        {"experts": (4, 2), "n_ff": 40, "down_neuron_major": True},
    ],
    ids=[
        "biases",
        "head norms, window",
        "relu",
        "gelu",
        "half of the channels",
        "experts",
        "shared experts",
        "experts by neuron",
    ],
)
def test_other_operations(tmp_path: Path, options: dict[str, Any]) -> None:
    check(tmp_path, **options)


def test_exact_gelu_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    options = {"keys": {"llama.hidden_activation": "gelu"}, "type_of": lambda _: T.Q8_0}
    with open_gguf(write_llama(tmp_path / "m.gguf", head_dim=32, n_ff=96, **options)) as gguf:
        ids, device = tokens(18), vulkan(gguf, kv_type="f16", max_batch=18)
        expected = logits_of(cpu(gguf, kv_type="f16"), ids, SPLITS, [3, 1])
        assert np.array_equal(logits_of(device, ids, SPLITS, [3, 1]), expected)
        device.close()


@pytest.mark.parametrize("type_", [T.F16, T.Q8_0, T.Q4_0], ids=lambda t: t.name)
def test_a_row_per_neuron(tmp_path: Path, type_: GGMLType) -> None:
    """Check PowerInfer's files; skipping the rows of zero neurons changes no bit."""
    path = write_relu(tmp_path / "m.gguf", ranks=(32,), n_ff=160, type_of=lambda _: type_)
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        backend = vulkan(gguf, graph, max_batch=18)
        ids = tokens(18)
        assert_every_operation_is_right(gguf, backend, ids, SPLITS, [3, 1])
        expected = logits_of(backend, ids, [], [3, 1])
        assert np.array_equal(logits_of(backend, ids, [1, 2, 5, 6], [0, 2]), expected)
        backend.close()


@pytest.mark.parametrize(
    ("kind", "mode", "type_"),
    quick_if(
        lambda *case: case in (("llama", "exact", T.Q4_0), ("bamboo", "predicted", T.Q8_0)),
        ("llama", "bamboo", "opt"), ("exact", "predicted"), (T.Q4_0, T.Q8_0, T.F16),
    ),
)  # fmt: skip
def test_neurons_that_are_left_out(tmp_path: Path, kind: str, mode: str, type_: GGMLType) -> None:
    """Check neuron-major copies of plain files, and neurons that a predictor omits: no bit changes."""
    gguf = sparse_runs.write(tmp_path, kind, type_, **{} if mode == "predicted" else {"dialect": "gguf"})
    ready, graph = sparse_runs.prepared(gguf, mode)
    backend, ids = vulkan(ready.weights, graph, max_batch=18), tokens(18)
    assert_every_operation_is_right(ready.weights, backend, ids, SPLITS, [3, 1])
    expected = logits_of(backend, ids, [], [3, 1])  # these products skip no row
    assert np.array_equal(logits_of(backend, ids, [1, 2, 5, 6], [0, 2]), expected)
    backend.close()
    gguf.close()


def test_positions_of_several_splits(tmp_path: Path) -> None:
    """Check attention over more positions than a running softmax takes at a time."""
    path = write_llama(
        tmp_path / "m.gguf", n_layer=1, n_embd=32, n_ff=32, n_head=2, n_head_kv=1, head_dim=16, n_ctx=1024
    )
    with open_gguf(path) as gguf:
        backend = vulkan(gguf, kv_type="f16", max_batch=530, n_blocks=10)
        ids, blocks = tokens(535), [9, 3, 4, 5, 0, 1, 2, 8, 7]
        assert_every_operation_is_right(gguf, backend, ids, [530, 531], blocks)
        backend.close()
