"""Importance matrices: both formats of llama.cpp's files, and the weights from them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from hotset.errors import FormatError, InvalidRequestError
from hotset.formats.gguf import GGUFWriter
from hotset.formats.imatrix import ImportanceMatrix, Inputs
from hotset.formats.quants import GGMLType

DENSE, EXPERTS = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"


def example(seed: int = 0) -> ImportanceMatrix:
    rng = np.random.default_rng(seed)
    sums = rng.random((3, 8)).astype(np.float32)
    sums[1] = 0
    inputs = {
        EXPERTS: Inputs(sums, np.array([5, 0, 11], np.float32)),
        DENSE: Inputs(rng.random((1, 4)).astype(np.float32), np.array([16], np.float32)),
    }
    return ImportanceMatrix(inputs, ("text.txt",), 2, 8)


def dat(*entries: tuple[str, int, np.ndarray], end: bytes = b"") -> bytes:
    out = struct.pack("<i", len(entries))
    for name, n_calls, values in entries:
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", n_calls, values.size)
        out += values.astype("<f4").tobytes()
    return out + end


def test_round_trip(tmp_path: Path) -> None:
    example().save(tmp_path / "i.gguf")
    found = ImportanceMatrix.open(tmp_path / "i.gguf")
    assert (found.datasets, found.n_chunks, found.chunk_size) == (("text.txt",), 2, 8)
    assert list(found.inputs) == [DENSE, EXPERTS]
    for name, inputs in example().inputs.items():
        assert np.array_equal(found.inputs[name].sums, inputs.sums)
        assert np.array_equal(found.inputs[name].counts, inputs.counts)


def test_the_file_is_llama_cpps(tmp_path: Path) -> None:
    example().save(tmp_path / "i.gguf")
    file = gguf.GGUFReader(tmp_path / "i.gguf")
    assert "general.architecture" not in file.fields
    assert file.fields["general.type"].contents() == "imatrix"
    assert file.fields["imatrix.datasets"].contents() == ["text.txt"]
    for key, value in (("chunk_count", 2), ("chunk_size", 8)):
        assert file.fields[f"imatrix.{key}"].contents() == value
        assert file.fields[f"imatrix.{key}"].types == [gguf.GGUFValueType.UINT32]
    shapes = {tensor.name: tensor.shape.tolist() for tensor in file.tensors}
    assert shapes == {
        f"{DENSE}.in_sum2": [4, 1],
        f"{DENSE}.counts": [1, 1],
        f"{EXPERTS}.in_sum2": [8, 3],
        f"{EXPERTS}.counts": [1, 3],
    }


def test_weights_are_means(tmp_path: Path) -> None:
    found = example()
    inputs = found.inputs[EXPERTS]
    weights = found.weights(EXPERTS, (8, 6, 3))
    assert weights is not None
    assert weights.shape == (3, 8)
    assert np.array_equal(weights[2], inputs.sums[2] / np.float32(11))
    assert np.array_equal(weights[1], np.ones(8))  # no token chose it
    assert found.weights("blk.1.attn_q.weight", (4, 4)) is None
    # One row for all matrices of a three-dimensional tensor.
    shared = found.weights(DENSE, (4, 2, 5))
    assert shared is not None
    assert shared.shape == (5, 4)
    with pytest.raises(InvalidRequestError, match="to another model"):
        found.weights(DENSE, (5, 4))


def test_the_old_form(tmp_path: Path) -> None:
    means = np.arange(6, dtype=np.float32)
    path = tmp_path / "i.dat"
    for end, facts in ((b"", ((), 0)), (struct.pack("<ii", 7, 5) + b"a.txt", (("a.txt",), 7))):
        path.write_bytes(dat((DENSE, 4, 4 * means), (EXPERTS, 0, means), end=end))
        found = ImportanceMatrix.open(path)
        assert (found.datasets, found.n_chunks) == facts
        weights = found.weights(DENSE, (3, 9, 2))  # experts as one row
        assert weights is not None
        assert np.array_equal(weights, means.reshape(2, 3))
    with pytest.raises(InvalidRequestError, match="older format"):
        found.merged(example())


def test_two_texts_are_added() -> None:
    one, two = example(), example(1)
    both = one.merged(two)
    assert np.array_equal(both.inputs[DENSE].sums, one.inputs[DENSE].sums + two.inputs[DENSE].sums)
    assert both.inputs[EXPERTS].counts.tolist() == [10, 0, 22]
    assert (both.n_chunks, both.datasets) == (4, ("text.txt", "text.txt"))
    other = ImportanceMatrix({DENSE: Inputs(np.ones((1, 5)), np.ones(1))}, (), 1, 8)
    with pytest.raises(InvalidRequestError, match="different models"):
        one.merged(other)


@pytest.mark.parametrize("bytes", [b"", b"\x01\0\0\0\xff\xff\xff\x7f", dat((DENSE, 1, np.ones(3)))[:-2]])
def test_damaged_files_of_the_old_form(tmp_path: Path, bytes: bytes) -> None:
    (tmp_path / "i.dat").write_bytes(bytes)
    with pytest.raises(FormatError, match="damaged"):
        ImportanceMatrix.open(tmp_path / "i.dat")


def test_invalid_files(tmp_path: Path) -> None:
    path = tmp_path / "i"
    path.write_bytes(dat())
    with pytest.raises(FormatError, match="no sums"):
        ImportanceMatrix.open(path)
    path.write_bytes(dat((DENSE, 1, np.array([1, np.nan]))))
    with pytest.raises(FormatError, match="not finite"):
        ImportanceMatrix.open(path)
    writer = GGUFWriter(path, "llama")
    writer.write()
    with pytest.raises(FormatError, match=r"general\.type"):
        ImportanceMatrix.open(path)
    writer = GGUFWriter(path, None)
    writer.add("general.type", "imatrix")
    writer.add_tensor(f"{DENSE}.in_sum2", np.ones((1, 4), np.float32), GGMLType.F32)
    writer.write()
    with pytest.raises(FormatError, match=r"lacks .*attn_q\.weight\.counts"):
        ImportanceMatrix.open(path)


def test_special_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a regular file but a folder"):
        ImportanceMatrix.open(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(FormatError, match="not a regular file but a pipe"):
            ImportanceMatrix.open(tmp_path / "pipe")


@pytest.mark.parametrize(("sums", "counts"), [(1e37, 1), (1, 1e37), (1, np.inf), (-1, 1), (1, np.nan)])
def test_numbers_that_could_not_be_added_are_refused(tmp_path: Path, sums: float, counts: float) -> None:
    inputs = {DENSE: Inputs(np.full((1, 4), sums, np.float32), np.array([counts], np.float32))}
    ImportanceMatrix(inputs).save(tmp_path / "i.gguf")
    with pytest.raises(FormatError, match=r"negative, above 1e\+36 or not finite; collect it again"):
        ImportanceMatrix.open(tmp_path / "i.gguf")


@pytest.mark.parametrize("n_chunks", [2**64 - 1, -5])
def test_invalid_chunk_count_does_not_stop_a_merge(tmp_path: Path, n_chunks: int) -> None:
    ImportanceMatrix(example().inputs, (), n_chunks, 8).save(tmp_path / "i.gguf")
    merged = ImportanceMatrix.open(tmp_path / "i.gguf").merged(example())
    merged.save(tmp_path / "merged.gguf")
    assert ImportanceMatrix.open(tmp_path / "merged.gguf").n_chunks == 2
