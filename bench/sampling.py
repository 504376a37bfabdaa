"""What default sampling costs: its speed relative to greedy, at a large vocabulary and a short step.

usage: python bench/sampling.py [--vocab 152000]

Sampling has a cost per token that grows with the vocabulary: a small model with a large vocabulary is its
worst case. The model is synthetic: at 40 GB/s its step takes about 3 ms, most of it for the output matrix.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import peers
from synthetic import Shape, write_model

import hotset
from hotset.formats.quants import GGMLType

TARGET = 0.9
SHAPE = Shape(d=1024, ff=2816, layers=4, heads=16, kv_heads=4)
PROMPT = [1, *range(1000, 1031)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=152_000, help="size of the vocabulary (152000)")
    parser.add_argument("--tokens", type=int, default=128, help="generated at a time (128)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large-vocabulary.gguf"
        write_model(path, SHAPE, GGMLType.Q4_0, args.vocab)
        peers.wait_until_quiet(args.force)
        with hotset.load(path, n_threads=args.threads, backend="cpu") as model:

            def speed(**params: Any) -> float:
                answer = model.generate(PROMPT, max_tokens=args.tokens, ignore_eos=True, **params)
                return answer.timings.predicted_per_second

            speed()
            pairs, disturbed = peers.undisturbed(
                args.rounds, lambda i: (speed(temperature=0), speed(seed=i)), "sampling"
            )
    greedy, sampled = (statistics.median(column) for column in zip(*pairs, strict=True))
    kept = statistics.median(b / a for a, b in pairs)
    print(
        f"\nvocabulary of {args.vocab}, {args.threads} threads, {args.rounds} rounds, {disturbed} disturbed\n"
    )
    peers.print_table(
        ["greedy t/s", "ms per step", "sampled t/s", "kept", f"target {TARGET:.0%}"],
        [
            [
                f"{greedy:.1f}",
                f"{1000 / greedy:.2f}",
                f"{sampled:.1f}",
                f"{kept:.1%}",
                peers.verdict(kept >= TARGET),
            ]
        ],
    )
    print()
    peers.print_json("sampling", machine=peers.machine(), vocab=args.vocab, pairs=pairs, kept=kept)


if __name__ == "__main__":
    main()
