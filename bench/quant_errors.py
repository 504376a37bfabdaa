"""Errors of quantised matrices, weighted by an importance matrix: hotset's encoders compared with GGML's.

usage: python bench/quant_errors.py MODEL.gguf IMATRIX --ggml libggml-base.so [--types q4_k,iq3_s] [--rows 32]

Both quantise some rows of each matrix that is in both files, with the same importance. The table has ratios
of the root mean square of weighted errors, hotset's over GGML's: below 1, hotset's is smaller. The weights of
a quantised model are on a grid, which makes both look better: use a model in BF16, F16 or Q8_0.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from pathlib import Path

import numpy as np

from hotset.formats.encode import FITTED, WRITABLE, Importance, recode
from hotset.formats.gguf import open_gguf
from hotset.formats.imatrix import ImportanceMatrix
from hotset.formats.quants import TYPES, GGMLType, dequantize, row_bytes


def encoded_by_ggml(library: ctypes.CDLL, x: np.ndarray, w: np.ndarray, type: GGMLType) -> np.ndarray:
    """Encode whole rows with ggml_quantize_chunk."""
    out = np.empty((len(x), row_bytes(type, x.shape[1])), np.uint8)
    at = ctypes.c_int64
    library.ggml_quantize_chunk(
        int(type), x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), at(0), at(len(x)),
        at(x.shape[1]), w.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    return out


def error_of(stored: np.ndarray, x: np.ndarray, w: np.ndarray, type: GGMLType) -> float:
    found = dequantize(stored.reshape(-1), type, x.shape[::-1])
    return float(np.sqrt((w * (found - x) ** 2).sum() / (w * x**2).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("imatrix", type=Path)
    parser.add_argument("--ggml", type=Path, required=True, help="libggml-base of a llama.cpp build")
    parser.add_argument("--types", default=",".join(t.name.lower() for t in WRITABLE if t in FITTED))
    parser.add_argument("--rows", type=int, default=32, help="of each matrix")
    options = parser.parse_args()
    library = ctypes.CDLL(str(options.ggml))
    importance = ImportanceMatrix.open(options.imatrix)
    results = {}
    for type in (GGMLType[name.upper()] for name in options.types.split(",")):
        ratios = []
        with open_gguf(options.model) as file:
            for info in file.tensors.values():
                weights = importance.weights(info.name, info.shape)
                width = info.shape[0] // TYPES[type].block_size * TYPES[type].block_size
                if weights is None or not width or len(info.shape) != 2:
                    continue
                rows = file.data(info.name)[: options.rows * row_bytes(info.type, info.shape[0])]
                n_rows = rows.size // row_bytes(info.type, info.shape[0])
                x = np.ascontiguousarray(dequantize(rows, info.type, (info.shape[0], n_rows))[:, :width])
                w = np.ascontiguousarray(weights[0, :width])
                mine = recode(
                    x.view(np.uint8).reshape(-1), GGMLType.F32, width, type, None, Importance(w[None], n_rows)
                )
                theirs = encoded_by_ggml(library, x, w, type)
                ratios.append(error_of(mine, x, w, type) / error_of(theirs, x, w, type))
        results[type.name] = statistics.median(ratios)
        print(
            f"{type.name:8} {results[type.name]:.3f} (worst {max(ratios):.3f} of {len(ratios)})", flush=True
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
