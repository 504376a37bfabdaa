"""The native backend: equal to the reference, and to itself for any split of a step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import (
    ISAS,
    assert_every_operation_is_right,
    batch,
    cpu,
    logits_of,
    mixed_types,
    tokens,
)
from derived_bounds import Oracle
from tiny_gguf import write_llama

from hotset import _core
from hotset.backends.base import LOGIT_GROUP, Batch
from hotset.cores import usable_cores
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import DECODABLE, GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0", "q8_0/q4_0"])
def test_every_operation_is_the_references(mixed: GGUFFile, kv_type: str, isa: str) -> None:
    graph = describe(config_from_gguf(mixed), mixed.tensors)
    backend = cpu(mixed, kv_type=kv_type, isa=isa)
    assert_every_operation_is_right(mixed, graph, backend, tokens(100), [70, 71], [3, 1])


@pytest.mark.parametrize("type_", sorted(DECODABLE), ids=lambda t: t.name)
def test_every_tensor_type_runs(tmp_path: Path, type_: GGMLType) -> None:
    gguf = open_gguf(
        write_llama(tmp_path / "m.gguf", n_embd=256, n_ff=256, head_dim=64, type_of=lambda _: type_)
    )
    graph, ids, blocks = describe(config_from_gguf(gguf), gguf.tensors), tokens(20), [0]
    assert_every_operation_is_right(gguf, graph, cpu(gguf), ids, [13, 14], blocks)
    # Without taps operations are fused, with the same bits.
    names = tuple(value.name for value in graph.values)
    tapped = cpu(gguf).step(batch([(ids, 0, blocks)], names)).logits
    np.testing.assert_array_equal(logits_of(cpu(gguf), ids, [13, 14], blocks), tapped)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0", "q4_0/q8_0"])
@pytest.mark.parametrize("keys", [{}, {"llama.attention.sliding_window": 70}], ids=["full", "window"])
def test_the_same_bits_however_a_step_is_cut(tmp_path: Path, isa: str, kv_type: Any, keys: dict) -> None:
    path = write_llama(
        tmp_path / "m.gguf", n_embd=256, n_ff=288, head_dim=64, type_of=mixed_types, n_ctx=4096, keys=keys
    )
    gguf = open_gguf(path)
    ids, blocks = tokens(330), [4, 2, 9, 7, 11, 1]
    options = {"isa": isa, "kv_type": kv_type, "max_batch": 330}
    expected = logits_of(cpu(gguf, n_threads=1, **options), ids, [], blocks)
    two = cpu(gguf, n_threads=2, **options)
    for splits in ([], [1], [64, 128, 200], [7, 8, 9, 130, 329], [*range(1, 40), 300, *range(301, 330)]):
        np.testing.assert_array_equal(logits_of(two, ids, splits, blocks), expected)


@pytest.mark.parametrize("kv_type", ["f16", "q4_0"])
def test_the_same_bits_on_every_instruction_set(mixed: GGUFFile, kv_type: str) -> None:
    ids, blocks = tokens(90), [0, 1]
    expected = logits_of(cpu(mixed, isa="scalar", kv_type=kv_type), ids, [33], blocks)
    for isa in _core.available_isas():
        found = logits_of(cpu(mixed, isa=isa, kv_type=kv_type), ids, [33], blocks)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0/q4_0"])
def test_the_same_bits_far_into_a_context(mixed: GGUFFile, kv_type: str) -> None:
    """Check contexts longer than one split of the softmax: split for few tokens, whole for many."""
    ids = tokens(1300)
    blocks = list(range(21))
    options = {"n_blocks": 21, "max_batch": 512, "kv_type": kv_type}
    expected = logits_of(cpu(mixed, n_threads=1, **options), ids, [512, 1024], blocks)
    splits = [500, 1000, *range(1250, 1300)]
    found = logits_of(cpu(mixed, n_threads=3, **options), ids, splits, blocks)
    np.testing.assert_array_equal(found, expected)


def test_more_threads_than_cores_change_nothing(mixed: GGUFFile) -> None:
    """Check that a chunk is right if a thread loses its core in it: another thread computes it again."""
    ids, blocks = tokens(60), [0]
    expected = logits_of(cpu(mixed, n_threads=1), ids, [20, *range(21, 60)], blocks)
    many = cpu(mixed, n_threads=8)
    for _ in range(3):
        np.testing.assert_array_equal(logits_of(many, ids, [20, *range(21, 60)], blocks), expected)


def test_two_models_run_at_once(mixed: GGUFFile) -> None:
    ids = tokens(40)
    expected = logits_of(cpu(mixed), ids, list(range(1, 40)), [0])
    found: dict[int, np.ndarray] = {}

    def work(i: int) -> None:
        found[i] = logits_of(cpu(mixed), ids, list(range(1, 40)), [0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(3):
        np.testing.assert_array_equal(found[i], expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "bamboo"])
def test_taps_are_the_references_and_change_nothing(tmp_path: Path, architecture: str) -> None:
    gguf = open_gguf(write_llama(tmp_path / "m.gguf", architecture=architecture))
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    names = tuple(value.name for value in graph.values)
    ids = tokens(30)
    step = batch([(ids, 0, [1])], names)
    backend = cpu(gguf, kv_type="f32")
    plain = backend.step(batch([(ids, 0, [1])])).logits.copy()
    tapped = backend.step(step)
    np.testing.assert_array_equal(tapped.logits, plain)
    assert set(tapped.taps) == set(names)
    Oracle(gguf, graph, n_blocks=2, kv_type="f32").check(step, tapped)
    one = backend.step(batch([(ids, 0, [1])], ("blk.1.ffn_act",)))
    np.testing.assert_array_equal(one.taps["blk.1.ffn_act"], tapped.taps["blk.1.ffn_act"])
    np.testing.assert_array_equal(one.logits, plain)


@pytest.mark.parametrize("isa", _core.available_isas())
def test_the_largest_logit_of_each_group_is_found(tmp_path: Path, isa: str) -> None:
    """Check the largest logits for all splits of the rows into chunks."""
    path = write_llama(tmp_path / "m.gguf", n_vocab=11 * LOGIT_GROUP, type_of=mixed_types, n_embd=256)
    for n_threads in (1, 3):
        backend = cpu(open_gguf(path), isa=isa, n_threads=n_threads)
        for n in (1, 3, 9, 40):
            result = backend.step(batch([(tokens(n), 0, [0])]))
            rows = result.logits.reshape(n, 11, LOGIT_GROUP)
            assert result.largest is not None
            assert np.array_equal(result.largest, rows.max(axis=2))
            assert result.largest.std() > 0


def test_positions_must_rise(mixed: GGUFFile) -> None:
    step = batch([(tokens(2), 0, [0])])
    with pytest.raises(InvalidRequestError, match="rise"):
        cpu(mixed).step(
            Batch(
                step.tokens, step.positions[::-1].copy(), *([step.sequences, step.block_tables, step.outputs])
            )
        )


def test_mistakes_at_load_give_one_message(mixed: GGUFFile, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="1 to 256"):
        cpu(mixed, n_threads=0)
    with pytest.raises(InvalidRequestError, match=r"no value named 'blk\.9\.out'"):
        cpu(mixed).step(batch([(tokens(1), 0, [0])], ("blk.9.out",)))
    narrow = open_gguf(write_llama(tmp_path / "m.gguf", head_dim=24))
    for kv_type, message in (
        ("q8_0", "a q8_0 cache needs heads of a multiple of 32 channels, but the keys of this model have 24"),
        ("f16/q4_0", "a q4_0 cache needs .* the values of this model have 24; store them as f16"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            cpu(narrow, kv_type=kv_type)


def test_cache_type_that_does_not_fit_the_heads_is_refused() -> None:
    plan = _core.Plan(4, 1, 1, _core.Runtime(1))
    x, out = plan.buffer(32, False), plan.buffer(32, False)

    def rotate(n_rot: int, first: int, n_freq: int | None = None) -> None:
        freq = [1.0] * (n_rot // 2 if n_freq is None else n_freq)
        rope = {"kind": "neox", "n_rot": n_rot, "freq": freq, "magnitude": 1.0, "every": 1}
        plan.add("rotate", x=x, out=out, n_head=1, head_dim=32, rope=rope, first=first)

    rotate(8, 0)
    rotate(8, 24)
    with pytest.raises(ValueError, match="n_rot / 2 frequencies"):
        rotate(8, 0, n_freq=3)
    for n_rot, first in ((64, 0), (8, 25), (8, 33), (8, -1)):
        with pytest.raises(ValueError, match=r"more channels than a head|first is"):
            rotate(n_rot, first)
    plan.add("heads", x=x, n_head=2, first=4, out=plan.buffer(24, False))
    for shared, first, width in ((None, 5, 24), (None, -1, 24), (x, 0, 64), (None, 0, 25)):
        with pytest.raises(
            ValueError, match=r"heads must fill the width|channels are outside the head|first is"
        ):
            plan.add("heads", x=x, shared=shared, n_head=2, first=first, out=plan.buffer(width, False))
    weight = 0, np.zeros(4 * 31 * 32, np.uint8)
    with pytest.raises(ValueError, match="bytes"):
        plan.add("transposed_heads", x=x, weight=weight, n_head=2, out=out)


def test_facts_that_an_operation_does_not_take_are_refused() -> None:
    plan = _core.Plan(4, 1, 1, _core.Runtime(1))
    x, out = plan.buffer(32, False), plan.buffer(32, False)
    for operation, facts, said in (
        ("halve", {}, "no operation halve"),
        ("scale", {"factor": 2.0}, "x is not a whole number"),
        ("scale", {"x": x, "out": out}, "factor is not a number"),
        ("scale", {"x": x, "out": 7, "factor": 2.0}, "no buffer 7"),
        ("scale", {"x": x, "out": out, "factor": 2.0, "cap": 1.0}, "has no fact cap"),
        ("activate", {"x": x, "out": out, "kind": "tan", "threshold": 0.0}, "no activation tan"),
        ("rms_norm", {"x": x, "out": out, "n_head": 1, "eps": 1e-5, "weight": np.ones(3, np.float32)}, "32"),
        ("rms_norm", {"x": x, "out": out, "n_head": 1, "eps": 1e-5, "weight": [1.0] * 32}, "not an array"),
        ("embed", {"weight": (99, np.zeros(64, np.uint8)), "of": "token", "first_row": 0, "out": x},
         "type 99"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            plan.add(operation, **facts)


def test_usable_cores() -> None:
    assert 1 <= usable_cores() <= 4096
