"""Decode speed of one synthetic model per tensor type, compared with llama.cpp: no type may be slow.

usage: python bench/quant_types.py --llama BUILD/bin [--types q4_k,iq4_xs] [--isa avx2]

The models have the widths of a 1B model and as many layers as make files of about the same size, which is
larger than most caches. Each is made in a temporary folder, measured and deleted.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from pathlib import Path

import peers
from peers import Job, Row
from synthetic import LLAMA_FTYPES, SHAPES, Shape, write_model

from hotset.formats.quants import GGMLType, row_bytes

TARGET = 0.7
N_VOCAB = 8000


def shape_of_size(type: GGMLType, n_bytes: float) -> Shape:
    """Return the 1B shape with enough layers for a file of about n_bytes."""
    one = dataclasses.replace(SHAPES["1b"], layers=1)
    sizes = {name: row_bytes(type, shape[0]) * math.prod(shape[1:]) for name, shape in one.matrices(N_VOCAB)}
    layer = sum(size for name, size in sizes.items() if name.startswith("blk."))
    layers = round((n_bytes - (sum(sizes.values()) - layer)) / layer)
    return dataclasses.replace(one, layers=max(1, layers))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.common_arguments(parser, rounds=3)
    parser.add_argument(
        "--types", default=",".join(LLAMA_FTYPES).lower(), help="comma-separated; default: all"
    )
    parser.add_argument("--size", type=float, default=300, help="of each file, in MB (300)")
    parser.add_argument("--prompt", type=int, default=0, help="also measure prompts of this size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", help="force hotset's kernels: avx2, avx512, scalar, ...")
    parser.add_argument("--folder", type=Path, help="where the models are made (the temporary folder)")
    args = parser.parse_args()
    types = [GGMLType[name.upper()] for name in args.types.split(",")]
    ours, llama = peers.hotset(args.isa), peers.llama_bench(args.llama)

    peers.wait_until_quiet(args.force)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for type in types:
            path = Path(folder) / f"{type.name}.gguf"
            write_model(path, shape_of_size(type, args.size * 1e6), type, N_VOCAB)
            job = Job(path, args.prompt, 32, n_threads=args.threads)
            measured = peers.compare(ours, llama, job, args.rounds)
            path.unlink()
            for row, (name, kind) in zip(measured, job.tests, strict=True):
                row.test = f"{type.name} {name}"
                row.target = TARGET if kind == "tg" else None
                print(f"{row.test}: {row.ours:.1f} t/s, {row.ratio:.2f}×", flush=True)
            rows += measured
    print(f"\none model per type, {args.size:.0f} MB each, {args.rounds} rounds\n")
    peers.print_table(peers.HEADERS, [peers.row_cells(row) for row in rows])
    print()
    peers.print_json("quant_types", isa=args.isa, machine=peers.machine(), results=peers.as_dicts(rows))


if __name__ == "__main__":
    main()
