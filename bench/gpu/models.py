"""Whole models on a device and split with the CPU, compared with the CPU engine: are the logits the same?

The CPU's kernels round their inputs to 8 bits, so quantised models differ by that. Their tolerance is from
tests/backends/triton/test_hybrid.py. Float models must agree to a float's rounding with any split.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers.py and synthetic.py of bench/
from peers import print_table, verdict
from synthetic import Kind, Shape, write_sparse_model

import hotset
from hotset.backends.triton import measuring
from hotset.formats.powerinfer import GPUIndex, write_gpu_index
from hotset.formats.quants import GGMLType

SHAPE = Shape(512, 2048, 4, 8, 8)
KINDS: tuple[Kind, ...] = ("llama", "bamboo", "opt", "falcon", "falcon40")
TYPES = {GGMLType.F32: 1e-4, GGMLType.F16: 1e-3, GGMLType.Q4_0: 5e-2}  # relative, root mean square
INDEX = "split.generated.gpuidx"
PLACES: dict[str, dict[str, object]] = {
    "all on the device": {},
    "half of the layers": {"n_gpu_layers": SHAPE.layers // 2},
    "three of ten neurons": {"gpu_index": INDEX},
}
PROMPT = list(range(3, 40))


def agree(device: str, *, small: bool = False) -> bool:
    """Print a table; return whether every model agrees. small: only a split model, for trying the script."""
    kinds = KINDS[1:2] if small else KINDS
    measuring.measure(device)  # now, undisturbed, and stored for the processes
    measuring.synchronisation(device)
    # Triton's compiler takes most of the time: use a process for each kind.
    with ProcessPoolExecutor(len(kinds), mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [(kind, pool.submit(_rows, kind, device, small)) for kind in kinds]
    rows = []
    for kind, done in found:
        error = done.exception()
        rows += [[kind, "", repr(error), "", "", "", verdict(False)]] if error else done.result()
    print_table(["model", "type", "place", "neurons on the device", "error", "allowed", ""], rows)
    return all(row[-1] == verdict(True) for row in rows)


def _rows(kind: Kind, device: str, small: bool) -> list[list[str]]:
    """Return a kind's part of the table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        on_gpu = [rng.random(SHAPE.ff) < 0.3 for _ in range(SHAPE.layers)]
        write_gpu_index(Path(folder) / INDEX, GPUIndex(1 << 30, on_gpu))
        for type, tolerance in list(TYPES.items())[:1] if small else TYPES.items():
            path = Path(folder) / f"{kind}-{type.name}.gguf"
            write_sparse_model(path, SHAPE, type, kind=kind, rank=32, n_vocab=600, n_ctx=256)
            for place in PLACES:
                error, hot = _error(path, device, place)
                cells = [kind, type.name, place, hot, f"{error:.1e}", f"{tolerance:.0e}"]
                rows.append([*cells, verdict(error <= tolerance)])
            path.unlink()
    return rows


def _error(path: Path, device: str, place: str) -> tuple[float, str]:
    """Return a prompt's logits' error relative to the CPU engine, and the share of neurons on the device."""
    settings = {"sparsity": "exact", "n_ctx": 64, "max_batch": 16}
    with hotset.load(path, device="cpu", **settings) as model:
        expected = model.logits(PROMPT)
    options = dict(PLACES[place])
    if "gpu_index" in options:
        options["gpu_index"] = path.with_name(INDEX)
    with hotset.load(path, device=device, **options, **settings) as model:
        found = model.logits(PROMPT)
        placement = model.placement
    hot = "" if placement is None or placement.hot_share is None else f"{placement.hot_share:.0%}"
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected)), hot


if __name__ == "__main__":
    sys.exit(not agree(sys.argv[1], small="--small" in sys.argv))
