"""The bits of logits that were written down: a change of the code must not change one of them.

`tests/data/bits.json` holds a hash for every architecture, tensor type and mode of the small models here, and
for some real files. A change that means to alter the arithmetic writes them anew, in a commit that says so:

    python tests/test_bits.py --write [NAME ...]

Frequencies, sines and cosines of the rotation come from the C library and may differ between platforms in
their last bits: hashes of another platform are compared with the instruction sets of that platform alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import published
import pytest
from made_once import made_once
from tiny_gguf import write_llama, write_relu

import hotset
from hotset import _core
from hotset.formats.quants import DECODABLE, GGMLType

tiny_models = pytest.importorskip("tiny_models")

T = GGMLType
TABLE = Path(__file__).parent / "data" / "bits.json"
PLATFORM = f"{platform.system()}-{platform.machine()}-{'-'.join(platform.libc_ver())}"

DENSE = {
    "llama": {},
    "llama-window": {"keys": {"llama.attention.sliding_window": 24}},
    "llama-tied": {"tied": True},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3"},
}
RELU = {
    "llama": {"architecture": "llama"},
    "bamboo": {"architecture": "bamboo"},
    "falcon-7b": {"architecture": "falcon", "n_head_kv": 1},
    "falcon-40b": {"architecture": "falcon", "two_norms": True},
    "opt": {"architecture": "opt"},
    "relu2": {"architecture": "llama", "keys": {"llama.hidden_activation": "relu2"}},
    "fatrelu": {
        "architecture": "llama",
        "keys": {"llama.hidden_activation": "fatrelu", "hotset.fatrelu_threshold": 0.4},
    },
}
RELU_TYPES = (T.F32, T.F16, T.Q8_0, T.Q4_0)
LENGTHS = (61, 64, 65, 69, 90)  # tokens


def dense_cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, options in DENSE.items():
        yield f"dense/{name}/F32", options, {}
    for type_ in sorted(DECODABLE):
        yield f"dense/llama/{type_.name}", {"type": type_}, {}
    yield "dense/llama/Q4_1/q8_0 cache", {"type": T.Q4_1}, {"kv_type": "q8_0"}


def relu_cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, options in RELU.items():
        for type_ in RELU_TYPES:
            for mode in ("dense", "exact", "predicted"):
                yield f"powerinfer/{name}/{type_.name}/{mode}", {**options, "type": type_}, {"sparsity": mode}
            for mode in ("dense", "exact"):
                plain = {**options, "type": type_, "dialect": "gguf"}
                yield f"plain/{name}/{type_.name}/{mode}", plain, {"sparsity": mode}


RECIPES = {f"recipe/{name}": name for name in tiny_models.RECIPES | tiny_models.EXPERTS}
DENSE_CASES = {name: (model, settings) for name, model, settings in dense_cases()}
RELU_CASES = {name: (model, settings) for name, model, settings in relu_cases()}
REAL = {
    "real/smollm2-135m": ("smollm2-135m", {}),
    "real/smollm2-135m/q8_0 cache": ("smollm2-135m", {"kv_type": "q8_0"}),
    "real/smollm2-135m-relu/dense": ("relu", {"sparsity": "dense"}),
    "real/smollm2-135m-relu/exact": ("relu", {"sparsity": "exact"}),
    "synthetic/bamboo/dense": ("synthetic", {"sparsity": "dense"}),
    "synthetic/bamboo/exact": ("synthetic", {"sparsity": "exact"}),
    "synthetic/bamboo/predicted": ("synthetic", {"sparsity": "predicted"}),
}

MERGED = "real/smollm2-135m-relu/file"


def write(name: str, folder: Path) -> Path:
    """The small model of a case."""
    if name in RECIPES:
        recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[RECIPES[name]]
        return tiny_models.to_gguf(recipe, tiny_models.build(recipe), folder)
    if name in DENSE_CASES:
        options = dict(DENSE_CASES[name][0])
        type_ = options.pop("type", T.F32)
        options = {"type_of": lambda _: type_, "head_dim": 64, "n_embd": 256, "n_ff": 256, **options}
        return write_llama(folder / "model.gguf", **options)
    options = dict(RELU_CASES[name][0])
    type_ = options.pop("type")
    return write_relu(
        folder / "model.gguf", **{"n_embd": 64, "n_ff": 736, "type_of": lambda _: type_, **options}
    )


def bits_of(model: hotset.Model, n_vocab: int) -> str:
    """SHA-256 of logits: of whole prompts, of a single token and of some tokens behind a reused page."""
    ids = np.random.default_rng(0).integers(0, n_vocab, LENGTHS[-1]).tolist()
    hasher = hashlib.sha256()
    for n in LENGTHS:  # the full page of the second is reused by those behind it
        hasher.update(np.ascontiguousarray(model.logits(ids[:n])).tobytes())
    return hasher.hexdigest()[:24]


def digest_of(path: Path) -> str:
    """Of what a file holds."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def compute(name: str, folder: Path, isa: str | None = None, file: Path | None = None) -> str:
    """`file`: the model of the case, where it has been written."""
    path: Path | str
    if name in REAL:
        of, settings = REAL[name]
        path, n_vocab = file or real(of, folder), 1000
    else:
        _, settings = (DENSE_CASES | RELU_CASES).get(name, (None, {}))
        path, n_vocab = file or write(name, folder), 96
    environment = {} if isa is None else {"HOTSET_ISA": isa}
    with (
        mock.patch.dict(os.environ, environment),
        hotset.load(path, n_ctx=128, n_threads=2, backend="cpu", **settings) as model,
    ):
        return bits_of(model, n_vocab)


def real(name: str, folder: Path) -> Path:
    """A real file, or what is made of one, once in a folder; skips where it is not in the store."""
    if name == "synthetic":
        return made_once(
            folder / "big.gguf",
            lambda path: write_relu(
                path, "bamboo", n_embd=1024, n_ff=2816, n_head=16, n_head_kv=4, n_vocab=1000,
                ranks=(128, 256, 192), type_of=lambda name: T.F32 if "norm" in name else T.Q4_0, seed=7,
            ),
        )  # fmt: skip
    path = published.model()
    if name == published.NAME:
        return path
    from hotset.formats.gguf import open_gguf
    from hotset.training.adapters import Adapters, merge

    adapters = Path(__file__).parents[1] / "adapters" / "smollm2-135m-relu.safetensors"

    def make(out: Path) -> None:
        with open_gguf(path) as gguf:
            merge(gguf, Adapters.open(adapters), out, T.Q8_0)

    return made_once(folder / "smollm2-135m-relu.gguf", make)


def known(name: str) -> str:
    table = json.loads(TABLE.read_text())
    if table["platform"] != PLATFORM:
        pytest.skip(f"bits were written down on {table['platform']}; this is {PLATFORM}")
    return table["bits"][name]


@pytest.mark.parametrize("name", [*RECIPES, *DENSE_CASES, *RELU_CASES])
def test_bits_are_those_that_were_written_down(name: str, tmp_path: Path, run_folder: Path) -> None:
    file = None
    if name in RECIPES:  # a copy: hotset may write beside a model
        file = Path(shutil.copy(tiny_models.shared_gguf(RECIPES[name], run_folder), tmp_path))
    assert compute(name, tmp_path, file=file) == known(name)


@pytest.mark.parametrize("name", REAL)
def test_bits_of_larger_files(name: str, tmp_path: Path, run_folder: Path) -> None:
    file = real(REAL[name][0], run_folder)
    if file.parent == run_folder:
        file = Path(shutil.copy(file, tmp_path))
    assert compute(name, tmp_path, file=file) == known(name)


def test_merged_adapters_are_the_same_file_on_every_machine(run_folder: Path) -> None:
    assert digest_of(real("relu", run_folder)) == known(MERGED)


@pytest.mark.parametrize(
    "name",
    ["dense/llama/Q4_K", "powerinfer/bamboo/Q4_0/predicted", "plain/opt/Q8_0/exact", "recipe/qwen3next"],
)
def test_every_instruction_set_has_these_bits(name: str, tmp_path: Path) -> None:
    file = write(name, tmp_path)
    found = {isa: compute(name, tmp_path, isa, file) for isa in _core.available_isas()}
    assert len(set(found.values())) == 1, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("names", nargs="*", help="cases; all without one")
    args = parser.parse_args()
    names = args.names or [*RECIPES, *DENSE_CASES, *RELU_CASES, *REAL]
    table = json.loads(TABLE.read_text()) if TABLE.exists() and args.names else {"bits": {}}
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(names):
            own = Path(folder) if name in REAL else Path(folder) / str(i)
            own.mkdir(exist_ok=True)
            table["bits"][name] = compute(name, own)
            if name in REAL and REAL[name][0] == "relu":
                table["bits"][MERGED] = digest_of(real("relu", own))
    table["platform"] = PLATFORM
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
