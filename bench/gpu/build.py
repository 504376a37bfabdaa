"""Builds llama.cpp for CUDA and for Vulkan, and PowerInfer for CUDA; CMake continues an interrupted build."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from ledger import Ledger, run_within
from peers import print_table


@dataclass(frozen=True)
class Build:
    """A build of a peer. folder: below its source. needs: programs that it cannot do without."""

    source: str
    folder: str
    target: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]


_CUDA = ("-DCMAKE_CUDA_ARCHITECTURES=native",)
_LLAMA = ("-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF")
BUILDS = {
    "llama.cpp Vulkan": Build(
        "llama.cpp", "build-vulkan", "llama-bench", ("-DGGML_VULKAN=ON", *_LLAMA), ("cmake", "glslc")
    ),
    "llama.cpp CUDA": Build(
        "llama.cpp", "build-cuda", "llama-bench", ("-DGGML_CUDA=ON", *_CUDA, *_LLAMA), ("cmake", "nvcc")
    ),
    "PowerInfer": Build("PowerInfer", "build-cuda", "main", ("-DLLAMA_CUBLAS=ON", *_CUDA), ("cmake", "nvcc")),
}


def run(ledger: Ledger, sources: dict[str, Path]) -> None:
    """Build the given sources, one after the other, within the ledger's time."""
    rows = []
    for name, build in BUILDS.items():
        if build.source not in sources:
            continue
        if missing := [program for program in build.needs if which(program) is None]:
            rows.append([name, f"left out: {missing[0]} is not installed"])
            continue
        source = sources[build.source]
        found = ledger.unit(name, lambda build=build, source=source: _build(ledger, build, source))  # type: ignore[misc]
        if found is not None:
            rows.append([name, found.get("error", found.get("program", ""))])
    print_table(["peer", "program"], rows)
    print(ledger.closing())


def program_of(source: Path, name: str) -> Path:
    """Return the path of a build's program."""
    return source / BUILDS[name].folder / "bin" / BUILDS[name].target


def _build(ledger: Ledger, build: Build, source: Path) -> dict[str, Any]:
    folder = source / build.folder
    configure = ["cmake", "-S", str(source), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", *build.flags]
    make = ["cmake", "--build", str(folder), "--target", build.target, "-j", str(os.cpu_count())]
    is_configured = any((folder / name).exists() for name in ("Makefile", "build.ninja"))
    for command in [make] if is_configured else [configure, make]:
        try:
            done = run_within(
                command, ledger.timeout(1e9), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except subprocess.TimeoutExpired:
            return {"error": "not finished: run the same command again to go on", "failed": True}
        if done.returncode:
            return {"error": (done.stdout.strip().splitlines() or ["it failed"])[-1], "failed": True}
    return {"program": str(folder / "bin" / build.target)}
