"""Bundles: a neuron or an expert is one read, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, logits_of, tokens
from cases import quick_if
from expert_models import FORMS
from expert_models import model as write_experts
from sparse_runs import ONE_BY_ONE, cpu, write
from stored_weights import stored
from tiny_gguf import write_llama

from hotset.convert.reorder import reorder
from hotset.errors import FormatError, InvalidRequestError
from hotset.formats.bundle import PAGE, Part, record_bytes
from hotset.formats.gguf import GGUFFile, GGUFWriter, copy_metadata, open_gguf
from hotset.formats.quants import GGMLType

T = GGMLType


def bundled(gguf: GGUFFile, name: str = "bundled.gguf") -> GGUFFile:
    out = gguf.path.with_name(name)
    reorder(gguf.path, out, None, bundle=True)
    return open_gguf(out)


@pytest.mark.parametrize(
    ("dialect", "model", "type_"),
    quick_if(
        lambda dialect, model, type_: type_ == T.Q4_0 or (dialect, model) == ("gguf", "llama"),
        ["powerinfer", "gguf"], ["llama", "opt", "falcon-40b"], [T.F32, T.Q8_0, T.Q4_0],
    ),
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_bits_equal_the_original(tmp_path: Path, model: str, type_: GGMLType, dialect: str) -> None:
    """Check models in RAM and under a budget. Nothing is bundled without a gate or with down by output."""
    gguf = write(tmp_path, model, type_, dialect=dialect)
    if dialect == "gguf" and model != "llama":
        with pytest.raises(InvalidRequestError, match="nothing to bundle"):
            bundled(gguf)
        return
    ids, blocks = tokens(24), [2, 0]
    expected = logits_of(cpu(gguf, "dense"), ids, [], blocks)
    other = bundled(gguf)
    assert other.tensors["blk.1.ffn_up.weight"].stride
    for info in gguf.tensors.values():
        np.testing.assert_array_equal(gguf.data(info.name), other.data(info.name))
    for mode in ("dense", "exact"):
        np.testing.assert_array_equal(logits_of(cpu(other, mode), ids, ONE_BY_ONE, blocks), expected)
        backend, weights = stored(other, mode, 0.2)
        np.testing.assert_array_equal(logits_of(backend, ids, ONE_BY_ONE, blocks), expected)
        assert weights.counts().misses > 0


SHARED = {**FORMS["shared"], **FORMS["relu"]}  # experts and neurons, which could be skipped too


@pytest.mark.parametrize("form", ["mixed", "biased", "neuron-major", "many", "shared relu"])
def test_experts_are_one_read(tmp_path: Path, form: str) -> None:
    gguf = write_experts(tmp_path, **FORMS.get(form, SHARED))
    ids, blocks = tokens(24), [2, 0]
    expected = logits_of(cpu(gguf, "dense"), ids, [], blocks)
    other = bundled(gguf)
    np.testing.assert_array_equal(logits_of(cpu(other, "dense"), ids, [], blocks), expected)
    backend, _ = stored(other, "dense", 0.0)
    np.testing.assert_array_equal(logits_of(backend, ids, ONE_BY_ONE, blocks), expected)


def reads_of_a_neuron(gguf: GGUFFile) -> float:
    """Count the reads per missing row, for single tokens."""
    backend, weights = stored(gguf, "predicted", 0.0, predictor="mlp", gap=0)
    for i in range(6):
        backend.step(batch([(tokens(8)[i : i + 1], i, [2])]))
    counts = weights.counts()
    return counts.n_reads / counts.misses


def test_a_neuron_is_one_read(tmp_path: Path) -> None:
    gguf = write(tmp_path, "llama", T.F32, n_embd=1024)  # a row is a page
    plain, together = reads_of_a_neuron(gguf), reads_of_a_neuron(bundled(gguf))
    assert together < plain


def test_records_fill_pages() -> None:
    def record(*sizes: int) -> int:
        return record_bytes([Part(str(i), T.I8, n) for i, n in enumerate(sizes)])

    assert record(2304, 2304, 2304) == 2 * PAGE
    assert record(4096) == PAGE
    assert record(1000, 300) == PAGE // 2
    assert record(2049) == PAGE


def test_a_bundle_can_be_taken_apart(tmp_path: Path) -> None:
    gguf = write(tmp_path, "llama", T.Q4_0)
    other = bundled(gguf)
    again = bundled(other, "again.gguf")
    for info in gguf.tensors.values():
        np.testing.assert_array_equal(gguf.data(info.name), again.data(info.name))


def test_a_model_without_either_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "silu.gguf")
    with pytest.raises(InvalidRequestError, match="there is nothing to bundle"):
        reorder(path, tmp_path / "out.gguf", None, bundle=True)
    assert not (tmp_path / "out.gguf").exists()


HOSTILE: dict[str, tuple[str, Any]] = {
    "of version 2": ("hotset.bundle.version", 2),
    "does not describe its bundles": ("hotset.bundle.names", ["blk.0.ffn_gate.weight"]),
    "describes a bundle incorrectly": ("hotset.bundle.columns", [-1] * 6),
    "smaller than its described contents": ("hotset.bundle.columns", [1 << 20] * 6),
    "not whole blocks": ("hotset.bundle.columns", [33] * 6),
    "occurs twice": ("hotset.bundle.names", [f"blk.{i}.output" for i in (0, 1) for _ in range(3)]),
    "lacks it": ("hotset.bundle.names", [f"blk.9.{i}" for i in range(6)]),
    "of version array": ("hotset.bundle.version", [1, 1]),
    "of version '1'": ("hotset.bundle.version", "1"),
    "the unknown type -1": ("hotset.bundle.types", [-1] * 6),
    "the unknown type 1099511627776": ("hotset.bundle.types", [2**40] * 6),
    "the unknown type 9999": ("hotset.bundle.types", [9999] * 6),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_keys_that_contradict_the_tensors_give_one_message(tmp_path: Path, message: str) -> None:
    gguf = bundled(write(tmp_path, "llama", T.Q4_0))
    key, value = HOSTILE[message]
    out = tmp_path / "hostile.gguf"
    writer = GGUFWriter(out, gguf.architecture, PAGE, gguf.dialect)
    writer.add(key, value)
    copy_metadata(gguf, writer, ("general.alignment",))
    for layer in range(2):
        n_bytes = gguf.tensors[f"blk.{layer}.ffn_up.weight"].stride
        writer.add_tensor(f"blk.{layer}.ffn_bundle.weight", np.zeros((736, n_bytes), np.uint8), T.I8)
    writer.write()
    with pytest.raises(FormatError, match=message):
        open_gguf(out)
