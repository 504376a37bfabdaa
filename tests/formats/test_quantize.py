"""`hotset quantize`: native encoders compared with NumPy references, and whole files of both dialects."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from file_kinds import needs_links
from gguf.quants import dequantize as oracle_dequantize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from killed import kill_while_it_writes, needs_unnamed_files
from make_blocks import random_blocks
from tiny_gguf import write_llama, write_relu
from typer.testing import CliRunner

from hotset import _core
from hotset.cli.main import app
from hotset.errors import HotsetError, InvalidRequestError, UnsupportedModelError
from hotset.formats import quants, requantize
from hotset.formats.encode import WRITABLE, Importance, encode, recode
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.imatrix import ImportanceMatrix, Inputs
from hotset.formats.quants import DECODABLE, ENCODABLE, TYPES, GGMLType, dequantize, row_bytes

T = GGMLType
K_TYPES = [T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K]
AROUND_NEAREST = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1]  # fitted only with an importance matrix
IQ_TYPES = [type for type in WRITABLE if type.name.startswith("IQ")]
named = pytest.mark.parametrize("type", WRITABLE, ids=lambda type: type.name)
round_to_nearest = pytest.mark.parametrize("type", sorted(ENCODABLE), ids=lambda type: type.name)
k_types = pytest.mark.parametrize("type", K_TYPES, ids=lambda type: type.name)
fitted = pytest.mark.parametrize("type", K_TYPES + IQ_TYPES + AROUND_NEAREST, ids=lambda type: type.name)


def weights(n_rows: int, ne0: int, seed: int = 0) -> np.ndarray:
    """Return heavy-tailed values, like weights."""
    return np.random.default_rng(seed).standard_t(5, (n_rows, ne0)).astype(np.float32)


def decoded(file: GGUFFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    return dequantize(file.data(name), info.type, info.shape)


# ---- the encoders --------------------------------------------------------------------------------------


@round_to_nearest
@pytest.mark.parametrize("scale", [1.0, 1e-5, 3e3, 1e-38])
def test_native_bytes_equal_the_reference(type: GGMLType, scale: float) -> None:
    values = weights(67, 5 * 256) * np.float32(scale)
    values[:9] = np.round(values[:9] * 2) / 2  # ties
    values[9:20] *= np.random.default_rng(1).random((11, 1280)) < 0.03  # blocks of zeros of both signs
    assert np.array_equal(encode(values, type), quants.quantize(values, type))


@given(
    values=arrays(np.float32, (3, 256), elements=st.floats(-6e4, 6e4, width=32)),
    type=st.sampled_from(sorted(ENCODABLE)),
)
def test_native_bytes_equal_the_reference_for_any_values(values: np.ndarray, type: GGMLType) -> None:
    assert np.array_equal(encode(values, type), quants.quantize(values, type))


@named
def test_every_instruction_set_and_number_of_threads_gives_the_same_bytes(
    type: GGMLType, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = weights(12 if type in IQ_TYPES else 150, 1024)
    expected = encode(values, type, n_threads=1)
    assert np.array_equal(encode(values, type, n_threads=5), expected)
    for isa in _core.available_isas():
        monkeypatch.setenv("HOTSET_ISA", isa)
        assert np.array_equal(encode(values, type), expected), isa


def weighted(values: np.ndarray, type: GGMLType, importance: Importance, n_threads: int = 2) -> np.ndarray:
    return recode(values.view(np.uint8).reshape(-1), T.F32, values.shape[1], type, n_threads, importance)


@fitted
def test_importance_does_not_depend_on_threads_and_instruction_set(
    type: GGMLType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Return rows of three matrices, from the second row of the first one on."""
    values = weights(10, 256)
    of = np.random.default_rng(5).lognormal(0, 1.5, (3, 256)).astype(np.float32)
    expected = np.concatenate(
        [
            weighted(rows, type, Importance(of[i : i + 1], 4))
            for i, rows in enumerate((values[:3], values[3:7], values[7:]))
        ]
    )
    # The mean of all weights is 1 in one case, and each matrix's in the other: a power of two changes no
    # code.
    scale = (of.mean(dtype=np.float64) / of.mean(axis=1, dtype=np.float64)).astype(np.float32)
    everywhere = Importance(of, 4, first_row=1)
    got = weighted(values, type, everywhere, 1)
    assert np.mean(got != expected) < 0.02, scale
    assert np.array_equal(weighted(values, type, everywhere, 5), got)
    for isa in _core.available_isas():
        monkeypatch.setenv("HOTSET_ISA", isa)
        assert np.array_equal(weighted(values, type, everywhere), got), isa


@fitted
def test_importance_lowers_the_error_that_it_weighs(type: GGMLType) -> None:
    values = weights(32, 1024)
    importance = np.random.default_rng(6).lognormal(0, 1.5, (1, 1024)).astype(np.float32)
    errors = []
    for stored in (weighted(values, type, Importance(importance, 32)), encode(values, type)):
        found = oracle_dequantize(stored, gguf.GGMLQuantizationType(int(type)))
        assert np.array_equal(found, dequantize(stored, type, (1024, 32)))
        errors.append(float(np.sum(importance * (found - values) ** 2)))
    assert errors[0] < 0.97 * errors[1]


@pytest.mark.parametrize("type", AROUND_NEAREST, ids=lambda type: type.name)
def test_no_block_is_worse_than_rounded_to_nearest(type: GGMLType) -> None:
    """Compare with the block of nearest values, which is one trial; the bound allows for rounding of sums."""
    values = weights(40, 576)
    values[:4] = np.round(values[:4] * 2) / 2  # ties
    values[4:8] *= np.random.default_rng(1).random((4, 576)) < 0.1  # zeros, and blocks of them
    values[8:12] = np.abs(values[8:12]) + 3  # far from zero
    importance = np.random.default_rng(7).lognormal(0, 2, (1, 576)).astype(np.float32)
    importance[0, 64:96] = 0
    errors = []
    for stored in (weighted(values, type, Importance(importance, 40)), encode(values, type)):
        missed = importance * (dequantize(stored, type, (576, 40)) - values) ** 2
        errors.append(missed.reshape(-1, 32).sum(axis=1, dtype=np.float64))
    assert np.all(errors[0] <= errors[1] * (1 + 1e-4) + 1e-9)
    assert errors[0].sum() < 0.8 * errors[1].sum()


@fitted
def test_columns_without_importance(type: GGMLType) -> None:
    """Check that an input that was always zero counts little, but is not lost if all were zero."""
    values = weights(8, 512)
    importance = np.ones((1, 512), np.float32)
    importance[0, :256] = 0
    importance[0, 256::2] = 0
    stored = weighted(values, type, Importance(importance, 8))
    found = dequantize(stored, type, (512, 8))
    plain = dequantize(encode(values, type), type, (512, 8))
    assert np.isfinite(found).all()
    if type != T.IQ4_NL:
        lost = [float(np.mean((each[:, :256] - values[:, :256]) ** 2)) for each in (found, plain)]
        assert lost[0] < 1.2 * lost[1]
    kept = [float(np.mean((each[:, 257::2] - values[:, 257::2]) ** 2)) for each in (found, plain)]
    assert kept[0] < kept[1]


@pytest.mark.parametrize("type", IQ_TYPES, ids=lambda type: type.name)
def test_iq_types_decode_to_nearly_the_values(type: GGMLType) -> None:
    """Check that the error is at most twice the best code's with as many bits, for normal values."""
    values = np.random.default_rng(0).standard_normal((32, 1024)).astype(np.float32)
    found = oracle_dequantize(encode(values, type), gguf.GGMLQuantizationType(int(type)))
    error = float(np.sqrt(np.mean((found - values) ** 2)) / np.sqrt(np.mean(values**2)))
    assert error < 2 * 2 ** -(8 * row_bytes(type, 256) / 256)


@k_types
def test_k_types_decode_with_the_gguf_package_to_nearly_the_values(type: GGMLType) -> None:
    """Compare the error with a round-to-nearest type of as many bits or more."""
    values = weights(64, 1024)
    bound = {T.Q2_K: 0.42, T.Q3_K: 0.24, T.Q4_K: 0.12, T.Q5_K: 0.06, T.Q6_K: 0.031}[type]
    stored = encode(values, type)
    found = oracle_dequantize(stored, gguf.GGMLQuantizationType(int(type)))
    error = float(np.sqrt(np.mean((found - values) ** 2)) / np.sqrt(np.mean(values**2)))
    assert error < bound
    if type in (T.Q4_K, T.Q5_K):
        other = {T.Q4_K: T.Q4_1, T.Q5_K: T.Q5_1}[type]  # half a bit more each
        theirs = dequantize(encode(values, other), other, (1024, 64))
        assert error < float(np.sqrt(np.mean((theirs - values) ** 2)) / np.sqrt(np.mean(values**2)))


@fitted
def test_fitted_types_of_odd_blocks(type: GGMLType) -> None:
    rng = np.random.default_rng(3)
    rows = np.zeros((7, 256), np.float32)
    rows[1] = 3.25  # all equal
    rows[2] = -3.25
    rows[3, 17] = 100.0  # one outlier
    rows[4] = rng.random(256) + 5  # far from zero
    rows[5] = rng.standard_normal(256) * 1e-30
    rows[6] = np.where(np.arange(256) // 32 % 2, rng.standard_normal(256), -0.0)
    found = dequantize(encode(rows, type), type, (256, 7))
    assert np.isfinite(found).all()
    assert not found[0].any()
    if type in K_TYPES or "IQ4" in type.name:  # the other codebooks have no zero
        assert not found[6].reshape(8, 32)[::2].any()
    steps = {T.Q2_K: 1 / 3, T.Q3_K: 1 / 4, T.Q4_K: 1 / 15, T.Q5_K: 1 / 31, T.Q6_K: 1 / 32}
    step = steps.get(type, 0.15 if "IQ4" in type.name else 0.75)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    assert (np.abs(found - rows) <= step * largest + 1e-7).all()


@pytest.mark.parametrize("source", sorted(DECODABLE), ids=lambda type: type.name)
def test_recoding_is_decoding_and_encoding(source: GGMLType) -> None:
    data = random_blocks(source, 9, 4096 + 512, np.random.default_rng(2))
    values = dequantize(data, source, (4608, 9))
    assert np.array_equal(recode(data, source, 4608, T.Q8_0), quants.quantize(values, T.Q8_0))
    assert np.array_equal(recode(data, source, 4608, T.F32).view(np.float32), values)


@pytest.mark.parametrize("value", [pytest.param(np.nan, marks=pytest.mark.slow), -np.inf, 3e38])
@pytest.mark.parametrize("type", [t for t in WRITABLE if t not in (T.F32, T.BF16)], ids=lambda t: t.name)
def test_values_that_cannot_be_stored(type: GGMLType, value: float) -> None:
    values = weights(300, 512)
    values[277, 450] = value
    if type == T.MXFP4 and np.isfinite(value):  # its powers of two cover all finite values
        assert np.array_equal(encode(values, type), quants.quantize(values, type))
        return
    with pytest.raises(InvalidRequestError, match=type.name):
        encode(values, type)


def test_mistakes_of_a_caller() -> None:
    with pytest.raises(InvalidRequestError, match=r"Q8_1.*F32, F16"):
        encode(np.zeros((1, 32), np.float32), T.Q8_1)
    with pytest.raises(ValueError, match="no encoder"):
        _core.quantize(0, np.zeros(128, np.uint8), 1, 32, 9, np.zeros(18, np.uint8), 1)
    with pytest.raises(ValueError, match="each column of each matrix"):
        weighted(weights(5, 256), T.Q4_K, Importance(np.ones((1, 256), np.float32), 4))
    with pytest.raises(ValueError, match="whole blocks of Q4_0"):
        _core.quantize(0, np.zeros(128, np.uint8), 1, 32, 2, np.zeros(17, np.uint8), 1)
    with pytest.raises(ValueError, match="number of threads"):
        _core.quantize(0, np.zeros(128, np.uint8), 1, 32, 2, np.zeros(18, np.uint8), 0)
    assert encode(np.zeros((0, 32), np.float32), T.Q4_0).shape == (0, 18)


# ---- whole files ---------------------------------------------------------------------------------------


@pytest.fixture
def f16(tmp_path: Path) -> Path:
    """Write a llama of 2 layers with rows of 256 values, except n_ff = 96, and with a few special keys."""
    return write_llama(
        tmp_path / "f16.gguf", n_embd=256, n_head=8, n_ff=96, type_of=lambda name: T.F16,
        keys={"tokenizer.ggml.tokens": ["a", "b\udcff"], "hotset.test": [1, 2, 3], "general.file_type": 1},
    )  # fmt: skip


def test_types_and_bytes_of_a_file(f16: Path, tmp_path: Path) -> None:
    requantize.quantize(f16, tmp_path / "out.gguf", "q4_0")
    with open_gguf(f16) as old, open_gguf(tmp_path / "out.gguf") as new:
        assert list(new.tensors) == list(old.tensors)
        for name, info in new.tensors.items():
            before = decoded(old, name)
            if len(info.shape) == 1:
                assert info.type == T.F32
                assert np.array_equal(decoded(new, name), before)
            elif name == "output.weight":
                assert info.type == T.Q6_K
            else:
                assert info.type == T.Q4_0
                assert np.array_equal(new.data(name), quants.quantize(before, T.Q4_0).reshape(-1))
        changed = {"general.file_type": 2, "general.quantization_version": 2}
        assert {k: v for k, v in new.metadata.items() if k in changed} == changed
        for key in old.metadata.keys() - changed.keys():
            assert np.array_equal(new.metadata[key], old.metadata[key])
            assert new.metadata_types[key] == old.metadata_types[key]


def planned(path: Path, type: str | None, *rules: str, **options: bool) -> dict[str, tuple[str, str]]:
    with open_gguf(path) as file:
        return {p.info.name: (p.type.name, p.note) for p in requantize.types_of(file, type, rules, **options)}


def test_rows_that_blocks_do_not_divide(f16: Path) -> None:
    types = planned(f16, "q4_k_s")
    assert types["blk.0.ffn_up.weight"] == ("Q4_K", "")
    assert types["blk.0.ffn_down.weight"] == ("Q5_0", "rows of 96 are not whole blocks of 256 (Q4_K)")
    assert planned(f16, "q2_k")["blk.0.ffn_down.weight"][0] == "Q4_0"


def test_rows_of_odd_length_stay_f16(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "odd.gguf", n_ff=72, type_of=lambda name: T.F32)
    assert planned(path, "q4_0")["blk.1.ffn_down.weight"][0] == "F16"
    assert planned(path, "q6_k")["blk.1.ffn_down.weight"][0] == "F16"  # because Q8_0 does not fit either
    assert planned(path, "q4_0")["output.weight"] == ("Q8_0", "output")  # 64 is not a multiple of 256
    tied = write_llama(tmp_path / "tied.gguf", tied=True, n_embd=256, type_of=lambda name: T.F32)
    assert planned(tied, "q4_1")["token_embd.weight"] == ("Q6_K", "output")
    assert planned(tied, "bf16")["token_embd.weight"] == ("BF16", "")


def test_mixes_give_half_of_the_layers_more_bits(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "deep.gguf", n_layer=16, n_embd=256, n_ff=256, n_head=8, type_of=lambda name: T.F16
    )
    types = planned(path, "Q4_K")
    better = [i for i in range(16) if types[f"blk.{i}.ffn_down.weight"][0] == "Q6_K"]
    assert better == [0, 1, 4, 7, 10, 13, 14, 15]
    assert {types[f"blk.{i}.attn_v.weight"][0] for i in better} == {"Q6_K"}
    assert {types[f"blk.{i}.attn_k.weight"][0] for i in range(16)} == {"Q4_K"}


@pytest.mark.parametrize("arch", ["llama", "bamboo", "falcon", "opt"])
def test_powerinfer_files_equal_its_quantisers(tmp_path: Path, arch: str) -> None:
    path = write_relu(tmp_path / "f16.powerinfer.gguf", arch, n_embd=256, type_of=lambda name: T.F16)
    q4_0, q8_0 = planned(path, "q4_0"), planned(path, "q8_0")
    assert q4_0["blk.0.ffn_down_t.weight"] == q4_0["blk.1.fc2.weight"] == ("Q4_0", "")
    assert q8_0["blk.0.ffn_down_t.weight"] == ("Q8_0", "")
    assert q8_0["blk.1.fc1.weight"] == q8_0["blk.1.fc2.weight"] == ("Q5_0", "predictor")
    if arch == "opt":
        assert q4_0["position_embd.weight"] == q4_0["token_embd.weight"] == ("Q4_0", "")
        plain = write_relu(tmp_path / "f16.gguf", arch, dialect="gguf", type_of=lambda name: T.F16)
        assert planned(plain, "q4_0")["position_embd.weight"] == ("F16", "kept")
    else:
        assert q4_0["output.weight"] == ("Q8_0" if arch == "falcon" else "Q6_K", "output")
    requantize.quantize(path, tmp_path / "q4_0.powerinfer.gguf", "q4_0")
    with open_gguf(tmp_path / "q4_0.powerinfer.gguf") as new, open_gguf(path) as old:
        assert new.dialect == "powerinfer"
        assert new.metadata["powerinfer.sparse_threshold"] == old.metadata["powerinfer.sparse_threshold"]
        expected = quants.quantize(decoded(old, "blk.0.fc1.weight"), T.Q4_0).reshape(-1)
        assert np.array_equal(new.data("blk.0.fc1.weight"), expected)


def test_rules_for_some_tensors(f16: Path, tmp_path: Path) -> None:
    types = planned(f16, "q4_0", r"blk\.1\..*attn=q5_1", "attn_v=Q8_0", "^output=f16")
    assert types["blk.1.attn_v.weight"][0] == "Q5_1"  # the first match
    assert types["blk.0.attn_v.weight"][0] == "Q8_0"
    assert types["output.weight"][0] == "F16"
    assert types["blk.1.attn_norm.weight"][0] == "F32"  # vectors are unchanged
    alone = planned(f16, None, "ffn_up=q8_0")
    assert {name for name, (type, _) in alone.items() if type == "Q8_0"} == {
        "blk.0.ffn_up.weight",
        "blk.1.ffn_up.weight",
    }
    requantize.quantize(f16, tmp_path / "out.gguf", None, tensor_types=["ffn_up=q8_0"])
    with open_gguf(tmp_path / "out.gguf") as new:
        assert new.metadata["general.file_type"] == 1


@pytest.mark.parametrize(
    ("type", "rules", "message"),
    [
        ("q9_0", [], "'q9_0' is not known; it must be one of f32, f16"),
        ("q4_0", ["ffn_dwon=q8_0"], "no matrix .* 'ffn_dwon' is found"),
        ("q4_0", ["attn_norm=f16"], "no matrix"),
        ("q4_0", ["ffn_up"], "not PATTERN=TYPE"),
        ("q4_0", ["ffn_up=q8_1"], "not PATTERN=TYPE"),
        ("q4_0", ["ffn_up=iq2_s"], "IQ2_S .of blk.0.ffn_up.weight. .* importance matrix .*hotset imatrix"),
        ("iq3_xxs", [], "importance matrix"),
        ("q2_k_s", [], "importance matrix"),
        ("q4_0", ["*up=q8_0"], "not a regular expression"),
        (None, [], "there is nothing to do"),
    ],
)
def test_nonsense_is_refused(
    f16: Path, tmp_path: Path, type: str | None, rules: list[str], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        requantize.quantize(f16, tmp_path / "out.gguf", type, tensor_types=rules)
    assert [p.name for p in tmp_path.iterdir()] == ["f16.gguf"]


@needs_links
def test_the_model_that_is_read_is_not_written(f16: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(f16)
    before = f16.read_bytes()
    with pytest.raises(InvalidRequestError, match="is one of the files that are read"):
        requantize.quantize(f16, tmp_path / "link.gguf", "q4_0")
    assert f16.read_bytes() == before


def test_quantised_tensors_are_not_quantised_again(f16: Path, tmp_path: Path) -> None:
    q8_0 = tmp_path / "q8_0.gguf"
    requantize.quantize(f16, q8_0, "q8_0")
    with pytest.raises(InvalidRequestError, match=r"16 matrices .* allow_requantize=True"):
        planned(q8_0, "q4_0")
    requantize.quantize(q8_0, tmp_path / "q4_0.gguf", "q4_0", allow_requantize=True)
    with open_gguf(q8_0) as old, open_gguf(tmp_path / "q4_0.gguf") as new:
        name = "blk.1.ffn_gate.weight"
        assert np.array_equal(new.data(name), quants.quantize(decoded(old, name), T.Q4_0).reshape(-1))
    # A type of floats loses nothing.
    requantize.quantize(q8_0, tmp_path / "f32.gguf", "f32")
    with open_gguf(q8_0) as old, open_gguf(tmp_path / "f32.gguf") as new:
        assert np.array_equal(decoded(new, name), decoded(old, name))


@pytest.mark.parametrize("names", [["blk.0.fc1.weight", "blk.0.fc2.weight"], []])
def test_an_empty_predictor_and_a_file_without_tensors(names: list[str], tmp_path: Path) -> None:
    """Check empty vectors, which PowerInfer's dialect has, and which may have these names."""
    path, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    writer = GGUFWriter(path, "llama", dialect="powerinfer")
    for name in names:
        writer.add_tensor(name, np.empty(0, np.uint8), GGMLType.F32, (0,))
    writer.write()
    code, _, told = run(path, out)
    assert code == 0, told
    assert "bits per weight" not in told
    with open_gguf(out) as gguf:
        assert [(info.name, info.shape, info.nbytes) for info in gguf.tensors.values()] == [
            (name, (0,), 0) for name in names
        ]


def test_types_that_cannot_be_decoded(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "iq.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 288), np.uint8), T.Q8_1, (256, 4))
    writer.write()
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight .* Q8_1"):
        planned(tmp_path / "iq.gguf", "q4_0")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    data = weights(400, 256)
    data[317, 5] = value
    writer = GGUFWriter(tmp_path / "bad.gguf", "llama")
    writer.add_tensor("token_embd.weight", weights(4, 256), T.F32)
    writer.add_tensor("blk.0.ffn_up.weight", data, T.F32)
    writer.write()
    with pytest.raises(InvalidRequestError, match=r"bad\.gguf: tensor 'blk\.0\.ffn_up\.weight': .*NaN"):
        requantize.quantize(tmp_path / "bad.gguf", tmp_path / "out.gguf", "q4_0")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


def test_shards_become_one_file(tmp_path: Path) -> None:
    for i in range(2):
        writer = GGUFWriter(tmp_path / f"m-{i + 1:05d}-of-00002.gguf", "llama")
        for key, value in (("split.no", i), ("split.count", 2), ("split.tensors.count", 2)):
            writer.add(key, value)
        writer.add_tensor(f"blk.{i}.ffn_up.weight", weights(8, 64, seed=i), T.F32)
        writer.write()
    with pytest.raises(InvalidRequestError, match="is one of the files that are read"):
        requantize.quantize(tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf", "q4_0")
    requantize.quantize(tmp_path / "m-00002-of-00002.gguf", tmp_path / "out.gguf", "q5_0")
    with open_gguf(tmp_path / "out.gguf") as new:
        assert not [key for key in new.metadata if key.startswith("split.")]
        for i in range(2):
            expected = quants.quantize(weights(8, 64, seed=i), T.Q5_0).reshape(-1)
            assert np.array_equal(new.data(f"blk.{i}.ffn_up.weight"), expected)


def test_large_matrices_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requantize, "PIECE_BYTES", 50_000)
    writer = GGUFWriter(tmp_path / "in.gguf", "llama")
    stacked = weights(3 * 70, 256).reshape(3, 70, 256)  # like experts
    writer.add_tensor("blk.0.ffn_up_exps.weight", stacked, T.F16)
    writer.add_tensor("blk.0.ffn_gate_inp.weight", stacked[0], T.F32)
    writer.write()
    requantize.quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q8_0")
    with open_gguf(tmp_path / "in.gguf") as old, open_gguf(tmp_path / "out.gguf") as new:
        assert new.tensors["blk.0.ffn_up_exps.weight"].shape == (256, 70, 3)
        expected = quants.quantize(decoded(old, "blk.0.ffn_up_exps.weight"), T.Q8_0).reshape(-1)
        assert np.array_equal(new.data("blk.0.ffn_up_exps.weight"), expected)
        assert new.tensors["blk.0.ffn_gate_inp.weight"].type == T.F32  # a router must be exact


# ---- the process ---------------------------------------------------------------------------------------

BIG = (16384, 8192)  # rows, values: 512 MB as F32, written sparse by the system

MEASURE = """
import resource, sys
from hotset.formats.requantize import quantize
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize(sys.argv[1], sys.argv[2], "q4_0")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file whose only matrix is 512 MB of zeros (a hole in the file)."""
    path = tmp_path_factory.mktemp("big") / "big.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", lambda: np.zeros((1, BIG[1]), np.float32), T.F32, (BIG[1], 1))
    writer.write()
    raw = path.read_bytes()
    start = len(raw) - BIG[1] * 4
    dims = (BIG[1]).to_bytes(8, "little") + (1).to_bytes(8, "little")
    assert raw.count(dims) == 1
    header = raw[:start].replace(dims, dims[:8] + BIG[0].to_bytes(8, "little"))
    path.write_bytes(header)
    os.truncate(path, start + BIG[0] * BIG[1] * 4)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
def test_memory_does_not_grow_with_the_model(big: Path, tmp_path: Path) -> None:
    """Return the peak resident memory, including mapped pages of the model."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(big), str(tmp_path / "out.gguf")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(run.stdout) * 1024 < 250e6
    assert (tmp_path / "out.gguf").stat().st_size > BIG[0] * BIG[1] // 32 * 18


@needs_unnamed_files
def test_a_killed_process_leaves_nothing(big: Path, tmp_path: Path) -> None:
    code = "import sys; from hotset.formats.requantize import quantize; "
    code += "quantize(sys.argv[1], sys.argv[2], 'q6_k', n_threads=1)"
    kill_while_it_writes(code, big, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


# ---- the command ---------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_command(f16: Path, tmp_path: Path) -> None:
    code, out, err = run(f16, tmp_path / "out.gguf", "--type", "Q4_0", "--json", "-t", 2)
    assert code == 0, err
    report = json.loads(out)
    assert report["size"] == (tmp_path / "out.gguf").stat().st_size
    assert report["size_before"] == f16.stat().st_size
    by_name = {tensor["name"]: tensor for tensor in report["tensors"]}
    up = by_name["blk.0.ffn_up.weight"]
    assert (up["from"], up["type"], up["size"]) == ("F16", "Q4_0", row_bytes(T.Q4_0, 256) * 96)
    code, _, err = run(f16, tmp_path / "again.gguf")
    assert code == 0
    assert re.search(r"Wrote .*again\.gguf \(.* bits per weight; .* before\) in", err.replace("\n", " "))
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "out.gguf").read_bytes()


def test_dry_run_tells_sizes_and_writes_nothing(f16: Path, tmp_path: Path) -> None:
    code, out, err = run(f16, "--dry-run", "--type", "q4_k_m")
    assert code == 0, err
    assert re.search(r"blk\.\*\.ffn_up\.weight +2 +256 x 96 +F16 +Q4_K", out)
    assert [p.name for p in tmp_path.iterdir()] == ["f16.gguf"]
    code, out, _ = run(f16, "--dry-run", "--type", "q4_k_m", "--json")
    expected = json.loads(out)["size"]
    assert json.loads(out)["path"] is None
    run(f16, tmp_path / "out.gguf", "--type", "q4_k_m")
    assert abs((tmp_path / "out.gguf").stat().st_size - expected) < 2000  # the header and padding


def test_command_warns_of_types_that_powerinfer_misreads(tmp_path: Path) -> None:
    path = write_relu(tmp_path / "f16.powerinfer.gguf", type_of=lambda name: T.F16)
    assert "ffn_down_t" not in run(path, "--dry-run")[2]
    assert (
        "ffn_down_t as F16 or Q4_0 only, and here it is Q8_0" in run(path, "--dry-run", "--type", "q8_0")[2]
    )


def test_command_mistakes(f16: Path) -> None:
    assert run(f16)[0] == 2
    assert run(f16, f16.with_name("out.gguf"), "--type", "q9")[0] == 2
    code, _, err = run(f16, f16)
    assert code == 2
    assert "is one of the files that are read" in err.replace("\n", " ")


def test_full_disk_is_reported_before_writing(
    f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(HotsetError, match=r"takes .* KiB, but .* has only 1000 B left"):
        requantize.quantize(f16, tmp_path / "out.gguf", "q4_0")


def test_sizes_of_types() -> None:
    assert {target.type for target in requantize.TARGETS.values()} == set(WRITABLE)
    bits = [TYPES[type].bits_per_value for type in WRITABLE]
    assert bits == sorted(bits, reverse=True) or WRITABLE[1:3] == (T.F16, T.BF16)


# ---- mixes and importance matrices ---------------------------------------------------------------------


def importance_of(path: Path, *, without: str = "-") -> ImportanceMatrix:
    rng = np.random.default_rng(0)
    with open_gguf(path) as file:
        shapes = {name: info.shape for name, info in file.tensors.items() if requantize.is_matrix(info)}
    inputs = {
        name: Inputs(rng.lognormal(0, 1, (math.prod(shape[2:]), shape[0])).astype(np.float32), np.ones(1))
        for name, shape in shapes.items()
        if without not in name
    }
    return ImportanceMatrix(inputs, ("text.txt",), 3, 512)


def mix_of(path: Path, type: str, **how: Any) -> dict[str, set[str]]:
    """Return the types of each kind of matrix, in any layer."""
    found: dict[str, set[str]] = {}
    with open_gguf(path) as file:
        for p in requantize.types_of(file, type, **how):
            found.setdefault(re.sub(r"^blk\.\d+\.|\.weight$", "", p.info.name), set()).add(p.type.name)
    return found


def test_mixes_are_llama_cpps(tmp_path: Path) -> None:
    """Return the types that llama.cpp's llama_model_quantize writes (0.3.36 of its Python bindings)."""
    shape = {"n_layer": 16, "n_embd": 256, "n_ff": 256, "n_head": 8, "type_of": lambda name: T.F16}
    path = write_llama(tmp_path / "grouped.gguf", n_head_kv=2, **shape)
    mix = mix_of(path, "iq2_xs", importance=importance_of(path))
    assert mix["attn_v"] == {"Q4_K"}
    assert mix["ffn_down"] == {"Q2_K", "IQ2_XS"}
    assert mix["output"] == {"Q5_K"}
    assert mix["token_embd"] == {"Q2_K"}
    mix = mix_of(path, "q3_k")
    assert (mix["attn_v"], mix["attn_output"], mix["ffn_down"]) == (
        {"Q5_K", "Q4_K"},
        {"Q4_K"},
        {"Q5_K", "Q4_K"},
    )
    mix = mix_of(path, "iq4_xs")
    assert (mix["attn_v"], mix["ffn_down"], mix["ffn_up"]) == ({"Q5_K"}, {"Q5_K", "IQ4_XS"}, {"IQ4_XS"})
    assert mix_of(path, "iq4_xs", importance=importance_of(path))["ffn_down"] == {"IQ4_XS"}
    path = write_llama(tmp_path / "experts.gguf", n_head_kv=8, experts=(8, 2), **shape)
    mix = mix_of(path, "q4_k_m")
    assert (mix["attn_v"], mix["attn_k"], mix["attn_output"]) == ({"Q8_0"}, {"Q8_0"}, {"Q5_K"})
    assert mix["ffn_down_exps"] == {"Q4_K", "Q6_K"}


def test_a_file_with_an_importance_matrix(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "f16.gguf", n_embd=256, n_head=8, n_ff=256, experts=(4, 2), type_of=lambda name: T.F16
    )
    importance = importance_of(path)
    importance.save(tmp_path / "i.gguf")
    code, _, told = run(path, tmp_path / "out.gguf", "--type", "q4_k_s", "--imatrix", tmp_path / "i.gguf")
    assert code == 0, told
    name = "blk.1.ffn_up_exps.weight"
    with open_gguf(path) as old, open_gguf(tmp_path / "out.gguf") as new:
        weights_of = importance.weights(name, old.tensors[name].shape)
        assert weights_of is not None
        rows = decoded(old, name).reshape(-1, 256)
        expected = weighted(rows, T.Q4_K, Importance(weights_of, len(rows) // 4))
        assert np.array_equal(new.data(name), expected.reshape(-1))
        found = {key: value for key, value in new.metadata.items() if key.startswith("quantize.")}
    assert found == {
        "quantize.imatrix.file": "i.gguf",
        "quantize.imatrix.dataset": "text.txt",
        "quantize.imatrix.entries_count": len(importance.inputs),
        "quantize.imatrix.chunks_count": 3,
    }


def test_a_fallback_is_fitted_by_the_importance_matrix(tmp_path: Path) -> None:
    """Check rows of 96, which blocks of Q2_K do not divide, so that their matrices become Q4_0."""
    path = write_llama(tmp_path / "f16.gguf", n_embd=96, n_head=3, n_ff=96, type_of=lambda name: T.F16)
    importance = importance_of(path)
    importance.save(tmp_path / "i.gguf")
    requantize.quantize(path, tmp_path / "out.gguf", "q2_k", imatrix=tmp_path / "i.gguf")
    name = "blk.1.ffn_up.weight"
    with open_gguf(path) as old, open_gguf(tmp_path / "out.gguf") as new:
        assert new.tensors[name].type == T.Q4_0
        of = importance.weights(name, (96, 96))
        assert of is not None
        rows, found = decoded(old, name), decoded(new, name)
    plain = dequantize(encode(rows, T.Q4_0), T.Q4_0, (96, 96))
    assert np.sum(of * (found - rows) ** 2) < 0.9 * np.sum(of * (plain - rows) ** 2)


def test_importance_that_is_missing_or_of_another_model(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "f16.gguf", n_embd=256, n_head=8, n_ff=256, type_of=lambda name: T.F16)
    with pytest.raises(InvalidRequestError, match=r"the file lacks that of blk\.0\.ffn_up\.weight"):
        mix_of(path, "iq3_xxs", importance=importance_of(path, without="ffn_up"))
    assert mix_of(
        path, "iq3_xxs", importance=importance_of(path, without="token_embd")
    )  # rows are not summed
    other = write_llama(tmp_path / "other.gguf", type_of=lambda name: T.F16)
    with pytest.raises(InvalidRequestError, match="to another model"):
        mix_of(path, "q4_k_m", importance=importance_of(other))
    with pytest.raises(InvalidRequestError, match="to another model"):
        mix_of(path, "q4_k_m", importance=ImportanceMatrix({"v.weight": Inputs(np.ones((1, 4)), np.ones(1))}))
