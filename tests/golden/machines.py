"""Other machines as data (tests/data/machines), and models of real shapes to plan on them.

The models' files have a header and a hole in place of the tensors.

about            description of the machine, and the sources of its rates
processor        its name as the system reports it
cores            physical cores
memory           total and available bytes
program          bytes in memory of this process
gpu              what backends/triton/drivers.py detects without torch; null: nothing
devices          by torch's name: name, compute capability, total and free bytes, and a DeviceRates
                 of placement/table.py
cpu, disk        the entry without a device in machine.json, and a DiskRates of placement/disk.py
channels         a ChannelRates of placement/channels.py, for every type
commands         for this machine, in addition to COMMANDS
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from cli_runs import inside
from golden.files import rounded
from header_files import tensors_of, write_header
from paths import DATA
from synthetic import SHAPES, Shape

from hotset import _core
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.thresholds import LayerThresholds
from hotset.placement import channel_rates
from hotset.placement.channels import ChannelRates
from hotset.sparsity.profile import Profile, profile_path
from hotset.sparsity.sidecar import fingerprint
from hotset.sparsity.thresholds import Calibrated, Thresholds, thresholds_path

FOLDER = DATA / "machines"
N_VOCAB, N_CTX = 32000, 8192
RANK = 1024  # of bamboo's predictors

COMMANDS = (
    "list",
    "show llama-7b",  # with the gain from its thresholds
    "plan llama-7b",
    "plan llama-7b --vram-budget 3 --ctx-size 2048",
    "plan llama-7b --ram-budget 3 --ctx-size 2048",
    "plan moe-30b",
    "plan moe-30b --ctx-size 2048 --vram-budget 6",
    "plan bamboo-7b",
    "plan bamboo-7b --vram-budget 3 --sparsity predicted",
    "plan bamboo-7b --gpu 4090 --vram-budget 2",
)


# -- models --------------------------------------------------------------------------------------


def write_models(folder: Path) -> None:
    """Write a dense model with thresholds, an MoE layer, and a sparse model with predictors and a profile."""
    folder.mkdir(parents=True)
    path = folder / "llama-7b.gguf"
    _write(path, "llama", SHAPES["7b"], GGMLType.Q4_0)
    with open_gguf(path) as model:
        layers = (LayerThresholds(gate=0.1, attn_in=0.2),) * SHAPES["7b"].layers
        kept = [{"gate": 0.3, "attn_in": 0.5, "down_in": 0.3}] * len(layers)
        Thresholds(Calibrated.of(model), layers, measured={"kept": kept}).save(thresholds_path(path))
    _write(folder / "moe-30b.gguf", "llama", SHAPES["qwen3-30b"], GGMLType.Q4_K)
    path, shape = folder / "bamboo-7b.gguf", SHAPES["bamboo7"]
    _write(path, "bamboo", shape, GGMLType.Q4_0)
    with open_gguf(path) as model:
        rng, fired = np.random.default_rng(0), 900 * np.arange(1, shape.ff + 1) ** -0.5
        counts = tuple(rng.permutation(fired).astype(np.uint64) for _ in range(shape.layers))
        Profile(counts, 1000, fingerprint(model), ("test",)).save(profile_path(path))


def _write(path: Path, architecture: str, shape: Shape, type: GGMLType) -> None:
    tensors = list(tensors_of(architecture, shape, type, N_VOCAB))
    for i in range(shape.layers) if architecture == "bamboo" else ():
        tensors.append((f"blk.{i}.fc1", (shape.d, RANK), GGMLType.Q4_0))
        tensors.append((f"blk.{i}.fc2", (RANK, shape.ff), GGMLType.Q4_0))
    write_header(path, architecture, shape, tensors, N_CTX)


# -- machines ------------------------------------------------------------------------------------


NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def reports(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the commands' reports on a machine."""
    facts = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    home = folder / "home"
    write_models(home / "models")
    with on(facts, home):
        return [_report(command, home) for command in (*COMMANDS, *facts["commands"])]


def _report(command: str, home: Path) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        done = inside(*command.split(), "--json", returns=None)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode != 2, said  # such an option does not exist
    found = {
        "command": command, "exit": done.returncode,
        "output": _with_runs(rounded(json.loads(done.stdout))) if done.stdout else None, "said": said,
        "warnings": [str(one.message) for one in warned if one.category is UserWarning],
    }  # fmt: skip
    return json.loads(json.dumps(found).replace(str(home), "<home>"))


def _with_runs(output: Any) -> Any:
    """Merge consecutive layers with the same plan: "layer" has the first and the last number."""
    if not isinstance(output, dict) or not isinstance(output.get("layers"), list):
        return output
    runs: list[dict[str, Any]] = []
    for layer in output["layers"]:
        i, facts = layer["layer"], {key: value for key, value in layer.items() if key != "layer"}
        if runs and facts == {key: value for key, value in runs[-1].items() if key != "layer"}:
            runs[-1]["layer"][1] = i
        else:
            runs.append({"layer": [i, i], **facts})
    return output | {"layers": runs}


@contextmanager
def on(facts: dict[str, Any], home: Path) -> Iterator[None]:
    """Let this process run as if on the machine: replace the functions by which hotset queries a system."""
    from hotset.backends.triton import drivers

    devices = facts["devices"]
    kinds = {name.partition(":")[0] for name in devices}
    gpu = facts["gpu"] and drivers.GPU(**facts["gpu"])
    memory = SimpleNamespace(**facts["memory"])
    environment = {
        "HOTSET_HOME": str(home),
        "HOTSET_ELSEWHERE": "0",
        "HOTSET_EXPERT_MISSES": "",
        "HOTSET_ISA": "scalar",  # supported by every machine; AMX needs more memory for a step
        "COLUMNS": "200",
    }

    def of(device: torch.device) -> dict[str, Any]:
        return devices[str(device)]

    with ExitStack() as stack:
        for where, what in {
            "psutil.virtual_memory": lambda: memory,
            "hotset.memory._LIMITS": (),
            "hotset.storage.store.usable_memory": lambda: memory.total,
            "hotset.placement.ram.own_memory": lambda: facts["program"],
            "hotset.loader.build.own_memory": lambda: facts["program"],
            "hotset.cores.usable_cores": lambda: facts["cores"],
            "hotset.backends.cpu.backend.usable_cores": lambda: facts["cores"],
            "hotset.placement.machine.usable_cores": lambda: facts["cores"],
            "hotset.placement.channel_rates.usable_cores": lambda: facts["cores"],
            "hotset.placement.machine.processor_name": lambda: facts["processor"],
            "hotset.backends.triton.measuring.usable_cores": lambda: facts["cores"],
            "hotset.backends.triton.measuring.processor_name": lambda: facts["processor"],
            "hotset.placement.disk.processor_name": lambda: facts["processor"],
            "hotset.placement.channel_rates.processor_name": lambda: facts["processor"],
            "hotset.backends.triton.drivers.detect_gpu": lambda: gpu,
            "hotset.backends.triton.drivers.missing_libraries": list,
            "hotset.placement.milp.TIME_LIMIT": 600.0,
            "torch.version.cuda": "12.8" if "cuda" in kinds else None,
            "torch.cuda.is_available": lambda: "cuda" in kinds,
            "torch.cuda.device_count": lambda: len(devices),
            "torch.cuda.get_device_capability": lambda index: tuple(of(f"cuda:{index}")["capability"]),
            "torch.cuda.get_device_name": lambda device: of(device)["name"],
            "torch.cuda.mem_get_info": lambda device: (of(device)["free"], of(device)["total"]),
            "torch.backends.mps.is_built": lambda: "mps" in kinds,
            "torch.backends.mps.is_available": lambda: "mps" in kinds,
            "torch.mps.recommended_max_memory": lambda: devices["mps:0"]["free"],
            "torch.mps.driver_allocated_memory": lambda: 0,
        }.items():
            stack.enter_context(mock.patch(where, what))
        stack.enter_context(mock.patch.dict(os.environ, environment))
        (home / "machine.json").write_text(json.dumps(dict(_measured(facts, home))))
        stack.enter_context(mock.patch.object(channel_rates, "of_cpu", _channel_rates(facts)))
        yield


def _measured(facts: dict[str, Any], home: Path) -> Iterator[tuple[str, Any]]:
    """Yield the entries of machine.json: the machine's rates, under the keys that this machine looks up."""
    from hotset.backends.triton import measuring

    yield f"{facts['processor']} | {facts['cores']} threads | {_core.isa()} | without a device", facts["cpu"]
    where = os.stat(home).st_dev
    yield f"{facts['processor']} | disk {where} | {os.cpu_count()} threads", facts["disk"]
    for name, device in facts["devices"].items():
        yield measuring.device_key(torch.device(name), facts["cores"]), device["measured"]


def _channel_rates(facts: dict[str, Any]) -> Any:
    rates = ChannelRates(**facts["channels"])
    return lambda works, *_, **__: {work.kind: rates for work in works}
