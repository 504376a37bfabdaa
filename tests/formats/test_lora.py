"""Adapter files: valid ones, refused ones, and any damaged bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_adapters import random_pairs, write_adapter
from tiny_gguf import write_llama

from hotset.errors import FormatError, HotsetError, InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.lora import FloatMatrix, LoraAdapter, LowRankPair, open_gguf_adapter
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.low_rank import adaptable

Q = "blk.0.attn_q.weight"
GATE = "blk.1.ffn_gate.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return open_gguf(write_llama(tmp_path_factory.mktemp("lora") / "model.gguf"))


@pytest.fixture(scope="module")
def matrices(model: GGUFFile) -> dict[str, tuple[int, int]]:
    return adaptable(describe(config_from_gguf(model), model.tensors), model.tensors)


@pytest.fixture
def pairs(model: GGUFFile) -> dict[str, LowRankPair]:
    return random_pairs(describe(config_from_gguf(model), model.tensors), model.tensors)


def read(path: Path) -> LoraAdapter:
    with open_gguf_adapter(path) as file:
        adapter = file.read()
    assert adapter.nbytes == file.nbytes
    return adapter


@pytest.mark.parametrize("type", [GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0])
def test_adapter_round_trip(tmp_path: Path, type: GGMLType) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 64), (128, 32)))
    pair = LowRankPair(FloatMatrix.of(a), FloatMatrix.of(b), 1.0)
    path = write_adapter(tmp_path / "a.gguf", {Q: pair}, alpha=16, type=type)
    assert open_gguf_adapter(path).architecture == "llama"
    found = read(path).pairs[Q]
    assert (found.rank, found.factor) == (32, 0.5)
    step = {GGMLType.F32: 0, GGMLType.F16: 2.0**-11, GGMLType.BF16: 2.0**-8, GGMLType.Q8_0: 1 / 127}[type]
    for matrix, values in ((found.a, a), (found.b, b)):
        assert matrix.type == (GGMLType.F32 if type == GGMLType.Q8_0 else type)  # blocks are decoded
        np.testing.assert_allclose(matrix.floats, values, rtol=0, atol=step * np.abs(values).max())
    plain = read(write_adapter(tmp_path / "b.gguf", {Q: pair}, alpha=0))
    assert plain.pairs[Q].factor == 1.0


def test_digest_depends_on_the_added_parts(tmp_path: Path, pairs: dict[str, LowRankPair]) -> None:
    digests = [
        read(write_adapter(tmp_path / f"{i}.gguf", given, alpha=alpha)).digest
        for i, (given, alpha) in enumerate([(pairs, 8), (pairs, 8), (pairs, 4), ({Q: pairs[Q]}, 8)])
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_one_for_the_model_is_taken(
    tmp_path: Path, pairs: dict[str, LowRankPair], matrices: dict[str, tuple[int, int]]
) -> None:
    assert len(matrices) == 2 * 7 + 1
    open_gguf_adapter(write_adapter(tmp_path / "a.gguf", pairs)).check_model("llama", matrices)


@pytest.mark.parametrize(
    ("changed", "architecture", "message"),
    [
        ({}, "qwen2", "for llama models, but this model is qwen2"),
        ({"token_embd.weight": Q}, "llama", "token_embd.weight, which adapters cannot change"),
        ({"blk.7.attn_q.weight": Q}, "llama", "blk.7.attn_q.weight, which adapters cannot change"),
        ({"blk.0.attn_k.weight": Q}, "llama", r"of \[128, 64\].* the model's is \[64, 64\]"),
    ],
)
def test_one_for_another_model_is_refused(
    tmp_path: Path,
    pairs: dict[str, LowRankPair],
    matrices: dict[str, tuple[int, int]],
    changed: dict[str, str],
    architecture: str,
    message: str,
) -> None:
    given = pairs | {name: pairs[like] for name, like in changed.items()}
    with pytest.raises(InvalidRequestError, match=message):
        open_gguf_adapter(write_adapter(tmp_path / "a.gguf", given)).check_model(architecture, matrices)


def written(path: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    writer = GGUFWriter(path, "llama")
    facts = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0} | keys
    for key, value in facts.items():
        if value is not None:
            writer.add(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, GGMLType.F32)
    writer.write()
    return path


ONES = {f"{Q}.lora_a": np.ones((4, 64), np.float32), f"{Q}.lora_b": np.ones((128, 4), np.float32)}
NAN = np.where(np.arange(4 * 64).reshape(4, 64) == 7, np.nan, 1).astype(np.float32)


@pytest.mark.parametrize(
    ("keys", "tensors", "error", "message"),
    [
        ({"general.type": "model"}, {}, FormatError, "is not an adapter"),
        ({"adapter.type": "control_vector"}, {}, UnsupportedModelError, "type control_vector"),
        ({"adapter.alora.invocation_tokens": [1]}, {}, UnsupportedModelError, "activated LoRA"),
        ({"adapter.lora.alpha": None}, {}, FormatError, "adapter.lora.alpha"),
        ({"adapter.lora.alpha": float("nan")}, {}, FormatError, "adapter.lora.alpha"),
        ({"adapter.lora.alpha": -1.0}, {}, FormatError, "adapter.lora.alpha"),
        ({}, {f"{Q}.lora_b": None}, FormatError, "lora_a without its partner"),
        ({}, {f"{Q}.lora_a": None}, FormatError, "lora_b without its partner"),
        ({}, {f"{Q}.lora_a": NAN}, FormatError, "not finite"),
        ({}, {f"{Q}.lora_a": np.ones((5, 64), np.float32)}, FormatError, r"\[5, 64\] and \[128, 4\]"),
        ({}, {f"{Q}.lora_a": np.ones((2, 4, 64), np.float32)}, UnsupportedModelError, "not of experts"),
        ({}, {"blk.0.attn_norm.weight": np.ones(64, np.float32)}, UnsupportedModelError, "attn_norm"),
        ({}, dict.fromkeys(ONES), FormatError, "no matrices"),
        (
            {},
            {f"{Q}.lora_a": np.ones((999, 64), np.float32), f"{Q}.lora_b": np.ones((128, 999), np.float32)},
            FormatError,
            "rank that does not exceed the matrix",
        ),
    ],
)
def test_invalid_adapter_is_refused(
    tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], error: type[HotsetError], message: str
) -> None:
    given = {name: values for name, values in (ONES | tensors).items() if values is not None}
    with pytest.raises(error, match=message):
        read(written(tmp_path / "a.gguf", keys, given))


def test_damaged_files_are_one_message(
    tmp_path: Path, pairs: dict[str, LowRankPair], matrices: dict[str, tuple[int, int]]
) -> None:
    """Check that an adapter with any changed bytes is read, or refused with a message."""
    whole = bytearray(write_adapter(tmp_path / "a.gguf", {Q: pairs[Q], GATE: pairs[GATE]}).read_bytes())
    rng, path, refused = np.random.default_rng(0), tmp_path / "damaged.gguf", []
    for _ in range(400):
        damaged = whole.copy()
        for at in rng.integers(0, 600, rng.integers(1, 4)):  # in the description of the tensors
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged[: rng.integers(1, len(whole))] if rng.random() < 0.1 else damaged)
        try:
            open_gguf_adapter(path).check_model("llama", matrices)
            read(path)
        except HotsetError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert not any("\n" in message for message in refused)
