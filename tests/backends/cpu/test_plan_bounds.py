"""Chunks of the native plan: no stage exceeds them, for any number of heads, tokens and sequences.

A violated bound is an error of the plan (csrc/tests/plan_test.cpp). Here no bound is violated: full batches
of models with as many heads as the largest models give the same bits as steps of a few tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from backend_runs import N_VOCAB, batch, cpu_backend, tokens
from cases import quick_if
from tiny_gguf import write_llama

from hotset import _core
from hotset.backends.base import BLOCK_SIZE
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

# Heads and KV heads of models that hotset runs, and of models that its formats allow.
HEADS = {
    "smollm2-135m": (9, 3),
    "125M of opt": (12, 12),
    "7B of llama": (32, 32),
    "bamboo-7b, mistral": (32, 8),
    "13B of llama": (40, 40),
    "30B of llama": (52, 52),
    "opt-30b": (56, 56),
    "65B of llama": (64, 64),
    "70B of llama": (64, 8),
    "falcon-7b": (71, 1),
    "opt-66b": (72, 72),
    "opt-175b": (96, 96),
    "falcon-40b": (128, 8),
    "falcon-180b": (232, 8),
    "smallthinker-21b": (28, 4),
}
# Tokens of the sequences of one step: a long prompt, many prompts, prompts with decoding, only decoding.
STEPS = {
    "one prompt": [600], "sixteen prompts": [25] * 16, "prompts and a tail": [25] * 15 + [130],
    "every token its own sequence": [1] * 512,
}  # fmt: skip


def model(path: Path, n_head: int, n_head_kv: int) -> GGUFFile:
    return open_gguf(
        write_llama(
            path, n_layer=1, n_embd=32, n_ff=32, n_head=n_head, n_head_kv=n_head_kv, head_dim=16, n_ctx=4096
        )
    )


def in_one_step_and_in_many(gguf: GGUFFile, lengths: list[int], n_threads: int) -> None:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    total, at = sum(lengths), 0
    parts = []
    for i, length in enumerate(lengths):
        n_blocks = -(-length // BLOCK_SIZE)
        parts.append((tokens(length, i), 0, list(range(at, at + n_blocks))))
        at += n_blocks
    together = cpu_backend(gguf, graph, n_blocks=at, max_batch=total, n_threads=n_threads)
    found = together.step(batch(parts)).logits.copy()
    assert found.shape == (total, N_VOCAB)
    assert np.isfinite(found).all()
    apart = cpu_backend(gguf, graph, n_blocks=at, max_batch=8, n_threads=1)
    rows = [
        apart.step(batch([(ids[first : first + 8], first, blocks)])).logits.copy()
        for ids, _, blocks in parts
        for first in range(0, len(ids), 8)
    ]
    np.testing.assert_array_equal(found, np.concatenate(rows))
    # Repeat the step, and run one of another size: nothing of the first step remains.
    np.testing.assert_array_equal(together.step(batch(parts)).logits, found)
    np.testing.assert_array_equal(together.step(batch(parts[:1])).logits, found[: lengths[0]])


@pytest.mark.parametrize(
    ("step", "name"),
    quick_if(lambda step, name: name == "smollm2-135m" or step == "prompts and a tail", STEPS, HEADS),
)
def test_full_batches_of_every_head_count(tmp_path: Path, name: str, step: str) -> None:
    in_one_step_and_in_many(model(tmp_path / "m.gguf", *HEADS[name]), STEPS[step], n_threads=2)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_large_batches(tmp_path: Path, n_threads: int) -> None:
    gguf = model(tmp_path / "m.gguf", 12, 12)
    in_one_step_and_in_many(gguf, [2048], n_threads)
    in_one_step_and_in_many(gguf, [1] * 1000 + [700] + [3] * 100, n_threads)


@pytest.mark.parametrize("experts", [(1024, 2), (600, 7), (5, 5)], ids=str)
def test_full_batches_of_many_experts(tmp_path: Path, experts: tuple[int, int]) -> None:
    gguf = open_gguf(
        write_llama(tmp_path / "m.gguf", n_layer=1, n_embd=32, n_ff=160, experts=experts, n_ctx=4096)
    )
    for lengths in ([600], [1] * 300 + [40], [3]):
        in_one_step_and_in_many(gguf, lengths, 2)


F32 = int(GGMLType.F32)


def run_one_token(plan: _core.Plan) -> None:
    """Run token 1 at position 0."""
    plan.finish()
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    plan.run(one, zero, zero, np.zeros((1, 1), np.int32), zero)


def embedding(plan: _core.Plan, table: np.ndarray) -> int:
    x = plan.buffer(table.shape[1], False)
    plan.add("embed", weight=(F32, table.reshape(-1).view(np.uint8)), of="token", first_row=0, out=x)
    return int(x)


def test_a_down_projection_wider_than_its_chunks() -> None:
    """Sum more than 1024 * 1024 columns for one token."""
    width, table = (1 << 20) + 5000, np.array([[0, 0], [2, 3]], np.float32)
    weight = np.random.default_rng(0).standard_normal((2, width)).astype(np.float32)
    plan = _core.Plan(1, 1, 1, _core.Runtime(2))
    x, out = embedding(plan, table), plan.buffer(width, False)
    plan.add("transposed_linear", x=x, weight=(F32, weight.reshape(-1).view(np.uint8)), sparse=False, out=out)
    run_one_token(plan)
    expected = np.float64(2) * weight[0] + np.float64(3) * weight[1]
    # 2 * w is exact, and so is 3 * w before the single rounding of the fused multiply-add.
    np.testing.assert_array_equal(plan.rows(out)[0], expected.astype(np.float32))


def test_more_matrices_of_one_input_than_chunks_allow() -> None:
    rows, cols, n_parts = 128, 3072, 50  # each part fills 32 chunks
    rng = np.random.default_rng(1)
    table, weight = (rng.standard_normal((n, cols)).astype(np.float32) for n in (2, rows))
    data = weight.reshape(-1).view(np.uint8)
    plan = _core.Plan(1, 1, 1, _core.Runtime(2))
    x, outs = embedding(plan, table), [plan.buffer(rows, False) for _ in range(n_parts)]
    plan.add("linear", x=x, parts=[{"weight": (F32, data), "out": out} for out in outs])
    run_one_token(plan)
    expected = _core.linear(F32, data, rows, table[1:])[0]
    for out in outs:
        np.testing.assert_array_equal(plan.rows(out)[0], expected)
