"""Attention: heads that share keys and values share a workgroup, which reads them once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from backend_runs import batch, logits_of, tokens
from cases import quick_if
from tiny_gguf import write_llama
from vulkan_runs import stage_of, validated, vulkan

from hotset.backends.vulkan.kernels import Recorder, VulkanKernels
from hotset.backends.vulkan.shapes import AttentionShape, attention_shape
from hotset.formats.gguf import open_gguf
from hotset.model.operations import Attention, Value

__all__ = ["validated"]  # the fixture
SHAPES = AttentionShape(2, 1024), AttentionShape(3, 512), AttentionShape(6, 1024)
LONG = 530  # positions: two splits


@pytest.mark.parametrize(
    ("kv_type", "head_dim", "long"),
    quick_if(
        lambda *case: case in (("f16", 32, True), ("q8_0", 96, False)),
        ("f32", "f16", "q8_0"), (32, 96, 256), (False, True),
    ),
)  # fmt: skip
def test_the_shape_of_a_workgroup_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_type: Any, head_dim: int, long: bool
) -> None:
    """Compare heads in workgroups of their own with shared ones, in steps of one, few and many tokens."""
    path = write_llama(
        tmp_path / "m.gguf", n_layer=1, n_embd=64, n_ff=32, n_head=12, n_head_kv=2, head_dim=head_dim,
        n_ctx=1024, keys={} if long else {"llama.attention.sliding_window": 9},
    )  # fmt: skip
    n, blocks = (LONG, [9, 3, 4, 5, 0, 1, 2, 8, 7]) if long else (70, [3, 1])
    splits = [n - 20, n - 19, n - 13, n - 12]
    with open_gguf(path) as gguf:
        backend, ids = vulkan(gguf, kv_type=kv_type, max_batch=LONG, n_blocks=10), tokens(n)
        stage = stage_of(backend)
        monkeypatch.setattr(VulkanKernels, "attention", lambda *_: AttentionShape(1, 512))
        alone = vulkan(gguf, kv_type=kv_type, max_batch=LONG, n_blocks=10)
        expected = logits_of(alone, ids, splits, blocks)
        alone.close()
        for shape in SHAPES:
            monkeypatch.setattr(VulkanKernels, "attention", lambda *_, shape=shape: shape)
            shared = vulkan(gguf, kv_type=kv_type, max_batch=LONG, n_blocks=10)
            assert (logits_of(shared, ids, splits, blocks) == expected).all(), shape
            shared.close()
        monkeypatch.undo()
        [op] = [one for one in stage.graph.ops if isinstance(one, Attention)]
        assert stage.opened.kernels.attention(op).heads == 6
        assert (logits_of(backend, ids, splits, blocks) == expected).all()
        backend.close()


def test_workgroups_that_read_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count them for a token: one for the heads of a key, not one for each head."""
    recorded: Counter[int] = Counter()
    add = Recorder.add

    def counted(self: Recorder, name: str, *arguments: Any, **named: Any) -> None:
        recorded[arguments[3][0]] += name == "attention"
        add(self, name, *arguments, **named)

    monkeypatch.setattr(Recorder, "add", counted)
    with open_gguf(write_llama(tmp_path / "m.gguf", n_layer=1, n_head=8, n_head_kv=2)) as gguf:
        backend = vulkan(gguf)
        backend.step(batch([(tokens(1), 0, [0])]))
        backend.close()
    assert +recorded == {2: 1}


@pytest.mark.parametrize(
    ("heads", "dims", "max_lanes", "shared_bytes", "expected"),
    [
        ((32, 8), (128, 128), 1024, 32768, (4, 512)),
        ((64, 8), (128, 128), 1024, 32768, (8, 1024)),
        ((64, 8), (128, 128), 1024, 16384, (4, 512)),
        ((64, 8), (128, 128), 256, 65536, (4, 512)),
        ((28, 4), (128, 128), 1024, 32768, (1, 512)),
        ((28, 4), (128, 128), 1024, 49152, (7, 1024)),
        ((16, 1), (128, 128), 1024, 65536, (8, 1024)),
        ((128, 8), (128, 128), 1024, 65536, (8, 1024)),
        ((12, 1), (128, 128), 1024, 65536, (6, 1024)),
        ((32, 32), (128, 128), 1024, 65536, (1, 512)),
        ((71, 1), (64, 64), 1024, 65536, (1, 512)),
        ((128, 1), (576, 512), 1024, 32768, (4, 512)),
    ],
)
def test_the_shape_keeps_within_the_limits_of_a_device(
    heads: tuple[int, int],
    dims: tuple[int, int],
    max_lanes: int,
    shared_bytes: int,
    expected: tuple[int, int],
) -> None:
    values = [Value(i, 1, "") for i in range(4)]
    op = Attention(*values, *heads, *dims, 1.0)
    shape = attention_shape(op, max_lanes, shared_bytes)
    assert shape == expected
    assert shape.vectors >= 2 * 64 * shape.heads
