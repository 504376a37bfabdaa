"""Decode speed of one synthetic model per tensor type, compared with llama.cpp: no type may be slow.

usage: python bench/quant_types.py --llama BUILD/bin [--types q4_k,iq4_xs] [--isa avx2]

The models have the widths of a 1B model and as many layers as make files of about the same size, which is
larger than most caches. Each is made in a temporary folder, measured and deleted.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

import peers
from peers import Comparison, Job
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
    rows, results = [], {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for type in types:
            path = Path(folder) / f"{type.name}.gguf"
            write_model(path, shape_of_size(type, args.size * 1e6), type, N_VOCAB)
            jobs = [Job(path, 0, 32, n_threads=args.threads)]
            jobs += [Job(path, args.prompt, n_threads=args.threads)] if args.prompt else []
            for job in jobs:
                name = f"{type.name} {job.kind}"
                found = peers.compare([(ours, path), (llama, path)], job, args.rounds)
                rows.append(cells(name, found, llama.name, TARGET if job.n_gen else None))
                results[name] = asdict(found)
                print(" ".join(rows[-1][:4]), flush=True)
            path.unlink()
    print(f"\none model per type, {args.size:.0f} MB each, {args.rounds} rounds\n")
    headers = ["test", "hotset t/s", "llama.cpp t/s", "ratio", "GB/s read", "hotset of it", ""]
    peers.print_table(headers, rows)
    print()
    peers.print_json("quant_types", isa=args.isa, machine=peers.machine(), results=results)


def cells(name: str, found: Comparison, peer: str, target: float | None) -> list[str]:
    if peer in found.failed:
        return [name, f"{statistics.median(found.speeds[found.ours]):.2f}", "failed", "", "", "", ""]
    ratios = found.ratios(peer)
    return [
        name,
        *(f"{statistics.median(found.speeds[program]):.2f}" for program in (found.ours, peer)),
        peers.ratio(ratios),
        f"{statistics.median(found.bandwidth) / 1e9:.1f}",
        peers.percent(found.share()),
        "" if target is None else peers.verdict(statistics.median(ratios) >= target),
    ]


if __name__ == "__main__":
    main()
