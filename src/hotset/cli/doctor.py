"""`hotset doctor`: the hardware and software of this machine, and what hotset chose for it and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotset.backends.registry import capabilities
from hotset.cli import options
from hotset.cli.console import print_json, print_table
from hotset.cli.devices import examined, software
from hotset.cli.wording import in_options
from hotset.placement.detect import Examined
from hotset.storage import store
from hotset.units import human_size

PACKAGES = (
    "hotset",
    "numpy",
    "tokenizers",
    "sentencepiece",
    "jinja2",
    "huggingface-hub",
    "filelock",
    "psutil",
    "safetensors",
    "scipy",
    "typer",
    "rich",
    "prompt-toolkit",
    "pyyaml",
)


def doctor(json: options.Json = False) -> None:
    """Show the processor, the kernels chosen and why, memory, libraries and where models are kept."""
    devices = dict(examined())
    report = examine(devices)
    if json:
        print_json(report)
        return
    cpu, memory, kernels, place = report["processor"], report["memory"], report["kernels"], report["store"]
    gpu = report["gpu"]
    rows = [
        ["hotset", report["packages"]["hotset"] or "not installed (running from a source folder)"],
        ["python", f"{report['python']} on {report['platform']}"],
        ["processor", cpu["name"]],
        [
            "cores",
            f"{cpu['usable_cores']} usable by this process, of {cpu['physical_cores']} physical "
            f"and {cpu['logical_cores']} logical",
        ],
        ["instruction sets", ", ".join(cpu["features"]) or "not reported by this system"],
        ["kernels", f"{kernels['chosen'] or 'none'}: {kernels['why']}"],
        ["memory", f"{human_size(memory['usable'])} usable, {human_size(memory['available'])} free now"],
        [
            "store",
            f"{place['path']}, {place['models']} models, {human_size(place['free'])} free on that disk",
        ],
        *(_software_rows(gpu) if gpu else ()),
        *[[name, text] for backend in devices for name, text in _device_rows(backend, *devices[backend])],
        [
            "packages",
            ", ".join(f"{name} {version or 'MISSING'}" for name, version in report["packages"].items()),
        ],
    ]
    print_table(["what", "found"], rows)


def examine(devices: Mapping[str, tuple[list[Examined], str]]) -> dict[str, Any]:
    """Return everything that doctor shows, as plain values. devices: as `examined` returns them."""
    import psutil

    from hotset.cores import usable_cores
    from hotset.placement.machine import processor_name

    folder = store.models_folder()
    existing = next(p for p in [folder, *folder.parents] if p.exists())
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": {
            "name": processor_name(),
            "physical_cores": psutil.cpu_count(logical=False) or 0,
            "logical_cores": os.cpu_count() or 0,
            "usable_cores": usable_cores(),
            "features": _features(),
        },
        "kernels": _kernels(),
        "memory": {"usable": store.usable_memory(), "available": int(psutil.virtual_memory().available)},
        "store": {
            "path": str(folder),
            "models": len(store.list_models()),
            "free": shutil.disk_usage(existing).free,
        },
        "gpu": _gpu(),
        **{
            backend: {"devices": [one.facts for one in found], "why": why}
            for backend, (found, why) in devices.items()
        },
        "packages": {name: package_version(name) for name in PACKAGES},
    }


def _kernels() -> dict[str, Any]:
    """Return the kernels that the native core chose, the available ones, and the reason in words."""
    try:
        from hotset import _core
    except ImportError as error:
        why = (
            f"the native core is not there ({error}): run pip install --force-reinstall . in the folder of "
            "hotset's sources"
        )
        return {"chosen": None, "available": [], "why": why}
    try:
        chosen, available = _core.isa(), list(_core.available_isas())
    except ValueError as error:
        return {"chosen": None, "available": _core.available_isas(), "why": str(error)}
    if os.environ.get("HOTSET_ISA"):
        why = f"forced by HOTSET_ISA={os.environ['HOTSET_ISA']}"
    elif chosen == "scalar":
        why = (
            "right, and very slow: this processor lacks the instructions that faster kernels need (on "
            "AArch64 dot products, which came with Armv8.2: Cortex-A76, Raspberry Pi 5)"
        )
    elif len(available) == 1:
        why = "the only kernels that this processor runs"
    else:
        others = ", ".join(isa for isa in available if isa != chosen)
        why = f"the widest vectors that this processor has (also there: {others})"
    return {"chosen": chosen, "available": available, "why": why}


def _gpu() -> dict[str, Any] | None:
    """Return the software of the first backend that needs packages; None if none does."""
    found = next((one for one in software() if one is not None), None)
    return None if found is None else asdict(found) | {"advice": in_options(found.advice)}


def _software_rows(gpu: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, found in gpu["drivers"].items():
        yield [name, "found" if found else "not found"]
    for name, version in gpu["packages"].items():
        yield [name, version or "not installed"]
    yield ["GPU", gpu["advice"]]


def _device_rows(backend: str, found: list[Examined], why: str) -> Iterator[tuple[str, str]]:
    if not found:
        yield capabilities(backend).title.removeprefix("a "), why or "the driver has no device"
    for one in found:
        yield one.name, one.line


def package_version(package: str) -> str | None:
    """Return the installed version, or None, as for hotset itself if it runs from a source folder."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo() -> dict[str, str]:
    """Return the first processor of /proc/cpuinfo; {} on other systems than Linux."""
    try:
        block = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _features() -> list[str]:
    """Return the instruction sets that matter to the kernels, under Linux's names."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    relevant = "avx avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_int8 "
    relevant += "asimd asimddp i8mm sve"
    return [name for name in relevant.split() if name in flags]
