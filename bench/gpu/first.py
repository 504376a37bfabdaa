"""The first calls on a device, in one command: every stage in turn, each in a process with a time limit.

usage: python bench/gpu/first.py --out RESULTS --models FOLDER [--copy FOLDER] [--llama-source llama.cpp]

It first checks that the machine has all required parts, builds hotset if it is not installed, and begins with
Vulkan. All stages take at most 1,500 seconds, and a stage at most 570, so that a device that is lent for ten
minutes at a time is enough: the same command continues with the missing stages. `--all` adds the stages of
Triton.

The results of a stage are on the disk before the next one begins: its units as JSON (ledger.py), its output,
and its exit. So if a stage hangs, or the machine is taken away, only the running unit is lost. After each
stage --copy gets all of --out as one archive, for machines that return only a few files. To continue on
another machine, unpack it there.

This script itself needs only NumPy and psutil.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers.py of bench/
from ledger import PATIENCE, run_within, store
from peers import print_table

ROOT = Path(__file__).parents[2]
STAGES = Path(__file__).with_name("stages.py")
SPARE = 20.0  # seconds between a stage's own limit and its end by force
MOST = 570.0  # seconds of a stage
IN_ALL = 1500.0
MODEL_BYTES = 12 << 30  # of all synthetic models


@dataclass(frozen=True)
class Step:
    """A call of stages.py: its arguments, and its limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    seconds: float


ORDER = (
    Step("install", (), 160),
    Step("vulkan-right", ("vulkan", "--part", "parity"), 90),
    Step("vulkan-costs", ("vulkan", "--part", "costs"), 60),
    Step("vulkan-speed", ("vulkan", "--part", "speed"), 260),
    Step("build", ("build",), 480),
    Step("vulkan-peers", ("vulkan", "--part", "peers"), 300),
    Step("vulkan-gate", ("vulkan", "--part", "gate"), 60),
    Step("vulkan-tests", ("vulkan", "--part", "tests"), 90),
)
TRITON = (
    Step("kernels-right", ("check", "--part", "kernels"), 300),
    Step("steps", ("steps",), 300),
    Step("kernels", ("kernels",), 420),
    Step("budgets", ("budgets", "--model", "7b-q4_0"), 300),
    Step("models-right", ("check", "--part", "models"), 300),
    Step("speed", ("speed", "--model", "7b-q4_0"), 420),
    Step("hybrid", ("hybrid", "--model", "7b-q4_0"), 500),
    Step("memcheck", ("check", "--part", "memcheck"), 500),
    Step("racecheck", ("check", "--part", "racecheck"), 500),
)
WITHOUT_SMALL = {"install", "build", "kernels-right", "memcheck", "racecheck"}  # the others have small sizes


# ---- required parts of the machine ----


@dataclass(frozen=True)
class Need:
    """A part that stages need. without: the stages left out if it is missing; empty: it is required."""

    name: str
    found: bool
    carry: str
    without: str = ""


def needs(models: Path, llama: Path | None, wheels: Path | None) -> Iterator[Need]:
    """Yield the needs of the stages on this machine, which may reach no network."""
    there = [path.name.split("-")[0].lower() for path in wheels.glob("*.whl")] if wheels else []

    def modules(*names: str) -> bool:
        return all(importlib.util.find_spec(name) or name in there for name in names)

    packages = "numpy", "tokenizers", "sentencepiece", "jinja2", "typer", "rich", "psutil", "scipy", "yaml"
    packages = *packages, "safetensors", "huggingface_hub", "filelock"
    missing = [name for name in packages if not modules(name)]
    yield Need("Python packages", not missing, f"wheels of {', '.join(missing)} in --wheels")
    if importlib.util.find_spec("hotset") is None:
        tools = modules("nanobind", "scikit_build_core") and shutil.which("cmake") and shutil.which("ninja")
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        carried = "wheels of nanobind, scikit-build-core, cmake and ninja, or a built wheel of hotset"
        yield Need("build of hotset", bool(tools and compiler) or modules("hotset"), carried)
    loader = ctypes.util.find_library("vulkan")
    yield Need("Vulkan loader", loader is not None, "Debian's package libvulkan1, unpacked by dpkg -x")
    folders = "/usr/share", "/etc", "/usr/local/share", "/usr/local/nvidia/share"
    drivers = [path for folder in folders for path in Path(folder, "vulkan/icd.d").glob("*.json")]
    named = any(name in os.environ for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"))
    yield Need("Vulkan driver", named or bool(drivers), "VK_DRIVER_FILES names the driver's JSON file")
    models.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(models).free + sum(path.stat().st_size for path in models.glob("*.gguf"))
    yield Need("12 GiB in --models", room >= MODEL_BYTES, "another --models", "the 7B models")
    is_source = llama is not None and (llama / "CMakeLists.txt").exists()
    source = "llama.cpp's source without .git, models and docs, in --llama-source"
    yield Need("llama.cpp's source", is_source, source, "both builds of llama.cpp")
    yield Need("nvcc", shutil.which("nvcc") is not None, "the CUDA toolkit", "llama.cpp for CUDA")
    glslc = (
        "glslc, vulkan/vulkan.hpp and spirv/unified1/spirv.hpp (Debian: glslc, libvulkan-dev, spirv-headers)"
    )
    yield Need("glslc", shutil.which("glslc") is not None, glslc, "llama.cpp for Vulkan")


def check_needs(found: Sequence[Need]) -> bool:
    """Print a table of the needs; return whether the stages can run."""
    rows = [[one.name, "found" if one.found else f"missing: carry {one.carry}", one.without] for one in found]
    print_table(["need", "", "left out without it"], rows)
    return all(one.found or one.without for one in found)


# ---- the stages ----


def run(
    out: Path,
    options: Sequence[str],
    seconds: float,
    *,
    small: bool = False,
    steps: Sequence[Step] = ORDER,
    site: Path | None = None,
    wheels: Path | None = None,
    copy: Path | None = None,
) -> int:
    """Run unfinished stages within `seconds`; print a table of all. Returns how many remain unfinished.

    site: the folder into which hotset is installed. wheels, copy: as in the usage.
    """
    folder, end = out / "first", time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    left = 0
    for step in steps:
        limit = min(min(step.seconds, MOST) * PATIENCE, end - time.monotonic())
        if not _is_done(folder, step) and limit > 2 * SPARE:
            command = _command(step, [*options, "--out", str(out)], limit - SPARE, small)
            if not step.arguments:
                command = _install(site or out / "site", wheels)
            _run(folder, step, command, limit, site or out / "site")
            if copy is not None:
                _archive(out, copy)
        left += not _is_done(folder, step)
    print()
    print_table(["stage", "ended", "seconds", "last line"], [_cells(folder, step) for step in steps])
    print(f"{left} of {len(steps)} stages are left: run the same command again." if left else "Complete.")
    return left


def _command(step: Step, options: Sequence[str], seconds: float, small: bool) -> list[str]:
    arguments = list(step.arguments)
    if small and step.name not in WITHOUT_SMALL:
        keeps_part = arguments[:1] in (["check"], ["vulkan"])
        arguments = [*(arguments if keeps_part else arguments[:1]), "--small"]
    return [sys.executable, "-u", str(STAGES), *arguments, *options, "--seconds", str(seconds)]


def _install(site: Path, wheels: Path | None) -> list[str]:
    """Return a command that installs this checkout, without a network, unless hotset can be imported."""
    pip = f"'{sys.executable}' -m pip install -q --no-index --no-deps --no-build-isolation --target '{site}'"
    carried = sorted(wheels.glob("*.whl")) if wheels else []
    files = " ".join(f"'{path}'" for path in carried)
    own = "" if any(path.name.startswith("hotset-") for path in carried) else f"'{ROOT}'"
    try_it = f"'{sys.executable}' -c 'import hotset._core'"
    built = f"{pip} --upgrade {files} {own} && {try_it}"
    return ["sh", "-c", f"{try_it} 2>/dev/null || {{ {built}; }} && echo Complete."]


def _run(folder: Path, step: Step, command: Sequence[str], limit: float, site: Path) -> None:
    said, start = folder / f"{step.name}.txt", time.monotonic()
    print(f"\n== {step.name}: at most {limit:.0f} s; {said}", flush=True)
    paths = [*([str(site)] if site.exists() or not step.arguments else []), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ended: int | None = None
    with said.open("w") as file:
        try:
            pipes = {"stdout": file, "stderr": subprocess.STDOUT}
            ended = run_within(command, limit, env=environment, **pipes).returncode
        except subprocess.TimeoutExpired:
            file.write(f"\nended after {limit:.0f} s\n")
    print(said.read_text(errors="replace"), flush=True)
    store(folder / f"{step.name}.json", {"ended": ended, "seconds": time.monotonic() - start})


def _archive(out: Path, copy: Path) -> None:
    """Write the JSON and text files of a folder to an archive in `copy`."""
    copy.mkdir(parents=True, exist_ok=True)
    partial = copy / "results.partial"
    with tarfile.open(partial, "w:gz") as archive:
        for path in sorted(out.glob("*/*")):
            if path.suffix in (".json", ".txt"):
                archive.add(path, path.relative_to(out))
    partial.replace(copy / "results.tar.gz")


def _last(folder: Path, step: Step) -> str:
    said = folder / f"{step.name}.txt"
    lines = said.read_text(errors="replace").split("\n") if said.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _is_done(folder: Path, step: Step) -> bool:
    path = folder / f"{step.name}.json"
    if not path.exists() or json.loads(path.read_text())["ended"] != 0:
        return False
    return step.arguments[:1] == ("check",) or _last(folder, step).startswith("Complete")


def _cells(folder: Path, step: Step) -> list[str]:
    path = folder / f"{step.name}.json"
    if not path.exists():
        return [step.name, "not begun", "", ""]
    found = json.loads(path.read_text())
    ended = "done" if _is_done(folder, step) else "time" if found["ended"] is None else str(found["ended"])
    return [step.name, ended, f"{found['seconds']:.0f}", _last(folder, step)[:90]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of results")
    parser.add_argument("--models", type=Path, default=Path("gpu-models"), help="folder for synthetic models")
    parser.add_argument("--seconds", type=float, default=MOST, help="of this call (570)")
    parser.add_argument("--copy", type=Path, help="folder for an archive of the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install with hotset")
    parser.add_argument("--site", type=Path, help="folder into which hotset is installed (OUT/site)")
    parser.add_argument("--all", action="store_true", help="the stages of Triton too, after the others")
    parser.add_argument("--small", action="store_true", help="sizes for trying the scripts out")
    parser.add_argument("--device", help="of Triton (cuda:0)")
    parser.add_argument("--vulkan", help="of Vulkan (vulkan)")
    parser.add_argument("--threads", help="of the CPU, for all programs")
    for name in ("--llama", "--powerinfer", "--llama-source", "--powerinfer-source"):
        parser.add_argument(name, type=Path, help="as in stages.py")
    parser.add_argument("--real", type=Path, action="append", default=[], help="as in stages.py; repeatable")
    args = parser.parse_args()
    if not check_needs(list(needs(args.models, args.llama_source, args.wheels))):
        sys.exit("nothing was measured: carry what is missing")
    options = ["--models", str(args.models)]
    for name in ("device", "vulkan", "threads", "llama", "powerinfer", "llama_source", "powerinfer_source"):
        if (value := getattr(args, name)) is not None:
            options += [f"--{name.replace('_', '-')}", str(value)]
    options += [part for path in args.real for part in ("--real", str(path))]
    steps = (*ORDER, *(TRITON if args.all else ()))
    left = run(
        args.out.resolve(), options, args.seconds, small=args.small, steps=steps, site=args.site,
        wheels=args.wheels, copy=args.copy,
    )  # fmt: skip
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
