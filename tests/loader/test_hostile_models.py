"""Models with one error, loaded completely: each gives one message and leaves no resources behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import quick_are
from fuzz import fuzz_models
from tiny_gguf import write_llama, write_relu

import hotset
from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import GGUFWriter, copy_metadata, open_gguf
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.keys import MAX_GROUP, MAX_HEAD_DIM, MAX_WINDOW

T = GGMLType
RELU = {"llama.hidden_activation": "relu"}


def rewritten(path: Path, out: Path, name: str, type_: GGMLType, shape: tuple[int, ...]) -> Path:
    """Copy the file with one tensor replaced by zeros of another type and shape."""
    with open_gguf(path) as gguf:
        writer = GGUFWriter(out, gguf.architecture, dialect=gguf.dialect)
        copy_metadata(gguf, writer)
        for info in gguf.tensors.values():
            if info.name == name:
                n_bytes = row_bytes(type_, shape[0]) * int(np.prod(shape[1:]))
                writer.add_tensor(name, np.zeros(n_bytes, np.uint8), type_, shape)
            else:
                writer.add_tensor(info.name, gguf.data(info.name), info.type, info.shape)
        writer.write()
    return out


def load(path: Path, **options: Any) -> hotset.Model:
    return hotset.load(path, n_threads=1, device="cpu", n_ctx=64, **options)


@pytest.mark.parametrize("type_", [T.I32, T.F64, T.Q8_1, T.Q8_K, T(77)])
def test_a_type_without_a_kernel_is_named(tmp_path: Path, type_: GGMLType) -> None:
    model = write_llama(tmp_path / "m.gguf", n_embd=256, n_ff=256)
    name = "blk.0.ffn_up.weight"
    if type_ == T(77):  # its size is unknown
        data = model.read_bytes()
        at = data.index(name.encode()) + len(name) + 4 + 16
        model.write_bytes(data[:at] + bytes([77]) + data[at + 1 :])
    else:
        model = rewritten(model, tmp_path / "odd.gguf", name, type_, (256, 256))
    with pytest.raises(UnsupportedModelError, match=f"{name} has the type {type_.name}"):
        load(model)


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_head": 1, "n_head_kv": 1, "head_dim": MAX_HEAD_DIM},
        {"n_head": MAX_GROUP, "n_head_kv": 1, "head_dim": 4},
        {"keys": {"llama.attention.sliding_window": MAX_WINDOW}},
    ],
)
def test_the_largest_that_the_configuration_allows_runs(tmp_path: Path, sizes: dict[str, Any]) -> None:
    with load(write_llama(tmp_path / "m.gguf", n_layer=1, **sizes)) as model:
        assert np.isfinite(model.logits([1, 2, 3])).all()


@pytest.mark.parametrize("seed", quick_are((1,), [0, 1]))
def test_odd_models_and_checkpoints_give_one_message(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run some fixed cases; `tests/fuzz/fuzz_models.py` runs as many as time allows."""
    monkeypatch.setenv("HOTSET_HOME", "set by the fuzzer, and put back behind it")
    monkeypatch.setattr(fuzz_models, "SLOW_S", float("inf"))  # no test looks at the time
    problems: list[str] = []
    n_cases, n_failed = fuzz_models.attack(seed, lambda n: n < 40, lambda _, __, what: problems.append(what))
    assert (n_cases, n_failed, problems) == (40, 0, [])


def odd(tmp_path: Path, **keys: Any) -> Path:
    return write_llama(tmp_path / "odd.gguf", keys=fuzz_models.BPE | keys, n_vocab=259)


@pytest.mark.parametrize(
    "keys",
    [
        {"tokenizer.ggml.tokens": 3.5}, {"general.name": np.inf}, {"general.license": np.arange(3)},
        {"tokenizer.ggml.model": [1, 2]}, {"tokenizer.ggml.pre": True},
    ],
)  # fmt: skip
def test_odd_facts_are_shown(keys: dict[str, Any], tmp_path: Path) -> None:
    path = odd(tmp_path, **keys)
    for more in ([], ["--json"], ["--metadata"]):
        outcome = fuzz_models.subcommand("show", path, *more)
        assert (outcome.status, outcome.problem) == (0, ""), outcome.text


def test_array_as_chat_template_is_ignored(tmp_path: Path) -> None:
    path = odd(tmp_path, **{"tokenizer.chat_template": np.array([1.0, 2.0], np.float32)})
    outcome = fuzz_models.subcommand(
        "run", path, "he", "-n", 1, "-c", 16, "-t", 1, "--device", "cpu", "--temp", 0
    )
    assert (outcome.status, outcome.problem) == (0, ""), outcome.text


def test_planes_take_only_whole_groups_of_outputs(tmp_path: Path) -> None:
    """Use a width that the kernels of planes do not support: the down matrix keeps the layout of the file."""
    type_of = lambda name: T.Q8_0 if "ffn_down" in name else T.F32  # noqa: E731
    path = write_llama(
        tmp_path / "m.gguf", n_embd=48, n_ff=64, n_head=3, n_head_kv=1, type_of=type_of, keys=RELU
    )
    with load(path) as model:
        assert model.sparsity.mode == "exact"


@pytest.mark.parametrize(
    ("name", "shape", "predictor"),
    [
        ("blk.0.ffn_down.weight", (96,), None),
        ("blk.1.ffn_down.weight", (64, 96), None),
        ("blk.0.ffn_up.weight", (64, 95), "svd"),
        ("blk.0.attn_q.weight", (64, 64, 1), "svd"),
    ],
)
def test_nothing_is_built_of_a_file_that_does_not_fit_its_keys(
    tmp_path: Path, name: str, shape: tuple[int, ...], predictor: str | None
) -> None:
    plain = write_llama(tmp_path / "m.gguf", n_head=2, head_dim=32, n_head_kv=1, keys=RELU)
    path = rewritten(plain, tmp_path / "odd.gguf", name, T.F32, shape)
    with pytest.raises(UnsupportedModelError, match=f"{name} has the shape"):
        load(path, predictor=predictor)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "odd.gguf"]


@pytest.mark.parametrize("shape", [(64,), (64, 1, 32), (32, 64)])
@pytest.mark.parametrize("predictor", [None, "mlp:q8_0"])
def test_a_published_predictor_is_checked_before_it_is_requantised(
    tmp_path: Path, shape: tuple[int, ...], predictor: str | None
) -> None:
    plain = write_relu(tmp_path / "m.gguf")
    path = rewritten(plain, tmp_path / "odd.gguf", "blk.0.fc1.weight", T.F32, shape)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.fc[12]\.weight"):
        load(path, predictor=predictor)
