"""Activation profiles and files in order of hotness."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_relu

from hotset.backends.base import Backend
from hotset.backends.reference import ReferenceBackend
from hotset.convert.reorder import reorder
from hotset.errors import FormatError, InvalidRequestError, ModelNotFoundError
from hotset.formats import powerinfer
from hotset.formats.gguf import GGUFFile, GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import GGMLType
from hotset.formats.source import WeightSource
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.sparsity import sidecar, taps
from hotset.sparsity.calibration import Calibration
from hotset.sparsity.modes import choose
from hotset.sparsity.preparing import prepare
from hotset.sparsity.profile import Profile, collect, export_activations, import_activations, profile_path

N_FF, N_VOCAB = 96, 96
TOKENS = np.random.default_rng(7).integers(0, N_VOCAB, 150).astype(np.int32)
MIXED = {"ffn_down_t": GGMLType.Q4_0, "ffn_up": GGMLType.Q8_0, "ffn_gate": GGMLType.F16, "fc2": GGMLType.Q5_0}


def tapped(backend: Backend, tokens: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    return taps.whole(taps.of_backend(backend), tokens, names)


def reference(weights: WeightSource, gguf: GGUFFile, predictor: Any = None) -> ReferenceBackend:
    graph = describe(config_from_gguf(gguf), weights.tensors, predictor)
    return ReferenceBackend(weights, graph, n_blocks=3, max_batch=50)


def profiled(gguf: GGUFFile, tokens: np.ndarray = TOKENS) -> Profile:
    backend, model = reference(gguf, gguf), sidecar.fingerprint(gguf)
    longest = taps.longest_sequence(backend)
    return collect(taps.of_backend(backend), config_from_gguf(gguf), tokens, model=model, longest=longest)


def profile_of(
    *counts: list[int], n_tokens: int = 100, model: str = "m", data: tuple[str, ...] = ("d",)
) -> Profile:
    return Profile(tuple(np.array(c, np.uint64) for c in counts), n_tokens, model, data)


def test_a_fingerprint_is_the_same_where_reads_give_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check short reads, which POSIX allows and some network file systems return."""
    gguf = open_gguf(write_relu(tmp_path / "m.gguf"))
    expected = sidecar.fingerprint(gguf)

    class Short(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:  # type: ignore[override]
            return super().read(7)

        def readinto(self, buffer: Any) -> int | None:  # type: ignore[override]
            return super().readinto(memoryview(buffer)[:7])

    def opened(path: Path, mode: str, buffering: int = -1) -> Any:
        assert mode == "rb"
        raw = Short(path)
        return raw if buffering == 0 else io.BufferedReader(raw)

    monkeypatch.setattr(Path, "open", opened)
    assert sidecar.fingerprint(gguf) == expected


@pytest.mark.parametrize("architecture", ["llama", "bamboo", "falcon", "opt"])
def test_counts_equal_the_nonzero_neurons(architecture: str, tmp_path: Path) -> None:
    gguf = open_gguf(write_relu(tmp_path / "model.gguf", architecture))
    said = []
    profile = collect(
        taps.of_backend(reference(gguf, gguf)), config_from_gguf(gguf), TOKENS, model="m",
        progress=lambda *now: said.append(now),
    )  # fmt: skip
    names = ("blk.0.ffn_act", "blk.1.ffn_act")
    seen = tapped(reference(gguf, gguf), TOKENS, names)
    for counts, name in zip(profile.counts, names, strict=True):
        assert counts.dtype == np.uint64
        assert np.array_equal(counts, (seen[name] != 0).sum(axis=0))
    assert profile.n_tokens == 150
    assert said == [(0, 150), (50, 150), (100, 150), (150, 150)]


def test_a_text_longer_than_the_cache_runs_in_parts(tmp_path: Path) -> None:
    gguf = open_gguf(write_relu(tmp_path / "model.gguf"))
    long = np.concatenate([TOKENS, TOKENS, TOKENS])[:400]  # more than the 192 of the cache
    parts = [profiled(gguf, long[i : i + 192]).counts[1] for i in range(0, 400, 192)]
    profile = profiled(gguf, long)
    assert profile.n_tokens == 400
    assert np.array_equal(profile.counts[1], sum(parts))
    with pytest.raises(InvalidRequestError, match="empty"):
        profiled(gguf, long[:0])


def test_a_profile_is_kept_in_a_file(tmp_path: Path) -> None:
    profile = Profile((np.array([0, 2**40], np.uint64), np.array([7], np.uint64)), 2**41, "model", ("a", "b"))
    path = profile_path(tmp_path / "m.powerinfer.gguf")
    assert path.name == "m.powerinfer.profile.hotset.gguf"
    profile.save(path)
    again = Profile.open(path)
    assert (again.n_tokens, again.model, again.data) == (2**41, "model", ("a", "b"))
    assert all(map(np.array_equal, again.counts, profile.counts))


def test_other_file_than_a_profile_gives_one_message(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is not an activation profile"):
        Profile.open(write_relu(tmp_path / "model.gguf"))
    with pytest.raises(ModelNotFoundError):
        Profile.open(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("counts", "n_tokens", "message"),
    [
        ([], 100, "is not an activation profile"),
        ([[1, 2]], -1, "is not an activation profile"),
        ([[1, 2]], 1 << 60, "is not an activation profile"),
        ([[1, 101]], 100, "more often than its tokens"),
        ([[1, -1]], 100, "more often than its tokens"),
    ],
)
def test_invalid_profile_gives_one_message(
    counts: list[list[int]], n_tokens: int, message: str, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "p.gguf", "hotset")
    writer.add("hotset.profile.n_tokens", n_tokens, ValueType.INT64)
    writer.add("hotset.profile.model", "m")
    writer.add("hotset.profile.data", ["d"])
    for i, layer in enumerate(counts):
        writer.add_tensor(f"blk.{i}.counts", np.array(layer, "<i8").view(np.uint8), GGMLType.I64)
    writer.write()
    with pytest.raises(FormatError, match=message):
        Profile.open(tmp_path / "p.gguf")


@pytest.mark.parametrize("counts", [[[1] * N_FF], [[1] * N_FF, [1] * (N_FF - 1)], [[1] * N_FF] * 3])
def test_a_profile_with_the_name_of_a_model_and_not_its_neurons(
    counts: list[list[int]], tmp_path: Path
) -> None:
    """Check that the fingerprint alone does not identify a profile, because any file could contain it."""
    path = write_relu(tmp_path / "model.gguf")
    with open_gguf(path) as gguf:
        config, forged = config_from_gguf(gguf), profile_of(*counts, model=sidecar.fingerprint(gguf))
        with pytest.raises(InvalidRequestError, match="another model file"):
            prepare(gguf, config, choose(config, gguf.tensors), profile=forged)
        with pytest.raises(InvalidRequestError, match="another model file"):
            reorder(path, tmp_path / "out.gguf", forged)
        with pytest.raises(InvalidRequestError, match="another model file"):
            forged.merge(profile_of(*counts[:1], [1], [2], [3], model=forged.model, data=("e",)))


def test_runs_merge_unless_they_count_a_text_twice() -> None:
    both = profile_of([1, 2], [3]).merge(profile_of([10, 0], [5], n_tokens=50, data=("e",)))
    assert [c.tolist() for c in both.counts] == [[11, 2], [8]]
    assert (both.n_tokens, both.data) == (150, ("d", "e"))
    with pytest.raises(InvalidRequestError, match="already contains this text"):
        both.merge(profile_of([1, 2], [3], data=("f", "e")))
    with pytest.raises(InvalidRequestError, match="another model file"):
        both.merge(profile_of([1, 2], [3], model="n", data=("f",)))


def test_the_summary_names_hot_and_cold() -> None:
    one, none = profile_of([100, 0, 95, 5, 0], [0, 0]).summary()
    assert one.as_dict() == {
        "layer": 0, "n_ff": 5, "active_share": 0.4, "hot_share": 0.4, "n_always": 2, "n_never": 2,
        "experts": None,
    }  # fmt: skip
    assert (none.active_share, none.hot_share, none.n_never) == (0, 0, 2)


def test_published_counts_come_in_and_go_out(tmp_path: Path) -> None:
    config = config_from_gguf(open_gguf(write_relu(tmp_path / "model.gguf")))
    counts = tuple(np.random.default_rng(1).integers(0, 400, (2, N_FF)).astype(np.uint64))
    export_activations(Profile(counts, 500, "m", ("d",)), tmp_path / "activation")
    found = import_activations(tmp_path / "activation", config, "m")
    assert all(map(np.array_equal, found.counts, counts))
    assert found.n_tokens == max(c.max() for c in counts)  # an estimate: the files have no number
    found.merge(Profile(counts, 500, "m", ("d",)))
    with pytest.raises(InvalidRequestError, match="already contains this text"):
        found.merge(import_activations(tmp_path / "activation", config, "m"))


def orders_of(profile: Profile) -> list[np.ndarray]:
    return [np.argsort(-c.astype(np.int64), kind="stable") for c in profile.counts]


@pytest.mark.parametrize("architecture", ["llama", "bamboo", "falcon", "opt"])
@pytest.mark.parametrize("dialect", ["gguf", "powerinfer"])
def test_a_reordered_file_is_the_same_model(architecture: str, dialect: Any, tmp_path: Path) -> None:
    types = MIXED if dialect == "powerinfer" else {"ffn_down": GGMLType.BF16, "ffn_up": GGMLType.Q4_1}
    path = write_relu(
        tmp_path / "model.gguf", architecture, dialect=dialect,
        type_of=lambda name: types.get(name.split(".")[-1], GGMLType.F32),
        keys={
            "tokenizer.ggml.tokens": ["a", "b"],
            "general.file_type": 7,
            "some.bytes": np.arange(3, dtype=np.uint8),
        },
    )  # fmt: skip
    with open_gguf(path) as gguf:
        profile = profiled(gguf)
        done = (
            reorder(path, tmp_path / "out" / "hot.gguf", profile)
            if (tmp_path / "out").mkdir() is None
            else None
        )
        assert done is not None
        hot = open_gguf(tmp_path / "out" / "hot.gguf")
        assert hot.dialect == dialect
        assert list(hot.tensors) == list(gguf.tensors)
        for key in gguf.metadata:
            assert hot.metadata_types[key] == gguf.metadata_types[key]
            assert np.array_equal(hot.metadata[key], gguf.metadata[key])
        new = set(hot.metadata) - set(gguf.metadata)
        assert new == {"hotset.n_always", "hotset.neuron_order"}

        # The same values from reordered neurons: only sums over neurons change their order.
        names = ("blk.0.ffn_act", "blk.1.ffn_act", "output_norm", "blk.1.out")
        old_values, new_values = (tapped(reference(f, f), TOKENS, names[:2] + names[3:]) for f in (gguf, hot))
        for i, order in enumerate(orders_of(profile)):
            name = f"blk.{i}.ffn_act"
            np.testing.assert_allclose(new_values[name], old_values[name][:, order], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(new_values["blk.1.out"], old_values["blk.1.out"], rtol=1e-4, atol=1e-4)

        moved = profiled(hot)
        for counts in moved.counts:
            assert (np.diff(counts.astype(np.int64)) <= 2).all()  # a value may round to zero elsewhere
        frequencies = [profile.frequencies(i) for i in range(2)]
        assert done.n_always == tuple(int((f >= 0.6).sum()) for f in frequencies)
        assert hot.metadata["hotset.n_always"].tolist() == list(done.n_always)
        saved = Profile.open(profile_path(hot.path))
        saved.check_model(sidecar.fingerprint(hot))
        assert all((np.diff(counts.astype(np.int64)) <= 0).all() for counts in saved.counts)
        assert done.n_bytes == hot.path.stat().st_size


@pytest.mark.parametrize("always", [0.0, 0.5, 2.0])
def test_a_reordered_file_predicts_the_same_neurons(always: float, tmp_path: Path) -> None:
    """Check that the mask moves along with fc2, and that leading neurons need no score."""
    path = write_relu(tmp_path / "model.gguf", ranks=(32, 32))
    with open_gguf(path) as gguf:
        profile = profiled(gguf)
        done = reorder(path, tmp_path / "hot.gguf", profile, always=always)
        expected = {0.0: (N_FF - 1,) * 2, 2.0: (0, 0)}.get(always)
        assert expected in (None, done.n_always)
        hot = open_gguf(tmp_path / "hot.gguf")
        config = config_from_gguf(hot)
        ready = prepare(hot, config, choose(config, hot.tensors), calibration=Calibration(open_backend=None))
        names = ("blk.0.ffn_act", "blk.0.ffn_pred")
        old = tapped(reference(gguf, gguf, choose_mlp(gguf)), TOKENS, names)
        new = tapped(reference(ready.weights, hot, ready.predictor), TOKENS, (*names, "blk.0.ffn_masked"))
        order, n = orders_of(profile)[0], done.n_always[0]
        np.testing.assert_allclose(
            new["blk.0.ffn_pred"], old["blk.0.ffn_pred"][:, order[n:]], rtol=1e-4, atol=1e-5
        )
        assert np.array_equal(new["blk.0.ffn_masked"][:, :n], new["blk.0.ffn_act"][:, :n])


def choose_mlp(gguf: GGUFFile) -> Any:
    config = config_from_gguf(gguf)
    return prepare(gguf, config, choose(config, gguf.tensors)).predictor


def test_files_next_to_a_model_move_along(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    path = write_relu(tmp_path / "in" / "model.powerinfer.gguf")
    rng = np.random.default_rng(2)
    counts, on_gpu = rng.integers(0, 100, (2, N_FF)), rng.integers(0, 2, (2, N_FF))
    powerinfer.write_activations(tmp_path / "in" / "activation", list(counts))
    index = GGUFWriter(f"{path}.generated.gpuidx", "generic.gpu_index", dialect="powerinfer")
    index.add("split.vram_capacity", 12345, ValueType.UINT64)
    for i, chosen in enumerate(on_gpu):
        index.add_tensor(f"blk.{i}.gpu_idx", chosen.astype("<i4"), GGMLType.I32)
        index.add_tensor(f"blk.{i}.gpu_bucket", np.flatnonzero(chosen).astype("<i4"), GGMLType.I32)
    index.write()
    with open_gguf(path) as gguf:
        profile = profiled(gguf)
        with pytest.raises(InvalidRequestError, match="write the reordered model to a folder of its own"):
            reorder(path, tmp_path / "in" / "hot.gguf", profile)
        done = reorder(path, tmp_path / "out" / "hot.gguf", profile)
    orders = orders_of(profile)
    moved = powerinfer.read_activations(tmp_path / "out" / "activation")
    found = powerinfer.read_gpu_index(tmp_path / "out" / "hot.gguf.generated.gpuidx", [N_FF, N_FF])
    assert found.vram_capacity == 12345
    for i, order in enumerate(orders):
        assert np.array_equal(moved[i], counts[i][order])
        assert np.array_equal(found.on_gpu[i], on_gpu[i][order] == 1)
    assert {file.name for file in done.files} == {file.name for file in (tmp_path / "out").iterdir()}


def test_unreorderable_file_gives_one_message(tmp_path: Path) -> None:
    path = write_relu(
        tmp_path / "q.gguf",
        dialect="gguf",
        type_of=lambda name: GGMLType.Q4_0 if "ffn_down" in name else GGMLType.F32,
    )
    with open_gguf(path) as gguf:
        profile = profiled(gguf)
        with pytest.raises(
            InvalidRequestError, match=r"ffn_down\.weight is Q4_0, where 32 neurons share a scale"
        ):
            reorder(path, tmp_path / "out.gguf", profile)
        with pytest.raises(InvalidRequestError, match="write to another file"):
            reorder(path, path, profile)
        with pytest.raises(InvalidRequestError, match="another model file"):
            reorder(path, tmp_path / "out.gguf", profile_of([1], [1]))
    assert [p.name for p in tmp_path.iterdir()] == ["q.gguf"]
