"""PowerInfer's dialect: its models compared with a masked forward pass in NumPy, and its other files."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_relu
from waiting import WATCHDOG

from hotset.backends.base import Batch, StepResult, StepStats
from hotset.backends.reference import ReferenceBackend
from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.formats import torch_file
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.powerinfer import (
    activation_files,
    gpu_index_file,
    read_activations,
    read_gpu_index,
    write_activations,
)
from hotset.formats.quants import GGMLType, dequantize
from hotset.formats.torch_file import map_torch, read_torch, write_torch
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.predictor import Predictor

# The sizes of tiny_gguf.write_relu.
N_LAYER, D, N_FF, N_HEAD, N_VOCAB, HEAD_DIM = 2, 64, 96, 4, 96, 16
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama"}, "bamboo": {"architecture": "bamboo"},
    "falcon-7b": {"architecture": "falcon", "n_head_kv": 1},
    "falcon-40b": {"architecture": "falcon", "two_norms": True}, "opt": {"architecture": "opt"},
}  # fmt: skip
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, 75)


def write(path: Path, model: str, **options: Any) -> Path:
    return write_relu(path / "model.gguf", **{**MODELS[model], **options})


def run(gguf: GGUFFile, mode: str, *taps: str, **options: Any) -> tuple[StepResult, StepStats]:
    """Run the whole prompt in one step, with the predictor in the file (mode "predicted") or without."""
    config = config_from_gguf(gguf)
    predictor = Predictor("mlp", (config.sparse_threshold,) * config.n_layer) if mode == "predicted" else None
    backend = ReferenceBackend(gguf, describe(config, gguf.tensors, predictor), n_blocks=2, **options)
    n = len(TOKENS)
    arrays = (TOKENS, np.arange(n), np.zeros(n), [[1, 0]], np.arange(n))
    result = backend.step(Batch(*(np.array(a, np.int32) for a in arrays), taps=taps))
    stats = backend.stats()
    assert stats is not None
    return result, stats


class Masked:
    """A forward pass of PowerInfer's models in float64, written from its source, without Graph."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.architecture, self.tensors = gguf.architecture, gguf.tensors
        self.weights = {
            name: dequantize(gguf.data(name), info.type, info.shape)
            .reshape(info.shape[::-1])
            .astype(np.float64)
            for name, info in gguf.tensors.items()
        }
        self.threshold = gguf.metadata.get("powerinfer.sparse_threshold", 0.0)
        self.masks: list[np.ndarray] = []
        self.neurons: list[np.ndarray] = []

    def product(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        if f"{name}.bias" in self.weights:
            x = x - x.mean(1, keepdims=True)
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)
        return x * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0)

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """Return x [n_tokens, n_head, HEAD_DIM] as complex numbers, rotated."""
        angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
        turn = np.exp(1j * angles)[:, None]
        half = HEAD_DIM // 2
        if self.architecture == "falcon":
            z = (x[..., :half] + 1j * x[..., half:]) * turn
            return np.concatenate([z.real, z.imag], axis=-1)
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    def attention(self, h: np.ndarray, blk: str) -> np.ndarray:
        if self.architecture == "falcon":
            qkv = self.product(h, f"{blk}.attn_qkv")
            kv = (qkv.shape[1] - D) // 2
            q, k, v = qkv[:, :D], qkv[:, D : D + kv], qkv[:, D + kv :]
        else:
            q, k, v = (self.product(h, f"{blk}.attn_{x}") for x in "qkv")
        q, k, v = (x.reshape(len(h), -1, HEAD_DIM) for x in (q, k, v))
        if self.architecture != "opt":
            q, k = self.rotated(q), self.rotated(k)
        k, v = (np.repeat(x, N_HEAD // x.shape[1], axis=1) for x in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(HEAD_DIM)
        scores[:, np.triu(np.ones((len(h), len(h)), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.product(np.einsum("hts,shd->thd", weights, v).reshape(len(h), D), f"{blk}.attn_output")

    def ffn(self, h: np.ndarray, p: np.ndarray, blk: str) -> np.ndarray:
        scores = self.product(np.maximum(self.product(p, f"{blk}.fc1"), 0), f"{blk}.fc2")
        up = self.product(h, f"{blk}.ffn_up")
        if self.architecture in ("llama", "bamboo"):
            gate = np.maximum(self.product(h, f"{blk}.ffn_gate"), 0)
            neurons = gate * (np.maximum(up, 0) if self.architecture == "bamboo" else up)
        else:
            neurons = np.maximum(up, 0)
        self.masks.append(scores >= self.threshold)
        self.neurons.append(neurons * self.masks[-1])
        down = self.neurons[-1] @ self.weights[f"{blk}.ffn_down_t.weight"]
        return down + self.weights.get(f"{blk}.ffn_down_t.bias", 0)

    def logits(self) -> np.ndarray:
        x = self.weights["token_embd.weight"][TOKENS]
        if self.architecture == "opt":
            x = x + self.weights["position_embd.weight"][2 : 2 + len(TOKENS)]
        for i in range(N_LAYER):
            blk = f"blk.{i}"
            if self.architecture == "falcon":
                h = self.norm(x, f"{blk}.attn_norm")
                second = f"{blk}.attn_norm_2"
                of_attention = self.norm(x, second) if f"{second}.weight" in self.weights else h
                x = x + self.attention(of_attention, blk) + self.ffn(h, x, blk)
            else:
                x = x + self.attention(self.norm(x, f"{blk}.attn_norm"), blk)
                x = x + self.ffn(self.norm(x, f"{blk}.ffn_norm"), x, blk)
        output = "output" if "output.weight" in self.weights else "token_embd"
        return self.product(self.norm(x, "output_norm"), output)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0])
@pytest.mark.parametrize("model", MODELS)
def test_predicted_is_the_masked_forward_pass(tmp_path: Path, model: str, type_: GGMLType) -> None:
    def type_of(name: str) -> GGMLType:
        """Write a Q4_0 file like the original quantiser, except for output.weight, which is not Q6_K here."""
        return GGMLType.Q8_0 if type_ == GGMLType.Q4_0 and name == "output" else type_

    with open_gguf(write(tmp_path, model, type_of=type_of)) as gguf:
        taps = [f"blk.{i}.{name}" for i in range(N_LAYER) for name in ("ffn_pred", "ffn_masked")]
        found, stats = run(gguf, "predicted", *taps, sparse=True)
        expected = Masked(gguf)
        logits = expected.logits()
    for i in range(N_LAYER):
        assert np.array_equal(found.taps[f"blk.{i}.ffn_pred"] >= np.float32(0.1), expected.masks[i])
        assert relative_error(found.taps[f"blk.{i}.ffn_masked"], expected.neurons[i]) < 1e-4
        fires, mask = expected.neurons[i] != 0, expected.masks[i]
        assert 0.2 < mask.mean() < 0.8  # neither all nor none: the mask matters
        assert stats.selected[i] == mask.sum()
        assert stats.active[i] == fires.sum()
        assert stats.down_rows[i] == fires.any(0).sum()
        assert stats.gate_rows[i] == (mask.any(0).sum() if model in ("llama", "bamboo") else 0)
    assert relative_error(found.logits, logits) < 1e-4
    dense, stats = run(gguf := open_gguf(gguf.path), "dense")
    assert relative_error(dense.logits, logits) > 1e-2  # not the same function as without the predictor
    assert (stats.selected == len(TOKENS) * N_FF).all()
    assert (stats.up_rows == N_FF).all()
    gguf.close()


@pytest.mark.parametrize("model", MODELS)
def test_a_predictor_that_says_all_and_one_that_says_none(tmp_path: Path, model: str) -> None:
    silent = {f"blk.{i}.fc2": np.zeros((N_FF, rank), np.float32) for i, rank in enumerate((32, 64))}
    with open_gguf(write(tmp_path / "all", model, replaced=silent, threshold=None)) as gguf:
        assert np.array_equal(run(gguf, "predicted")[0].logits, run(gguf, "dense")[0].logits)
    nothing = {f"blk.{i}.ffn_down_t": np.zeros((N_FF, D), np.float32) for i in range(N_LAYER)}
    with (
        open_gguf(write(tmp_path / "none", model, replaced=silent, threshold=0.5)) as gguf,
        open_gguf(write(tmp_path / "path", model, replaced=nothing)) as attention_only,
    ):
        found, stats = run(gguf, "predicted")
        np.testing.assert_array_equal(found.logits, run(attention_only, "dense")[0].logits)
        assert stats.selected.sum() == stats.active.sum() == 0


@pytest.mark.parametrize("model", MODELS)
def test_dense_is_the_plain_file(tmp_path: Path, model: str) -> None:
    """Check that a transposed matrix computes the same; a plain file may have one too."""
    with (
        open_gguf(write(tmp_path / "sparse", model)) as sparse,
        open_gguf(write(tmp_path / "plain", model, dialect="gguf")) as plain,
    ):
        expected = run(plain, "dense")[0].logits
        assert relative_error(run(sparse, "dense")[0].logits, expected) < 1e-5
        config = config_from_gguf(plain)
        assert config.has_zeros
        both = {**plain.tensors, **{n: i for n, i in sparse.tensors.items() if "ffn_down_t.weight" in n}}
        names = {getattr(op, "weight", None) for op in describe(config, both).primitives}
        assert "blk.1.ffn_down_t.weight" in names
        assert "blk.1.ffn_down.weight" not in names


def test_nan_scores_select() -> None:
    from hotset.backends.reference import selected
    from hotset.model.operations import Mask, Value

    op = Mask(Value(2, 5, "m"), Value(0, 5, "x"), Value(1, 4, "s"), threshold=0.5, first=1)
    scores = np.array([[np.nan, 0.4, 0.5, -np.inf]], np.float32)
    assert selected(op, scores).tolist() == [[True, True, False, True, False]]


def test_neurons_that_are_always_computed_have_no_score(tmp_path: Path) -> None:
    """Check `first` neurons before the scored ones, and the bias that always selects single neurons."""
    first, rank = 32, 64
    with open_gguf(write(tmp_path, "llama", ranks=(32, 64))) as gguf:
        path = tmp_path / "first.gguf"
        writer = GGUFWriter(path, "llama", dialect="powerinfer")
        for key, value in gguf.metadata.items():
            if key != "general.architecture":
                writer.add(key, value, gguf.metadata_types[key][-1])
        for name, info in gguf.tensors.items():
            data = dequantize(gguf.data(name), info.type, info.shape).reshape(info.shape[::-1])
            writer.add_tensor(name, data[first:] if name == "blk.1.fc2.weight" else data, info.type)
        bias = np.zeros(N_FF - first, np.float32)
        bias[3] = np.inf
        writer.add_tensor("blk.1.always.bias", bias, GGMLType.F32)
        writer.write()
    with open_gguf(path) as gguf:
        config = config_from_gguf(gguf)
        predictor = Predictor("mlp", (0.1, 0.1), first=(N_FF, first))
        graph = describe(config, gguf.tensors, predictor)
        names = {value.name for value in graph.values}
        assert "blk.0.ffn_pred" not in names
        assert "blk.0.ffn_masked" not in names
        assert next(v.width for v in graph.values if v.name == "blk.1.ffn_pred_h") == rank
        backend = ReferenceBackend(gguf, graph, n_blocks=1)
        taps = ("blk.1.ffn_act", "blk.1.ffn_masked", "blk.1.ffn_pred")
        arrays = (TOKENS[:20], np.arange(20), np.zeros(20), [[0]], [])
        found = backend.step(Batch(*(np.array(a, np.int32) for a in arrays), taps=taps)).taps
    kept = np.ones((20, N_FF), bool)
    kept[:, first:] = found["blk.1.ffn_pred"] >= np.float32(0.1)
    assert kept[:, first + 3].all()
    assert not kept.all()
    assert np.array_equal(found["blk.1.ffn_masked"], np.where(kept, found["blk.1.ffn_act"], 0))


def test_opt_refuses_positions_that_it_has_not_learned(tmp_path: Path) -> None:
    with open_gguf(write(tmp_path, "opt", n_ctx=60)) as gguf:
        config = config_from_gguf(gguf)
        assert config.n_ctx_train == config.n_ctx_max == 60  # neither the key's number nor the 62 rows
        with pytest.raises(InvalidRequestError, match="position 74 lies past 59"):
            run(gguf, "dense")


@pytest.mark.parametrize("model", ["llama", "falcon-7b", "opt"])
def test_every_tensor_is_requested_with_its_shape(tmp_path: Path, model: str) -> None:
    with open_gguf(write(tmp_path, model)) as gguf:
        config = config_from_gguf(gguf)
        predictor = Predictor("mlp", (0.0, 0.0))
        for name, info in gguf.tensors.items():
            rest = {n: i for n, i in gguf.tensors.items() if n != name}
            if name != "output.weight":
                with pytest.raises(UnsupportedModelError, match="lacks the tensor"):
                    describe(config, rest, predictor)
            wrong = type(info)(name, (*info.shape[:-1], info.shape[-1] + 8), info.type, 0, 0)
            with pytest.raises(UnsupportedModelError, match="but the file's keys say"):
                describe(config, {**gguf.tensors, name: wrong}, predictor)


def test_integers_have_the_type_ids_of_an_older_ggml(tmp_path: Path) -> None:
    ids = {GGMLType.I8: 16, GGMLType.I16: 17, GGMLType.I32: 18}
    for type_, id in ids.items():
        values = np.arange(5, dtype=f"<i{ {16: 1, 17: 2, 18: 4}[id] }")
        writer = GGUFWriter(tmp_path / "x.gguf", "llama", dialect="powerinfer")
        writer.add_tensor("numbers", values.view(np.uint8), type_, (5,))
        writer.write()
        assert struct.pack("<QI", 5, id) in (tmp_path / "x.gguf").read_bytes()
        with open_gguf(tmp_path / "x.gguf") as gguf:
            assert gguf.tensors["numbers"].type == type_
            assert np.array_equal(gguf.data("numbers").view(values.dtype), values)


# ---- the files next to a model --------------------------------------------------------------------------


def test_activation_counts_are_in_the_order_of_layer_numbers(tmp_path: Path) -> None:
    model = tmp_path / "model.powerinfer.gguf"
    assert activation_files(model) is None
    counts = [np.arange(6) * 10**i for i in range(12)]  # as text, activation_10 sorts before activation_2
    write_activations(tmp_path / "activation", counts)
    folder = activation_files(model)
    assert folder == tmp_path / "activation"
    for n_layer, n_ff in ((12, 6), (12, (6,) * 12), (None, None)):
        found = read_activations(folder, n_layer, n_ff)
        assert all(np.array_equal(a, b) for a, b in zip(found, counts, strict=True))
    with pytest.raises(FormatError, match=r"more than 11 layers: it has activation_11\.pt"):
        read_activations(folder, 11, 6)
    with pytest.raises(FormatError, match=r"lacks activation_12\.pt"):
        read_activations(folder, 13, 6)
    with pytest.raises(FormatError, match=r"a tensor \[6\], but the layer has 7 neurons"):
        read_activations(folder, 12, 7)
    write_torch(folder / "activation_3.pt", np.array([1, 2, 3, 4, 5, -1.0]))
    with pytest.raises(FormatError, match="cannot be a count"):
        read_activations(folder)
    (folder / "activation_999999999999.pt").touch()
    with pytest.raises(FormatError, match=r"lacks activation_12\.pt"):
        read_activations(folder)


def test_torch_reads_written_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for values in (np.arange(5), np.ones((2, 3), np.float32), np.zeros(0), np.array([True, False])):
        write_torch(tmp_path / "x.pt", values)
        found = torch.load(tmp_path / "x.pt", weights_only=True).numpy()
        assert found.dtype == values.dtype
        assert np.array_equal(found, values)
        assert np.array_equal(read_torch(tmp_path / "x.pt"), values)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_are_read(tmp_path: Path, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(24).reshape(4, 6)
    tensors = {
        "long": base, "view": base[1:, ::2], "turned": base.T, "float": torch.linspace(-1, 1, 7),
        "half": torch.ones(3, dtype=torch.float16), "one": torch.tensor(5, dtype=torch.int32),
        "none": torch.zeros(0), "bool": torch.tensor([True, False]),
    }  # fmt: skip
    for name, tensor in tensors.items():
        torch.save(tensor, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        assert np.array_equal(read_torch(tmp_path / "x.pt"), tensor.numpy()), name
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    state = read_torch(tmp_path / "x.pt")
    assert isinstance(state, dict)
    assert {name: v.shape for name, v in state.items()} == {"weight": (2, 3), "bias": (2,)}


@pytest.mark.parametrize("zipped", [True, False])
def test_anything_but_tensors_is_refused_and_nothing_is_called(tmp_path: Path, zipped: bool) -> None:
    torch = pytest.importorskip("torch")

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "called",)

    for value in (
        Hostile(),
        [1, 2],
        "text",
        {"a": 1},
        {"a": torch.zeros(2), "b": Hostile()},
        torch.nn.ReLU(),
    ):
        torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(FormatError, match="has contents other than "):
            read_torch(tmp_path / "x.pt")
    assert not (tmp_path / "called").exists()


def storage(n: int = 4, kind: str = "torch\nLongStorage") -> bytes:
    size = b"\x8a\x08" + struct.pack("<q", n)
    return b"(X\7\0\0\0storagec" + kind.encode() + b"\nX\1\0\0\0" + b"0X\3\0\0\0cpu" + size + b"tQ"


def tensor(numbers: list[int], base: bytes) -> bytes:
    offset, size, stride = (b"\x8a\x08" + struct.pack("<q", n) for n in numbers)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + base + offset + size + b"\x85" + stride + b"\x85tR"


@pytest.mark.parametrize(
    "pickle",
    [
        tensor([0, 5, 1], storage()),  # longer than its storage
        tensor([2, 3, 1], storage()),  # past its end
        tensor([-1, 3, 1], storage()),
        tensor([0, 4, 2], storage()),
        tensor([0, 4, -1], storage()),
        tensor([0, 1 << 40, 0], storage()),  # a terabyte out of one element
        tensor([0, 4, 1], storage(-4)),
        tensor([0, 4, 1], storage(1 << 40)),
        tensor([0, 4, 1], storage(kind="os\nsystem")),
        tensor([0, 4, 1], b"K\1"),
        b"cos\nsystem\n(X\4\0\0\0truetR",
        b"cbuiltins\neval\n(tR",
        b"\x94" * 10,
        b"r\xff\xff\xff\xff",
        b"X\xff\xff\xff\x7f",
        b"\x8a\xff",
        b"K\1K\1s",
        b"t",
        b"h\0",
        b"(((((",
        b"",
    ],
)
def test_a_hostile_pickle_is_refused(tmp_path: Path, pickle: bytes) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + pickle + b".")
        archive.writestr("x/data/0", bytes(32))
    with pytest.raises(FormatError) as error:
        read_torch(path)
    assert "\n" not in str(error.value)
    path.write_bytes(b"\x80\x02" + pickle + b".")
    with pytest.raises(FormatError):
        read_torch(path)


def zipped_pickle(path: Path, pickle: bytes, n_bytes: int = 32) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + pickle + b".")
        archive.writestr("x/data/0", bytes(n_bytes))
    return path


HALVES = b")" + b"q\0h\0\x86" * 60  # nested tuples, each with the previous one twice: 2^60 items to hash
DEEP = b")" + b"\x85" * 1_000_000
N_NAMES, N_SHARED = 20_000, 1 << 17  # a megabyte, or 20 GB if each name had a copy


def shared_storage() -> bytes:
    names = b"".join(b"X\4\0\0\0" + f"{i:04x}".encode() + b"h\0" for i in range(N_NAMES))
    return tensor([0, N_SHARED, 1], storage(N_SHARED)) + b"q\0}(" + names + b"u"


@pytest.mark.parametrize(
    ("pickle", "n_bytes", "message"),
    [
        (b"(X\7\0\0\0storage" + HALVES + b"NNNtQ", 32, "tuples in tuples"),
        (HALVES + b")R", 32, "tuples in tuples"),
        (b"c" + b"a\nb\n" + HALVES + b"R", 32, "tuples in tuples"),
        (b"(X\7\0\0\0storage" + DEEP + b"NNNtQ", 32, "tuples in tuples"),
        (b"(" + b"N" * 100 + b"t", 32, "a tuple of 100 elements"),
        (b"(X\7\0\0\0storage]NNNtQ", 32, "a storage of type a list"),
        (b"N" * 1_200_000, 32, "more than 1100000 instructions"),
        (shared_storage(), 8 * N_SHARED, "20000 tensors of"),
    ],
    ids=["hash", "repr", "arguments", "deep", "wide", "unhashable", "long", "shared"],
)
def test_pickle_bombs_give_one_message(tmp_path: Path, pickle: bytes, n_bytes: int, message: str) -> None:
    """Check in a separate process, because these files once took forever, 20 GB, or the whole stack."""
    path = zipped_pickle(tmp_path / "x.pt", pickle, n_bytes)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from hotset.formats import torch_file\n"
        "from hotset.errors import FormatError\n"
        "torch_file.MAX_INSTRUCTIONS = 1_100_000\n"
        "try: torch_file.read_torch(sys.argv[1])\n"
        "except FormatError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=WATCHDOG
    )
    assert run.returncode == 0, run.stderr
    assert message in run.stdout
    assert len(run.stdout) < 400


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_may_share_a_storage(tmp_path: Path, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(1 << 19, dtype=torch.float64)  # sums of sizes are checked above a megabyte
    state = {"a": base, "b": base, "c": base[7:], "d": base.reshape(2, -1)}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found = read_torch(tmp_path / "x.pt")
    assert isinstance(found, dict)
    assert all(np.array_equal(found[name], values.numpy()) for name, values in state.items())


def test_a_pickle_has_a_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "MAX_PICKLE_BYTES", 1000)
    text = b"X" + struct.pack("<I", 2000) + bytes(2000)
    path = zipped_pickle(tmp_path / "x.pt", text)
    with pytest.raises(FormatError, match=r"data.pkl of more than 1000 bytes"):
        read_torch(path)
    for stream in (b"\x80\x02" + text + b".", b"\x80\x02X\xff\xff\xff\x7f" + bytes(5000)):
        path.write_bytes(stream)
        for read in (read_torch, map_torch):
            with pytest.raises(FormatError, match="a pickle of more than 1000 bytes"):
                read(path)
    path.write_bytes(b"\x80\x02c" + b"a" * 2000 + b"\nb\n.")
    with pytest.raises(FormatError, match="plain tensors"):
        read_torch(path)
    monkeypatch.setattr(torch_file, "MAX_TENSORS", 3)
    write_torch(path, {str(i): np.zeros(1, np.int64) for i in range(4)})
    monkeypatch.setattr(torch_file, "MAX_PICKLE_BYTES", 10_000)
    with pytest.raises(FormatError, match="4 tensors, more than 3"):
        map_torch(path)


def test_entries_of_an_archive_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + tensor([0, 4, 1], storage()) + b".")
        for i in range(50):
            archive.writestr(f"x/data/{i}", bytes(32))
        for info in archive.infolist()[1:]:  # each claims to extend over the next ten
            info.file_size = info.compress_size = 1000
    with pytest.raises(FormatError, match="compressed or damaged"):
        read_torch(path)


def test_a_tensor_file_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")  # opening it would wait for a writer
    for read in (read_torch, map_torch):
        with pytest.raises(FormatError, match="not a regular file"):
            read(tmp_path / "x.pt")


def test_every_truncated_tensor_file_gives_one_message(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "x.pt"
    for zipped in (True, False):
        torch.save(torch.arange(9), path, _use_new_zipfile_serialization=zipped)
        whole = path.read_bytes()
        for n in range(0, len(whole), 7):
            path.write_bytes(whole[:n])
            with pytest.raises(FormatError):
                read_torch(path)
    with pytest.raises(FormatError, match="there is no file"):
        read_torch(tmp_path / "none.pt")


def test_mutated_tensor_files_are_read_or_give_one_message(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path, rng = tmp_path / "x.pt", np.random.default_rng(8)
    for zipped in (True, False):
        torch.save(torch.nn.Linear(3, 2).state_dict(), path, _use_new_zipfile_serialization=zipped)
        whole = path.read_bytes()
        messages = []
        for _ in range(400):
            mutated = bytearray(whole)
            for at in rng.integers(0, len(whole), rng.integers(1, 4)):
                mutated[at : at + 4] = [bytes(rng.integers(0, 256, 4).tolist()), b"\xff\xff\xff\x7f"][at % 2]
            path.write_bytes(mutated)
            try:
                read_torch(path)
            except FormatError as error:
                messages.append(str(error))
        assert len(messages) > 100
        assert not any("\n" in message for message in messages)


def write_gpu_index(path: Path, masks: list[list[int]], **replaced: Any) -> Path:
    """Write a file like powerinfer-py's export_split: integers of type 18, and perhaps an empty bucket."""

    def text(s: str) -> bytes:
        return struct.pack("<Q", len(s)) + s.encode()

    keys = [text("general.architecture") + struct.pack("<I", 8) + text("generic.gpu_index")]
    if replaced.get("capacity", True):
        keys.append(text("split.vram_capacity") + struct.pack("<IQ", 10, 12_345_678_901))
    vectors = {}
    for i, mask in enumerate(masks):
        vectors[f"blk.{i}.gpu_idx"] = np.array(mask, np.int32)
        vectors[f"blk.{i}.gpu_bucket"] = np.array(replaced.get("bucket", np.flatnonzero(mask)), np.int32)
    infos, data = b"", b""
    for name, vector in vectors.items():
        infos += text(name) + struct.pack("<IQIQ", 1, len(vector), replaced.get("type", 18), len(data))
        data += vector.tobytes() + bytes(-vector.nbytes % 32)
    head = replaced.get("magic", b"PWRI") + struct.pack("<IQQ", 3, len(vectors), len(keys))
    head += b"".join(keys) + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def test_a_gpu_index_is_read(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    assert gpu_index_file(model) is None
    path = write_gpu_index(tmp_path / "other.generated.gpuidx", [[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert gpu_index_file(model) == path
    (tmp_path / "a.generated.gpuidx").touch()
    assert gpu_index_file(model) is None  # there are two, and neither is named after the model
    path = path.rename(tmp_path / "model.gguf.generated.gpuidx")
    (tmp_path / "b.generated.gpuidx").touch()
    assert gpu_index_file(model) == path
    index = read_gpu_index(path, (4, 4, 4))
    assert index.vram_capacity == 12_345_678_901
    assert [np.flatnonzero(mask).tolist() for mask in index.on_gpu] == [[1, 2], [], [0, 1, 2, 3]]
    with pytest.raises(FormatError, match="two for each of 2 layers"):
        read_gpu_index(path, (4, 4))
    with pytest.raises(FormatError, match="each of 5 neurons"):
        read_gpu_index(path, (5, 4, 4))


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"bucket": [0, 2]}, "does not list the neurons"),
        ({"capacity": False}, "does not say its split.vram_capacity"),
        ({"magic": b"GGUF", "type": 26}, "is not a GPU index"),
        ({"type": 0}, "lacks the vector blk.0.gpu_idx of 32-bit integers"),
    ],
)
def test_a_gpu_index_that_makes_no_sense_is_refused(
    tmp_path: Path, replaced: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        read_gpu_index(write_gpu_index(tmp_path / "x.gpuidx", [[0, 1]], **replaced), (2,))
    with pytest.raises(FormatError, match="not 0 or 1"):
        read_gpu_index(write_gpu_index(tmp_path / "y.gpuidx", [[0, 2]]), (2,))
