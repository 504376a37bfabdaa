"""LoadSettings: the arguments of `load`, `plan` and the subcommands, and the three functions that use it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import write_model, write_sparse

import hotset
from hotset import LoadSettings
from hotset.cli import options
from hotset.loader.build import build, open_model, plan_model
from hotset.reporter import Reporter

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.backend("triton")
def test_values_become_plain() -> None:
    settings = LoadSettings(
        n_ctx=np.int64(64), device=["cuda:0", "cuda:1"], vram_budget=np.float32(2), profile="p"
    )  # type: ignore[arg-type]
    assert type(settings.n_ctx) is int
    assert settings.device == ("cuda:0", "cuda:1")
    assert type(settings.vram_budget) is float
    assert settings.profile == Path("p")
    assert LoadSettings(device="cuda:0") == LoadSettings(device=["cuda:0"])
    assert LoadSettings(device=[]) == LoadSettings()
    assert LoadSettings(gpu_index="i") == LoadSettings(gpu_index=Path("i"))
    assert (
        len({LoadSettings(device=["simulated"]), LoadSettings(device=("simulated",)), LoadSettings(n_ctx=1)})
        == 2
    )
    assert LoadSettings(progress=Reporter()) == LoadSettings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.n_ctx = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_ctx": "64"}, "n_ctx must be a whole number, not '64'"),
        ({"n_threads": 0}, "n_threads must be at least 1, not 0"),
        ({"max_batch": None}, "max_batch must be a whole number, not None"),
        ({"max_sequences": 4097}, "max_sequences must be between 1 and 4096, not 4097"),
        ({"n_gpu_layers": 1.0}, "n_gpu_layers must be a whole number"),
        ({"split": 1}, "split must be one of auto, layers, neurons, not 1"),
        ({"reset_gpu_index": "no"}, "reset_gpu_index must be True or False"),
        ({"kv_type": ["f16"]}, r"kv_type must be one of f16, q8_0, .*, not \['f16'\]"),
        ({"activation": 1}, "activation must be a text, not 1"),
        ({"activation": "tanh"}, "activation 'tanh' is unknown"),
        ({"sparsity": True}, "sparsity must be one of dense, .*, not True"),
        ({"sparsity": "some"}, "sparsity must be one of dense, exact, predicted, threshold, not 'some'"),
        ({"predictor": 8}, "predictor must be a text, not 8"),
        ({"predictor": "svd:0"}, "the predictor 'svd:0' is unknown"),
        ({"predictor": "svd", "sparsity": "dense"}, "`predictor` requires sparsity='predicted', not 'dense'"),
        ({"profile": 3}, "profile must be a path, not 3"),
        ({"gpu_index": 3.5}, "gpu_index must be a path, not 3.5"),
        ({"device": 0}, "device must be a text, not 0"),
        ({"device": ["cpu", 1]}, "device must be a text, not 1"),
        ({"vram_budget": 0}, "vram_budget must be a number of GiB above 0, or a size .*, or -1"),
        ({"gpu_index": "i", "split": "layers"}, "cannot be combined with n_gpu_layers"),
        ({"device": "cpu", "vram_budget": 1}, "device='cpu' cannot be combined"),
        ({"device": "cpu,reference"}, "the device cpu cannot be combined with others"),
        ({"device": "auto,reference"}, "the device auto cannot be combined with others"),
        *(
            ({"device": name}, rf"device must be one of auto, cpu, .*, not {re.escape(repr(name))}")
            for name in ("gpu", "cuda:", "cuda:x", "cuda[:N]", "cpu:0", "simulated:1", "")
        ),
    ],
    ids=str,
)
def test_mistake_gives_one_message_before_any_file_is_opened(fields: dict[str, Any], message: str) -> None:
    for use in (
        LoadSettings, lambda **f: hotset.load("missing", **f), lambda **f: hotset.plan("missing", **f),
    ):  # fmt: skip
        with pytest.raises(hotset.InvalidRequestError, match=message):
            use(**fields)


def test_load_and_plan_take_the_fields_as_keywords() -> None:
    """Check that the functions show the fields as keywords and describe them, without listing them again."""
    fields = [field.name for field in dataclasses.fields(LoadSettings)]
    for function in (hotset.load, hotset.plan):
        assert list(inspect.signature(function).parameters) == ["model", "settings", *fields]
    described = inspect.getdoc(LoadSettings) or ""
    assert [name for name in fields if f"{name}:" not in described] == []
    with pytest.raises(TypeError, match="n_context"):
        hotset.load("missing", n_context=1)  # type: ignore[call-overload]


def test_keywords_override_settings(path: Path) -> None:
    settings = LoadSettings(n_ctx=32, device="reference", kv_type="f32")
    with hotset.load(path, settings) as model:
        assert (model.n_ctx, model.kv_type, model.backend.name) == (32, "f32", "reference")
        assert model.decided.settings == settings
    with hotset.load(path, settings=settings, n_ctx=64) as model:
        assert (model.n_ctx, model.kv_type) == (64, "f32")
    assert hotset.plan(path, settings) is None


@pytest.mark.backend("triton")
def test_the_options_of_the_command_line_are_load_settings() -> None:
    given = options.ModelOptions(n_threads=2, kv_type="q8_0", sparsity="exact", device="cuda:0, cuda:1")
    assert given.settings(n_ctx=8) == LoadSettings(
        n_ctx=8, n_threads=2, kv_type="q8_0", sparsity="exact", device=("cuda:0", "cuda:1")
    )
    assert options.PlanOptions(n_seqs=2).settings() == LoadSettings(n_seqs=2)
    assert options.PlanOptions(split="neurons").settings() == LoadSettings(split="neurons")
    watched = LoadSettings(device="cpu", sparsity="exact", max_batch=options.OBSERVED)
    assert options.ObservationOptions().settings() == watched


def test_open_decide_build(tmp_path: Path) -> None:
    file = write_sparse(tmp_path / "m.gguf", dialect="gguf")
    with open_model(file, LoadSettings(device="reference")) as opened:
        assert opened.devices == ()
        decided = plan_model(opened.with_settings(n_ctx=70, n_seqs=2))
        assert (decided.n_ctx, decided.n_blocks) == (70, 4)
        assert (decided.choice.mode, decided.placement) == ("exact", None)
        same, backend = build(decided)
        assert same is decided
        assert (backend.name, backend.n_blocks, backend.max_batch) == ("reference", 4, 512)
        backend.close()
        decided.weights.close()


def test_a_warning_names_the_line_that_loads(path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hotset.load(path, device="reference", n_ctx=300).close()
        hotset.plan(path, device="cpu", n_ctx=300)
    assert [Path(one.filename).name for one in seen] == ["test_settings.py"] * 2
