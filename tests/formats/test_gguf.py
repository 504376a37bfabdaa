"""GGUF: round trips, the `gguf` package as oracle in both directions, shards, and hostile files."""

import gc
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from file_kinds import needs_pipes
from fuzz.fuzz_gguf import exercise, mutate, seed_models
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.errors import (
    FormatError,
    HotsetError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from hotset.formats.gguf import GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import ENCODABLE, TYPES, GGMLType, dequantize, quantize

RNG = np.random.default_rng(0)


# ---- files written byte by byte -------------------------------------------------------------------------


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return u64(len(data)) + data


def key_value(key: str | bytes, type: int, payload: bytes) -> bytes:
    return string(key) + u32(type) + payload


def info(name: str | bytes, dims: list[int], type: int, offset: int) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(type) + u64(offset)


ARCH = key_value("general.architecture", ValueType.STRING, string("llama"))
F32, Q4_0 = GGMLType.F32, GGMLType.Q4_0


def model_bytes(
    kvs: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_kv: int | None = None,
    alignment: int = 32,
) -> bytes:
    kvs, infos = [ARCH] if kvs is None else kvs, infos or []
    head = magic + u32(version) + u64(len(infos) if n_tensors is None else n_tensors)
    head += u64(len(kvs) if n_kv is None else n_kv) + b"".join(kvs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def save(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


# ---- reading --------------------------------------------------------------------------------------------


def test_reads_files_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["<s>", "é", "🦊", ""])
    writer.add_token_scores([0.0, -1.5, 2.0, 3.0])
    writer.add_token_types([1, 2, 3, 6])
    for name, value in [("int8", -5), ("uint16", 9), ("int64", -(1 << 40)), ("float64", 0.1), ("bool", True)]:
        getattr(writer, f"add_{name}")(f"test.{name}", value)
    values = RNG.standard_normal((6, 256)).astype(np.float32)
    writer.add_tensor("plain.weight", values)
    writer.add_tensor("half.weight", values.astype(np.float16))
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q5_1)
    writer.add_tensor("packed.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q5_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with open_gguf(path) as file:
        assert (file.architecture, file.dialect, file.version) == ("qwen2", "gguf", 3)
        assert file.metadata["qwen2.block_count"] == 3
        assert file.metadata["qwen2.attention.layer_norm_rms_epsilon"] == np.float32(1e-6)
        assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "é", "🦊", ""]
        assert np.array_equal(file.metadata["tokenizer.ggml.scores"], np.float32([0, -1.5, 2, 3]))
        assert np.array_equal(file.metadata["tokenizer.ggml.token_type"], np.int32([1, 2, 3, 6]))
        tested = {key[5:]: value for key, value in file.metadata.items() if key.startswith("test.")}
        assert tested == {"int8": -5, "uint16": 9, "int64": -(1 << 40), "float64": 0.1, "bool": True}
        assert tested["bool"] is True
        assert list(file.tensors) == ["plain.weight", "half.weight", "packed.weight"]
        assert file.n_parameters == 3 * 6 * 256
        assert file.nbytes == path.stat().st_size
        facts = file.tensors["packed.weight"]
        assert (facts.shape, facts.type, facts.nbytes) == ((256, 6), GGMLType.Q5_1, packed.nbytes)
        assert np.array_equal(file.data("packed.weight"), packed.reshape(-1))
        assert np.array_equal(dequantize(file.data("plain.weight"), F32, (256, 6)), values)
        file.ask_for_large_pages()
        assert np.array_equal(file.data("packed.weight"), packed.reshape(-1))


def test_gguf_package_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama", alignment=128)
    writer.add("llama.block_count", 2)
    writer.add("llama.rope.freq_base", 1e4)
    writer.add("negative", -3)
    writer.add("large", 1 << 40)
    writer.add("flag", True)
    writer.add("split.no", 1, ValueType.UINT16)
    writer.add("tokens", ["a", "é", ""])
    writer.add("ids", [1, -2])
    writer.add("scores", [0.5, 1.5])
    writer.add("array", np.arange(4, dtype=np.uint8))
    writer.add("scalar", np.float64(0.1))
    values = RNG.standard_normal((2, 3, 256)).astype(np.float32)
    for type in sorted(ENCODABLE):
        writer.add_tensor(f"{type.name}.weight", values, type)
    writer.add_tensor("lazy.weight", lambda: values[0], GGMLType.Q8_0, (256, 3))
    writer.add_tensor("raw.weight", quantize(values, Q4_0), Q4_0)
    writer.add_tensor("index", np.arange(7, dtype=np.int32), GGMLType.I32)
    writer.write()

    oracle = gguf.GGUFReader(path)
    types = {key: [type.name for type in field.types] for key, field in oracle.fields.items()}
    contents = {key: field.contents() for key, field in oracle.fields.items() if "." in key or key.isalpha()}
    assert types["general.alignment"] == ["UINT32"]
    assert contents["general.alignment"] == 128
    expected = {
        "llama.block_count": (2, ["UINT32"]),
        "llama.rope.freq_base": (1e4, ["FLOAT32"]),
        "negative": (-3, ["INT32"]),
        "large": (1 << 40, ["UINT64"]),
        "flag": (True, ["BOOL"]),
        "split.no": (1, ["UINT16"]),
        "tokens": (["a", "é", ""], ["ARRAY", "STRING"]),
        "ids": ([1, -2], ["ARRAY", "INT32"]),
        "scores": ([0.5, 1.5], ["ARRAY", "FLOAT32"]),
        "array": ([0, 1, 2, 3], ["ARRAY", "UINT8"]),
        "scalar": (0.1, ["FLOAT64"]),
    }
    for key, (value, type_names) in expected.items():
        assert (contents[key], types[key]) == (value, type_names), key
    with open_gguf(path) as file:
        assert len(oracle.tensors) == len(file.tensors) == len(ENCODABLE) + 3
        for tensor in oracle.tensors:
            ours = file.tensors[tensor.name]
            assert tuple(tensor.shape) == ours.shape
            assert int(tensor.tensor_type) == ours.type
            assert (int(tensor.data_offset), int(tensor.n_bytes)) == (ours.offset, ours.nbytes)
            assert ours.offset % 128 == 0
            assert np.array_equal(tensor.data.reshape(-1).view(np.uint8), file.data(tensor.name))
        assert np.array_equal(file.data("lazy.weight"), quantize(values[0], GGMLType.Q8_0).reshape(-1))
        assert np.array_equal(file.data("raw.weight"), file.data("Q4_0.weight"))
        assert np.array_equal(file.data("index").view(np.int32), np.arange(7))


scalars = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(width=32, allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
string_lists = st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1)
int_lists = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1)


@settings(deadline=None, max_examples=60)
@given(values=st.dictionaries(st.text("abc.", min_size=1), scalars | string_lists | int_lists, max_size=8))
def test_metadata_round_trip(tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.gguf"
    writer = GGUFWriter(path, "llama")
    for key, value in values.items():
        writer.add(key, value)
    writer.write()
    with open_gguf(path) as file:
        found = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in file.metadata.items()}
        copy = GGUFWriter(path.with_name("copy.gguf"), file.architecture)
        for key in values:
            copy.add(key, file.metadata[key], file.metadata_types[key][-1])
        copy.write()
    assert found == {"general.architecture": "llama", **values}
    assert path.with_name("copy.gguf").read_bytes() == path.read_bytes()


def test_version_2_and_the_powerinfer_dialect(tmp_path: Path) -> None:
    data = np.arange(8, dtype="<f4").tobytes()
    body = model_bytes(infos=[info("a", [8], F32, 0)], data=data, version=2)
    with open_gguf(save(tmp_path, body)) as file:
        assert file.version == 2
        assert file.data("a").tobytes() == data
    writer = GGUFWriter(tmp_path / "sparse.gguf", "bamboo", dialect="powerinfer")
    writer.add("powerinfer.sparse_threshold", 0.0)
    writer.write()
    assert (tmp_path / "sparse.gguf").read_bytes()[:4] == b"PWRI"
    with open_gguf(tmp_path / "sparse.gguf") as file:
        assert (file.dialect, file.architecture) == ("powerinfer", "bamboo")


def test_data_is_a_read_only_view_that_outlives_the_file(tmp_path: Path) -> None:
    data = np.arange(8, dtype="<f4").tobytes()
    file = open_gguf(save(tmp_path, model_bytes(infos=[info("a", [8], F32, 0)], data=data)))
    view = file.data("a")
    assert np.shares_memory(view, file.data("a"))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    file.close()
    file.close()
    gc.collect()
    assert view.tobytes() == data
    with pytest.raises(InvalidRequestError, match="closed"):
        file.data("a")


def test_strings_that_are_not_utf8(tmp_path: Path) -> None:
    tokens = u32(ValueType.STRING) + u64(3) + string(b"\xff") + string(b"\xfe") + string("ok")
    kvs = [
        ARCH,
        key_value("name", ValueType.STRING, string(b"a\xffb")),
        key_value("t", ValueType.ARRAY, tokens),
    ]
    with open_gguf(save(tmp_path, model_bytes(kvs))) as file:
        assert file.metadata["name"] == "a\ufffdb"
        read = file.metadata["t"]
        assert [token.encode("utf-8", "surrogateescape") for token in read] == [b"\xff", b"\xfe", b"ok"]
        copy = GGUFWriter(tmp_path / "copy.gguf", "llama")
        copy.add("t", read)
        copy.write()
    with open_gguf(tmp_path / "copy.gguf") as file:
        assert file.metadata["t"] == read


def test_a_tensor_of_unknown_type_is_listed_and_refused_when_used(tmp_path: Path) -> None:
    path = save(tmp_path, model_bytes(infos=[info("a", [8], 99, 0), info("b", [8], F32, 32)], data=bytes(64)))
    with open_gguf(path) as file:
        assert file.tensors["a"].type.name == "UNKNOWN_99"
        assert file.data("b").nbytes == 32
        with pytest.raises(UnsupportedModelError, match="tensor 'a' has type 99"):
            file.data("a")
        with pytest.raises(UnsupportedModelError, match="no tensor 'c'"):
            file.data("c")


def test_nested_arrays_and_odd_booleans(tmp_path: Path) -> None:
    inner = u32(ValueType.UINT8) + u64(2) + bytes([1, 2])
    nested = u32(ValueType.ARRAY) + u64(2) + inner + inner
    odd = u32(ValueType.BOOL) + u64(3) + bytes([0, 1, 200])
    kvs = [ARCH, key_value("nested", ValueType.ARRAY, nested), key_value("odd", ValueType.ARRAY, odd)]
    kvs.append(key_value("odd.scalar", ValueType.BOOL, b"\x80"))
    with open_gguf(save(tmp_path, model_bytes(kvs))) as file:
        assert [array.tolist() for array in file.metadata["nested"]] == [[1, 2], [1, 2]]
        assert file.metadata["odd"].tolist() == [False, True, True]
        assert file.metadata["odd.scalar"] is True


# ---- shards ---------------------------------------------------------------------------------------------


def write_shards(folder: Path, n_shards: int = 3, **overrides: object) -> list[Path]:
    """Write a model with one tensor per shard; overrides replace split.* values of the last shard."""
    paths = [folder / f"big-{i + 1:05d}-of-{n_shards:05d}.gguf" for i in range(n_shards)]
    for i, path in enumerate(paths):
        facts = {"count": n_shards, "no": i, "tensors.count": n_shards}
        facts |= overrides if i == n_shards - 1 else {}
        dialect = facts.pop("dialect", "gguf")
        name = facts.pop("name", f"t{i}")
        writer = GGUFWriter(path, "llama", dialect=dialect)
        for key, value in facts.items():
            writer.add(f"split.{key}", value, ValueType.INT32 if "." in key else ValueType.UINT16)
        if i == 0:
            writer.add("llama.block_count", 7)
        writer.add_tensor(name, np.full(8, i, np.float32), F32)
        writer.write()
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_shard_opens_the_whole_model(tmp_path: Path, opened: int) -> None:
    paths = write_shards(tmp_path)
    with open_gguf(paths[opened]) as file:
        assert file.paths == paths
        assert file.metadata["llama.block_count"] == 7
        assert [file.data(f"t{i}").view(np.float32)[0] for i in range(3)] == [0, 1, 2]
        assert file.tensors["t2"].shard == 2
        assert file.nbytes == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"no": 1}, "is not shard 3 of 3"),
        ({"count": 4}, "is not shard 3 of 3"),
        ({"dialect": "powerinfer"}, "is not shard 3 of 3"),
        ({"name": "t0"}, "'t0' occurs twice"),
    ],
)
def test_shards_that_disagree(tmp_path: Path, overrides: dict[str, object], message: str) -> None:
    paths = write_shards(tmp_path, **overrides)
    with pytest.raises(FormatError, match=message):
        open_gguf(paths[0])


@pytest.mark.parametrize("key", ["count", "no", "tensors.count"])
@pytest.mark.parametrize("value", [[1, 2], "3", 1.5, -1])
def test_split_keys_of_the_wrong_type(tmp_path: Path, key: str, value: object) -> None:
    for i in range(2):
        writer = GGUFWriter(tmp_path / f"big-{i + 1:05d}-of-00002.gguf", "llama")
        for name, good in {"count": 2, "no": i, "tensors.count": 0}.items():
            writer.add(f"split.{name}", value if name == key else good)
        writer.write()
    with pytest.raises(FormatError, match=f"split.{key} is not a count"):
        open_gguf(writer.path)


def test_a_missing_or_renamed_shard(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[1].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelNotFoundError, match=r"there is no shard .*big-00002-of-00003.gguf"):
        open_gguf(paths[0])
    with pytest.raises(FormatError, match="one of 3 shards, but its name is not"):
        open_gguf(tmp_path / "other.gguf")


def test_a_wrong_total_of_tensors(tmp_path: Path) -> None:
    path = write_shards(tmp_path, 1)[0]
    writer = GGUFWriter(tmp_path / "big-00001-of-00002.gguf", "llama")
    writer.add("split.count", 2, ValueType.UINT16)
    writer.add("split.no", 0, ValueType.UINT16)
    writer.add("split.tensors.count", 5, ValueType.INT32)
    writer.write()
    second = GGUFWriter(tmp_path / "big-00002-of-00002.gguf", "llama")
    second.add("split.count", 2, ValueType.UINT16)
    second.add("split.no", 1, ValueType.UINT16)
    second.write()
    with pytest.raises(FormatError, match="have 0 tensors, not 5"):
        open_gguf(writer.path)
    with open_gguf(path) as file:  # a single shard is a whole model
        assert list(file.tensors) == ["t0"]


# ---- hostile files --------------------------------------------------------------------------------------

HUGE = [1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


def array_value(type: int, count: int, payload: bytes = b"") -> bytes:
    return key_value("k", ValueType.ARRAY, u32(type) + u64(count) + payload)


def nested_arrays(depth: int) -> bytes:
    return key_value("k", ValueType.ARRAY, (u32(ValueType.ARRAY) + u64(1)) * depth + u32(0) + u64(0))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "one byte": (b"G", "not a GGUF file"),
    "other magic": (b"\x80\x02pickle" + bytes(64), "not a GGUF file"),
    "only magic": (b"GGUF", "inside the header"),
    "no counts": (b"GGUF" + u32(3), "inside tensors"),
    "version 1": (model_bytes(version=1), "GGUF version 1, only 2 and 3"),
    "version 4": (model_bytes(version=4), "GGUF version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "duplicate key": (model_bytes([ARCH, ARCH]), "'general.architecture' occurs twice"),
    "unknown value type": (model_bytes([key_value("k", 13, bytes(8))]), "unknown value type 13"),
    "unknown element type": (model_bytes([array_value(77, 0)]), "unknown value type 77"),
    "deep arrays": (model_bytes([nested_arrays(500)]), "nests arrays"),
    "key not UTF-8": (model_bytes([key_value(b"\xff", 0, b"\0")]), "a key is not valid UTF-8"),
    "long key": (model_bytes([key_value("k" * 5000, 0, b"\0")]), "5000 bytes long"),
    "name not UTF-8": (
        model_bytes(infos=[info(b"\xc3", [8], F32, 0)], data=bytes(32)),
        "a tensor name is not",
    ),
    "alignment 0": (model_bytes([key_value("general.alignment", 4, u32(0))]), "general.alignment is 0"),
    "alignment 48": (model_bytes([key_value("general.alignment", 4, u32(48))]), "power of two"),
    "alignment text": (model_bytes([key_value("general.alignment", 8, string("x"))]), "'x', not a power"),
    "duplicate tensor": (
        model_bytes(infos=[info("a", [8], F32, 0), info("a", [8], F32, 32)], data=bytes(64)),
        "'a' occurs twice",
    ),
    "overlap": (
        model_bytes(infos=[info("a", [16], F32, 0), info("b", [8], F32, 32)], data=bytes(64)),
        "'a' and 'b' overlap",
    ),
    "same place": (
        model_bytes(infos=[info("a", [8], F32, 0), info("b", [8], F32, 0)], data=bytes(64)),
        "'a' and 'b' overlap",
    ),
    "misaligned": (model_bytes(infos=[info("a", [8], F32, 4)], data=bytes(64)), "not a multiple of 32"),
    "five dims": (model_bytes(infos=[info("a", [1] * 5, F32, 0)], data=bytes(64)), "5 dimensions"),
    "zero dim": (model_bytes(infos=[info("a", [8, 0], F32, 0)], data=bytes(64)), "dimension of zero"),
    "broken block": (model_bytes(infos=[info("a", [33], Q4_0, 0)], data=bytes(64)), "blocks of 32"),
    "cut short": (model_bytes(infos=[info("a", [9], F32, 0)], data=bytes(32)), "is cut short"),
    "no data at all": (model_bytes(infos=[info("a", [8], F32, 0)]), "is cut short"),
}
HOSTILE["long element"] = (
    model_bytes([array_value(ValueType.STRING, 1, string("x" * (1 << 20) + "x"))]), "an element of 'k' has",
)  # fmt: skip
for n in HUGE:
    HOSTILE |= {
        f"n_tensors {n}": (model_bytes(n_tensors=n), f"{n} tensors cannot fit"),
        f"n_kv {n}": (model_bytes(n_kv=n), f"{n} key-values cannot fit"),
        f"key length {n}": (model_bytes([u64(n) + b"abc" + bytes(20)]), "inside a key"),
        f"string length {n}": (
            model_bytes([key_value("k", 8, u64(n) + bytes(99))]), "inside the value of 'k'",
        ),
        f"count {n}": (model_bytes([array_value(ValueType.UINT64, n, bytes(99))]), "cannot fit"),
        f"strings {n}": (model_bytes([array_value(ValueType.STRING, n, bytes(99))]), "cannot fit"),
        f"arrays {n}": (model_bytes([array_value(ValueType.ARRAY, n, bytes(99))]), "cannot fit"),
        f"element length {n}": (
            model_bytes([array_value(ValueType.STRING, 2, u64(n) + bytes(99))]), "inside elements of 'k'",
        ),
        f"dim {n}": (model_bytes(infos=[info("a", [n & ~31] * 4, Q4_0, 0)], data=bytes(64)), "is cut short"),
        f"n_dims {n}": (model_bytes(infos=[string("a") + u32(n & 0xFFFFFFFF | 8) + bytes(99)]), "dimensions"),
        f"offset {n}": (model_bytes(infos=[info("a", [8], F32, n & ~31)], data=bytes(64)), "is cut short"),
        f"unknown, offset {n}": (model_bytes(infos=[info("a", [n], 99, n & ~31)]), "is cut short"),
    }  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_gives_one_message(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = save(tmp_path, data)
    with pytest.raises(FormatError, match=message) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert path.name in message
    assert message.endswith(".")
    assert "\n" not in message


def test_every_truncation_of_a_small_file(tmp_path: Path) -> None:
    kvs = [ARCH, array_value(ValueType.STRING, 2, string("ab") + string("c"))]
    whole = model_bytes(kvs, [info("a", [8], F32, 0), info("b", [8], F32, 32)], bytes(64))
    for n in range(len(whole)):
        with pytest.raises(FormatError):
            open_gguf(save(tmp_path, whole[:n]))
    open_gguf(save(tmp_path, whole)).close()


def test_things_that_are_not_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(FormatError, match="is not a regular file but a folder: choose a file"):
        open_gguf(tmp_path)
    with pytest.raises(FormatError, match="cannot be read"):
        open_gguf("a\0b")
    with pytest.raises(HotsetError, match=r"cannot be read|there is no file"):  # the latter on Windows
        open_gguf(save(tmp_path, b"GGUF") / "below")
    with pytest.raises(FormatError, match="is empty"):
        open_gguf(save(tmp_path, b""))


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs devices with names")
def test_opened_file_is_checked_not_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the opened file, whose name may have been another file's just before."""
    file = save(tmp_path, b"GGUF").stat()
    monkeypatch.setattr(Path, "stat", lambda self, **options: file)
    with pytest.raises(FormatError, match="is not a regular file but a device"):
        open_gguf("/dev/zero")


@needs_pipes
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")


def test_a_file_without_architecture_still_opens(tmp_path: Path) -> None:
    with open_gguf(save(tmp_path, model_bytes([]))) as file, pytest.raises(FormatError, match="architecture"):
        _ = file.architecture


def test_mutated_files_open_or_give_one_message(tmp_path: Path) -> None:
    """Check a few thousand deterministic mutations; `tests/fuzz/fuzz_gguf.py` runs as many as time allows."""
    rng = np.random.default_rng(2026)
    models = seed_models(tmp_path)
    assert all(exercise(model, tmp_path) for model in models)
    n_opened = sum(exercise(mutate(models[i % len(models)], rng), tmp_path) for i in range(3000))
    assert 100 < n_opened < 2900  # both kinds occur: the mutations are neither harmless nor all fatal


# ---- the writer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "type"),
    [
        (300, ValueType.UINT8),
        (-1, ValueType.UINT32),
        (1 << 64, None),
        (1e300, ValueType.FLOAT32),
        (1.5, ValueType.INT32),
        ("text", ValueType.INT32),
        (2, ValueType.BOOL),
        (None, None),
        ([], None),
        (["a", 1], None),
        ([1, 300], ValueType.UINT8),
        ([1.5], ValueType.INT32),
        ([1 << 63, -1], None),
        (np.zeros((2, 2)), None),
        (np.zeros(2, np.float16), None),
        ([b"bytes"], None),
        ("\ud800", None),
    ],
)
def test_values_that_the_format_cannot_hold(tmp_path: Path, value: object, type: ValueType | None) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    with pytest.raises(InvalidRequestError):
        writer.add("k", value, type)
    writer.add("k", 1)  # the refused value was not added
    with pytest.raises(InvalidRequestError, match="added already"):
        writer.add("k", 1)


def test_a_tensor_is_added_once(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("a", np.ones(4, np.float32), GGMLType.F32)
    with pytest.raises(InvalidRequestError, match="tensor 'a' has been added already"):
        writer.add_tensor("a", np.zeros(8, np.float32), GGMLType.F32)
    writer.write()
    with open_gguf(tmp_path / "model.gguf") as file:
        assert file.data("a").view(np.float32).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("data", "type", "shape", "message"),
    [
        (np.zeros(33, np.float32), Q4_0, None, "cannot be stored as Q4_0"),
        (np.zeros((0, 32), np.float32), Q4_0, None, "cannot be stored as Q4_0"),
        (np.zeros((1,) * 4 + (32,), np.float32), F32, None, "cannot be stored as F32"),
        (np.zeros(32, np.float32), F32, (16,), r"must have shape \[16\], not \[32\]"),
        (np.zeros(32, np.uint8), F32, (16,), "takes 64 bytes, not 32"),
        (np.zeros(255, np.float32), GGMLType.IQ4_XS, None, "cannot be stored as IQ4_XS"),
        (np.zeros(8, np.int64), GGMLType.I32, None, "int64 values cannot be stored as I32"),
        (np.zeros(8, np.int32), F32, None, "int32 values cannot be stored as F32"),
        (np.zeros(8, np.float32), 99, None, "has the unknown type 99"),
        (lambda: np.zeros(8), F32, None, "give its shape"),
    ],
)
def test_tensors_that_cannot_be_stored(
    tmp_path: Path, data: np.ndarray, type: int, shape: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        GGUFWriter(tmp_path / "model.gguf", "llama").add_tensor("a", data, GGMLType(type), shape)


@pytest.mark.parametrize("problem", [RuntimeError("stop"), KeyboardInterrupt(), None])
def test_failed_write_leaves_only_the_old_file(tmp_path: Path, problem: BaseException | None) -> None:
    path = save(tmp_path, b"old")

    def produce() -> np.ndarray:
        if problem is None:
            return np.zeros(9, np.float32)  # not the promised shape
        raise problem

    writer = GGUFWriter(path, "llama")
    writer.add_tensor("first", np.zeros(8, np.float32), F32)
    writer.add_tensor("second", produce, F32, (8,))
    with pytest.raises(InvalidRequestError if problem is None else type(problem)):
        writer.write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="cannot be written"):
        GGUFWriter(tmp_path / "absent" / "model.gguf", "llama").write()


def test_tensors_are_requested_one_at_a_time_in_order(tmp_path: Path) -> None:
    asked: list[int] = []

    def produce(i: int) -> np.ndarray:
        asked.append(i)
        return np.full((2, 32), i, np.float32)

    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for i in range(3):
        writer.add_tensor(f"t{i}", lambda i=i: produce(i), Q4_0, (32, 2))
    assert asked == []
    writer.write()
    assert asked == [0, 1, 2]
    with open_gguf(writer.path) as file:
        for i in range(3):
            facts = file.tensors[f"t{i}"]
            assert np.array_equal(
                dequantize(file.data(facts.name), facts.type, facts.shape), np.full((2, 32), i)
            )
        assert file.nbytes % TYPES[Q4_0].block_size == 0  # the last tensor is padded too
