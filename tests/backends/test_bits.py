"""Stored hashes of logits: a change of the code must not change any bit.

`tests/data/bits.json` holds a hash for every architecture, tensor type and mode of the small models here, for
every recipe of tiny_models.py in every mode and with every KV type, and for some real files. Tokens of a
step, threads and a RAM budget have no hash of their own: the logits must be the same. A change that is meant
to alter the arithmetic writes new hashes, in a commit that says so:

    python tests/backends/test_bits.py --write [NAME ...]

Frequencies, sines and cosines of the rotation come from the C library. Their last bits may differ between
platforms. So hashes of another platform are compared only with that platform's instruction sets.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

if __name__ == "__main__":  # pytest sets the same path for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("support", "")]

import published
from cases import quick_are
from fuzz import fuzz_reads
from golden.files import PLATFORM
from logit_bits import DENSE_CASES, N_VOCAB, RELU_CASES, TABLE, bits_of, write_case, written_bits
from made_once import made_once
from paths import ROOT
from tiny_gguf import write_relu

import hotset
from hotset import _core
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.thresholds import LayerThresholds
from hotset.placement import channel_rates, ram
from hotset.placement.channels import ChannelRates, MatrixKind, Workload
from hotset.sparsity.thresholds import BaseMode, Calibrated, Thresholds
from hotset.training.predictor_files import write_merged
from hotset.training.predictor_layer import PredictorWeights

tiny_models = pytest.importorskip("tiny_models")

T = GGMLType
KV_TYPES = ("f16", "q8_0")


RECIPES = {f"recipe/{name}": name for name in tiny_models.RECIPES | tiny_models.EXPERTS}
ENCODERS = {f"encoder/{name}": name for name in tiny_models.ENCODERS}
FIRST = tiny_models.first_of_each_architecture()
OF_RECIPES = quick_are([f"recipe/{name}" for name in FIRST], RECIPES)
REAL = {
    "real/smollm2-135m": ("smollm2-135m", {}),
    "real/smollm2-135m/q8_0 cache": ("smollm2-135m", {"kv_type": "q8_0"}),
    "real/smollm2-135m/q4_0 cache": ("smollm2-135m", {"kv_type": "q4_0"}),
    "real/smollm2-135m-relu/dense": ("relu", {"sparsity": "dense"}),
    "real/smollm2-135m-relu/exact": ("relu", {"sparsity": "exact"}),
    "synthetic/bamboo/dense": ("synthetic", {"sparsity": "dense"}),
    "synthetic/bamboo/exact": ("synthetic", {"sparsity": "exact"}),
    "synthetic/bamboo/predicted": ("synthetic", {"sparsity": "predicted"}),
}

MERGED = "real/smollm2-135m-relu/file"


def write(name: str, folder: Path) -> Path:
    """Write the small model of a case, and return its path."""
    if (kept := (RECIPES | ENCODERS).get(name)) is not None:
        recipe = (tiny_models.RECIPES | tiny_models.EXPERTS | tiny_models.ENCODERS)[kept]
        return tiny_models.to_gguf(recipe, tiny_models.build(recipe), folder)
    return write_case(name, folder)


def digest_of(path: Path) -> str:
    """Return the digest of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def compute(name: str, folder: Path, isa: str | None = None, file: Path | None = None) -> str:
    """Return the hash of a case. file: the model of the case, if it has been written."""
    path: Path | str
    if name in REAL:
        of, settings = REAL[name]
        path, n_vocab = file or real(of, folder), 1000
    else:
        _, settings = (DENSE_CASES | RELU_CASES).get(name, (None, {}))
        path, n_vocab = file or write(name, folder), N_VOCAB
    environment = {} if isa is None else {"HOTSET_ISA": isa}
    with (
        mock.patch.dict(os.environ, environment),
        hotset.load(path, n_ctx=128, n_threads=2, device="cpu", **settings) as model,
    ):
        return bits_of(model, n_vocab)


def real(name: str, folder: Path) -> Path:
    """Return a real file, or one made from it once per folder. Skip the test if it is not in the store."""
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
    from hotset.training.adapters import TrainedAdapters, merge

    adapters = ROOT / "adapters" / "smollm2-135m-relu.safetensors"

    def make(out: Path) -> None:
        with open_gguf(path) as gguf:
            merge(gguf, TrainedAdapters.open(adapters), out, T.Q8_0)

    return made_once(folder / "smollm2-135m-relu.gguf", make)


def known_bits() -> dict[str, str]:
    """Return the hashes by name. Skip the test on another platform."""
    platform, bits = written_bits()
    if platform != PLATFORM:
        pytest.skip(f"bits were written down on {platform}; this is {PLATFORM}")
    return bits


@pytest.mark.parametrize("name", [*OF_RECIPES, *DENSE_CASES, *RELU_CASES, *ENCODERS])
def test_bits_equal_the_stored_hashes(name: str, tmp_path: Path, run_folder: Path) -> None:
    file = None
    if name in RECIPES | ENCODERS:  # a copy: hotset may write files next to a model
        file = Path(shutil.copy(tiny_models.shared_gguf((RECIPES | ENCODERS)[name], run_folder), tmp_path))
    assert compute(name, tmp_path, file=file) == known_bits()[name]


@pytest.mark.parametrize("name", quick_are(("real/smollm2-135m", "synthetic/bamboo/dense"), REAL))
def test_bits_of_larger_files(name: str, tmp_path: Path, run_folder: Path) -> None:
    file = real(REAL[name][0], run_folder)
    if file.parent == run_folder:
        file = Path(shutil.copy(file, tmp_path))
    assert compute(name, tmp_path, file=file) == known_bits()[name]


def test_merged_adapters_are_the_same_file_on_every_machine(run_folder: Path) -> None:
    assert digest_of(real("relu", run_folder)) == known_bits()[MERGED]


# -- every recipe in every mode, with every cache ----------------------------------------------------

N_CTX = 128
N_TOKENS = 70  # more than a KV block, a window and a context before scaling; the last step of 64 is short
LAYER_THRESHOLDS = LayerThresholds(gate=0.1, attn_in=0.6, attn_out=0.1, ffn_in=0.6, down_in=0.05)
MODES: dict[str, tuple[dict[str, Any], ...]] = {  # the first settings that the model supports
    "dense": ({"sparsity": "dense"},),
    "exact": ({"sparsity": "exact"},),
    "predicted": ({"sparsity": "predicted"},),
    "threshold": tuple(
        {"thresholds": layer_thresholds} for layer_thresholds in (LAYER_THRESHOLDS, LayerThresholds(gate=0.1))
    ),
}


class Way(NamedTuple):
    """A way to compute the same logits: tokens of a step, threads, and whether memory is minimal."""

    n_tokens: int
    n_threads: int
    tight: bool


WAYS = [Way(*way) for way in itertools.product((64, 5, 1), (3, 1), (False, True))]
FEW_WAYS = [Way(5, 3, True)]  # the stored hashes are of Way(64, 3, False)


def logits_in(way: Way, path: Path, **settings: Any) -> np.ndarray:
    settings = {
        "n_ctx": N_CTX, "device": "cpu", "max_batch": way.n_tokens, "n_threads": way.n_threads, **settings
    }  # fmt: skip
    ids = np.random.default_rng(0).integers(0, tiny_models.VOCABULARY, N_TOKENS).tolist()
    with (  # the budget excludes the program itself, in which these models would fit many times
        mock.patch.object(ram, "own_memory", return_value=0),
        mock.patch.object(ram, "PROGRAM", 0),
        mock.patch.object(channel_rates, "of_cpu", rates_of_channels),
    ):
        if way.tight:
            settings["ram_budget"] = fuzz_reads.least_budget(path, **settings)
        with hotset.load(path, **settings) as model:
            return model.logits(ids)


def rates_of_channels(works: Iterable[Workload], *_: Any, **__: Any) -> dict[MatrixKind, ChannelRates]:
    """Replace the measured rates: input-major is always quicker."""
    return {work.kind: ChannelRates(1e9, 1e11) for work in works}


def settings_of(mode: str, path: Path, base: BaseMode) -> Iterator[dict[str, Any]]:
    """Yield settings of a mode. Its file of thresholds, for mode `base`, is written next to the model."""
    for settings in MODES[mode]:
        if "thresholds" in settings:
            file = path.with_name("thresholds.json")
            with open_gguf(path) as gguf:
                n_layer = config_from_gguf(gguf).n_layer
                Thresholds(Calibrated.of(gguf), (settings["thresholds"],) * n_layer, base, True).save(file)
            settings = {"thresholds": file}
        yield settings


def with_predictors(path: Path) -> Path:
    """Return a file with the model and random predictors; the model itself if it needs none or allows none.

    The predictors that hotset builds depend on the processor, through NumPy's SVD.
    """
    with open_gguf(path) as model:
        config, rng = config_from_gguf(model), np.random.default_rng(0)
        if config.masked or config.has_experts or not config.has_zeros or 0 in config.n_ff:
            return path

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        layers = [PredictorWeights(normal(32, config.n_embd), normal(n_ff, 32)) for n_ff in config.n_ff]
        out = path.with_name("predicted.gguf")
        write_merged(out, model, config, layers, GGMLType.F16, "gguf")
    return out


def bits_of_modes(path: Path, kv_type: str, ways: Sequence[Way]) -> dict[str, str]:
    """Return the hash of each mode that the model has. All ways must give the same logits."""
    found: dict[str, str] = {}
    for mode in MODES:
        own = with_predictors(path) if mode == "predicted" else path
        for settings in settings_of(mode, path, "exact" if "exact" in found else "dense"):
            settings = {**settings, "kv_type": kv_type}
            try:
                logits = logits_in(ways[0], own, **settings)
            except (InvalidRequestError, UnsupportedModelError):
                continue
            for way in ways[1:]:
                np.testing.assert_array_equal(
                    logits_in(way, own, **settings), logits, f"{mode}, {kv_type}, {way}", strict=True
                )
            found[mode] = hashlib.sha256(logits.tobytes()).hexdigest()[:24]
            break
    return found


def bits_of_recipe(
    name: str, folder: Path, run_folder: Path, kv_types: Sequence[str], ways: Sequence[Way]
) -> dict[str, str]:
    """Return hashes by the name in the table: recipe, mode, cache."""
    found = {}
    for kv_type in kv_types:
        heads = tiny_models.HEADS_OF_32.get(name, {}) if kv_type == "q8_0" else {}
        own = folder / kv_type  # hotset writes files next to a model
        own.mkdir()
        path = Path(shutil.copy(tiny_models.shared_gguf(name, run_folder, **heads), own / "model.gguf"))
        found |= {
            f"recipe/{name}/{m}/{kv_type}": bits for m, bits in bits_of_modes(path, kv_type, ways).items()
        }
    return found


@pytest.mark.parametrize("name", quick_are(tiny_models.ONE_OF_EACH_KIND, FIRST))
def test_modes_of_each_architecture(name: str, tmp_path: Path, run_folder: Path) -> None:
    """Compare a few ways; the slow test has all of them, all recipes and both caches."""
    found = bits_of_recipe(name, tmp_path, run_folder, ["f16"], FEW_WAYS)
    assert found == known_of_recipe(name, ["f16"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES.values())
def test_modes_and_caches_of_every_recipe(name: str, tmp_path: Path, run_folder: Path) -> None:
    """Check that tokens of a step, threads and memory do not change logits."""
    found = bits_of_recipe(name, tmp_path, run_folder, KV_TYPES, WAYS)
    if f"recipe/{name}/exact/f16" in found:
        assert found[f"recipe/{name}/exact/f16"] == found[f"recipe/{name}/dense/f16"]
    assert found == known_of_recipe(name, KV_TYPES)


def test_every_architecture_has_a_recipe_with_a_q8_0_cache() -> None:
    kinds = {
        (tiny_models.RECIPES | tiny_models.EXPERTS)[name].kind
        for name in tiny_models.first_of_each_architecture()
    }
    table = json.loads(TABLE.read_text())["bits"]
    having = {name.split("/")[1] for name in table if name.endswith("/q8_0")}
    assert kinds == {(tiny_models.RECIPES | tiny_models.EXPERTS)[name].kind for name in having}


def known_of_recipe(name: str, kv_types: Sequence[str]) -> dict[str, str]:
    """Return the entries of the table that `bits_of_recipe` computes."""
    first = f"recipe/{name}/"
    return {
        key: bits
        for key, bits in known_bits().items()
        if key.startswith(first) and key.rpartition("/")[2] in kv_types
    }


@pytest.mark.parametrize(
    "name",
    [
        *(
            "dense/llama/Q4_K",
            "dense/llama/Q4_1/q4_0 cache",
            "powerinfer/bamboo/Q4_0/predicted",
            "plain/opt/Q8_0/exact",
            "recipe/qwen3next",
        ),
        *("encoder/gemma-embedding", "encoder/jina-bert-v2"),
    ],
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
    parser.add_argument("names", nargs="*", help="cases; all without one. A recipe's are recipe/NAME")
    args = parser.parse_args()
    names = args.names or [*RECIPES, *DENSE_CASES, *RELU_CASES, *ENCODERS, *REAL]
    table = json.loads(TABLE.read_text()) if TABLE.exists() and args.names else {"bits": {}}
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(names):
            own = Path(folder) if name in REAL else Path(folder) / str(i)
            own.mkdir(exist_ok=True)
            table["bits"][name] = compute(name, own)
            if name in RECIPES:
                kept = {key: bits for key, bits in table["bits"].items() if not key.startswith(f"{name}/")}
                found = bits_of_recipe(RECIPES[name], own, Path(folder), KV_TYPES, WAYS[:1])
                table["bits"] = kept | found
            if name in REAL and REAL[name][0] == "relu":
                table["bits"][MERGED] = digest_of(real("relu", own))
    table["platform"] = PLATFORM
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
