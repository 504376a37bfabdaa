"""Builds llama.cpp and PowerInfer for CUDA from given sources; CMake continues an interrupted build."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from ledger import Ledger, run_within
from peers import print_table

FLAGS = {
    "llama.cpp": ["-DGGML_CUDA=ON", "-DLLAMA_CURL=OFF"],
    "PowerInfer": ["-DLLAMA_CUBLAS=ON"],
}
TARGETS = {"llama.cpp": "llama-bench", "PowerInfer": "main"}


def run(ledger: Ledger, sources: dict[str, Path]) -> None:
    """Build the given sources, one after the other, within the ledger's time."""
    rows = []
    for name, source in sources.items():
        found = ledger.unit(name, lambda name=name, source=source: _build(ledger, name, source))  # type: ignore[misc]
        if found is not None:
            rows.append([name, found.get("error", found.get("program", ""))])
    print_table(["peer", "program"], rows)
    print(ledger.closing())


def bin_folder(source: Path) -> Path:
    return source / "build" / "bin"


def _build(ledger: Ledger, name: str, source: Path) -> dict[str, Any]:
    folder = source / "build"
    common = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CUDA_ARCHITECTURES=native"]
    configure = ["cmake", "-S", str(source), "-B", str(folder), *common, *FLAGS[name]]
    make = ["cmake", "--build", str(folder), "--target", TARGETS[name], "-j", str(os.cpu_count())]
    for command in ([] if (folder / "CMakeCache.txt").exists() else [configure]), make:
        if not command:
            continue
        try:
            done = run_within(
                command, ledger.timeout(1e9), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except FileNotFoundError:
            return {"error": "CMake is not installed", "failed": True}
        except subprocess.TimeoutExpired:
            return {"error": "not finished: run the same command again to go on", "failed": True}
        if done.returncode:
            return {"error": (done.stdout.strip().splitlines() or ["it failed"])[-1], "failed": True}
    return {"program": str(bin_folder(source) / TARGETS[name])}
