"""`hotset plan` and the device options of the command line; GPU indices in PowerInfer's format."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from byte_models import N_PLANTED as N_FF
from byte_models import PLANTED_LAYERS as N_LAYER
from byte_models import counts, write_sparse
from cli_runs import inside
from waiting import WATCHDOG

from hotset.errors import InvalidRequestError
from hotset.formats.gguf import open_gguf
from hotset.formats.powerinfer import GPUIndex, read_gpu_index, write_activations, write_gpu_index
from hotset.placement import machine

pytest.importorskip("hotset._core", reason="the native module is not built")

SMALL = ("-c", 128, "-t", 1)
STAND_IN = ("--device", "simulated", "--vram-budget")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    slow = replace(
        machine.STAND_IN, cpu_read=1e7, cpu_gather=1e7, cpu_read_busy=1e7, cpu_gather_busy=1e7, sync=1e-6
    )
    monkeypatch.setattr(machine, "STAND_IN", slow)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = write_sparse(tmp_path / "model.gguf", n_ff=N_FF, ranks=(32,) * N_LAYER)
    write_activations(tmp_path / "activation", counts(100))
    return path


def planned(model: Path, *options: object) -> dict[str, Any]:
    done = inside("plan", model, *SMALL, "-b", 16, *options, "--json")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def split_budget(model: Path) -> float:
    """Return GiB for the fixed parts of all layers, the streamed parts, and some neurons."""
    [device] = planned(model, *STAND_IN, 1)["devices"]
    return (device["total"] - 0.45 * device["neurons"]) / 2**30


@pytest.mark.backend("triton")
def test_a_plan_as_a_table(model: Path) -> None:
    done = inside("plan", model, *SMALL, "-b", 16, *STAND_IN, split_budget(model), "--layers")
    assert re.search(rf"^ *CPU +cold neurons of {N_LAYER} ", done.stdout, re.M)
    assert re.search(rf"^ *simulated +0 to {N_LAYER - 1}, output +\d+ of \d+ ", done.stdout, re.M)
    assert len(re.findall(r"^ +\d+ +simulated +\d+ of 512 ", done.stdout, re.M)) == N_LAYER
    hot = re.search(r"^hot (\d+)% on the GPU serve (\d+)% of activations$", done.stderr, re.M)
    assert hot is not None
    assert int(hot[2]) > int(hot[1])
    assert re.search(r"^predicted [\d.]+ ms per token", done.stderr, re.M)
    assert "the simulated GPU makes nothing faster" in done.stderr
    assert "as published" in done.stderr


@pytest.mark.backend("triton")
def test_a_plan_as_json(model: Path) -> None:
    gib = split_budget(model)
    facts = planned(model, *STAND_IN, gib)
    [device] = facts["devices"]
    assert device["limit"] == int(gib * 2**30)
    kinds = ("weights", "neurons", "kv", "workspace", "context")
    assert device["total"] == sum(device[kind] for kind in kinds) <= device["limit"]
    assert [layer["layer"] for layer in facts["layers"]] == list(range(N_LAYER))
    total = sum(layer["seconds"]["total"] for layer in facts["layers"])
    assert 0 < total < facts["predicted_seconds"]
    assert 0 < facts["hot_share"] < facts["served_share"] < 1
    more = planned(model, *STAND_IN, gib, "-np", 2)  # two contexts leave less memory for neurons
    assert more["devices"][0]["kv"] == 2 * device["kv"]
    assert more["hot_share"] < facts["hot_share"]


@pytest.mark.backend("triton")
def test_plan_writes_an_index_that_run_accepts(model: Path, tmp_path: Path) -> None:
    path, gib = tmp_path / "out.gpuidx", split_budget(model)
    facts = planned(model, *STAND_IN, gib, "-o", path)
    assert facts["gpu_index"] == str(path)
    index = read_gpu_index(path, (N_FF,) * N_LAYER)
    assert [int(mask.sum()) for mask in index.on_gpu] == [layer["hot_neurons"] for layer in facts["layers"]]
    assert index.vram_capacity == facts["devices"][0]["neurons"]
    done = inside(
        "run", model, "Hello", "-n", 3, "--temp", 0, *SMALL, *STAND_IN, 1, "--gpu-index", path, "--json"
    )
    answer = json.loads(done.stdout)
    assert answer["placement"]["layers"][0]["hot_neurons"] == facts["layers"][0]["hot_neurons"]
    [memory] = answer["memory"]
    assert memory["measured"]["total"] <= memory["total"]
    alone = inside("run", model, "Hello", "-n", 3, "--temp", 0, *SMALL, "--device", "cpu", "--json")
    assert json.loads(alone.stdout)["tokens"] == answer["tokens"]
    assert "placement" not in json.loads(alone.stdout)


@pytest.mark.backend("triton")
def test_run_prints_the_plan_and_measured_times(model: Path) -> None:
    done = inside("run", model, "Hello", "-n", 3, "--temp", 0, *SMALL, *STAND_IN, 1, "-ngl", 2)
    assert re.search(rf"^ *CPU +0 to {N_LAYER - 3} whole ", done.stderr, re.M)
    assert "planned / measured" in done.stderr
    assert done.stdout.strip()


@pytest.mark.backend("triton")
def test_bench_and_perplexity_accept_devices(model: Path, tmp_path: Path) -> None:
    done = inside("bench", model, "-p", 0, "-n", 2, "-r", 1, "-t", 1, *STAND_IN, 1, "-ngl", 2, "--json")
    [entry] = json.loads(done.stdout)
    assert (entry["backends"], entry["gpu_info"], entry["n_gpu_layers"]) == ("HYBRID", "simulated", 2)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 8)
    ppl = {}
    for options in (
        ("--device", "cpu"),
        (*STAND_IN, 1),
    ):
        done = inside("perplexity", model, "-f", text, "-c", 64, "-t", 1, *options, "--json")
        ppl[options] = json.loads(done.stdout)["ppl"]
    first, second = ppl.values()
    assert second == pytest.approx(first, rel=0.01)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((*STAND_IN, "0.0001"), 1, "the smallest budget that works is 0.01 GiB"),
        (("--device", "gpu"), 2, "--device must be one of auto, cpu"),
        ((*STAND_IN, 1, "-ngl", "few"), 2, "-ngl must be auto or a whole number, not 'few'"),
        (
            ("--vram-budget", "-7", "--device", "simulated"),
            2,
            "--vram-budget must be a number of GiB",
        ),
        ((*STAND_IN, 1, "--gpu-index", "none.gpuidx"), 2, "there is no file none.gpuidx"),
    ],
    ids=str,
)
@pytest.mark.backend("triton")
def test_wrong_devices_and_budgets_give_one_message(
    model: Path, options: tuple[object, ...], code: int, message: str
) -> None:
    done = inside("plan", model, *SMALL, "-b", 16, *options, returns=code)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")


def test_without_a_gpu_the_plan_is_about_memory(model: Path) -> None:
    done = inside("plan", model, *SMALL, "-b", 16)
    assert re.search(r"program +weights that stay .* together +budget", done.stdout)
    facts = planned(model)
    assert facts["n_ctx"] == 128
    assert 0 < facts["resident"] + facts["rows"] < facts["total"] <= facts["limit"]
    assert facts["least"] <= facts["total"]
    more = planned(model, "-np", 2)
    assert more["kv"] == 2 * facts["kv"]


def test_layers_for_a_missing_gpu_give_a_warning(model: Path) -> None:
    asked = ("run", model, "Hello", "-n", 3, "--temp", 0, *SMALL)
    plain = inside(*asked)
    with pytest.warns(UserWarning, match="no GPU was found: the CPU computes all layers"):
        done = inside(*asked, "-ngl", 99, returns=None)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr


def test_contradictory_options_are_refused(model: Path) -> None:
    done = inside("run", model, "Hello", "--device", "cpu", "--vram-budget", 4, returns=2)
    assert "--device cpu cannot be combined with --vram-budget" in done.stderr


# -- the index -----------------------------------------------------------------------------------


def test_an_index_equals_the_format_of_powerinfer(tmp_path: Path) -> None:
    """Use twelve layers, to check their order by number: the engine reads tensors by position."""
    rng = np.random.default_rng(0)
    masks = [rng.random(96) < 0.4 for _ in range(12)]
    masks[3][:] = False
    path = tmp_path / "index.gpuidx"
    write_gpu_index(path, GPUIndex(2**40 + 1, masks))
    again = read_gpu_index(path, (96,) * 12)
    assert again.vram_capacity == 2**40 + 1
    assert all(np.array_equal(a, b) for a, b in zip(again.on_gpu, masks, strict=True))
    with open_gguf(path) as file:
        names = [f"blk.{i}.{kind}" for i in range(12) for kind in ("gpu_idx", "gpu_bucket")]
        assert list(file.tensors) == names
    data = path.read_bytes()
    assert data[:8] == b"PWRI" + (3).to_bytes(4, "little")
    # The gguf package can read it with GGUF's magic and its number for the integer type.
    plain = tmp_path / "plain.gguf"
    patched = data[:4].replace(b"PWRI", b"GGUF") + data[4:]
    for name in names:
        at = patched.index(name.encode()) + len(name) + 4 + 8
        assert patched[at : at + 4] == (18).to_bytes(4, "little")  # the number for I32 in PowerInfer's GGML
        patched = patched[:at] + int(gguf.GGMLQuantizationType.I32).to_bytes(4, "little") + patched[at + 4 :]
    plain.write_bytes(patched)
    reader = gguf.GGUFReader(plain)
    for i, mask in enumerate(masks):
        assert np.array_equal(reader.tensors[2 * i].data, mask.astype(np.int32))
        assert np.array_equal(reader.tensors[2 * i + 1].data, np.flatnonzero(mask))
    with pytest.raises(InvalidRequestError):
        write_gpu_index(path, GPUIndex(-1, masks))
    assert read_gpu_index(path, (96,) * 12).vram_capacity == 2**40 + 1  # the file is unchanged


def test_a_chat_on_a_machine_without_a_gpu_imports_no_gpu_libraries(model: Path) -> None:
    code = (
        "import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = '-1'\n"
        "import hotset\n"
        f"m = hotset.load({str(model)!r}, n_ctx=128, n_threads=1)\n"
        "m.generate('Hello', max_tokens=2, seed=1); m.close()\n"
        "print([n for n in ('torch', 'triton', 'scipy', 'hotset.placement.planner') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WATCHDOG)
    assert done.stdout.strip() == "[]", done.stderr
