"""The second half of `make demo`: one prompt through a sparse model, with all neurons and with few.

The synthetic model (synthetic.py) is written once. Its weights are random and its text is meaningless, but as
in a trained ReLU model some neurons fire for most tokens and most for few, and its speed is realistic.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import hotset
from hotset.formats.quants import GGMLType
from hotset.report.bars import bar
from hotset.sparsity.stats import StatsSummary
from hotset.units import size_of

MODEL = Path(__file__).parents[1] / "build" / "demo" / "sparse.powerinfer.gguf"
PROMPT = "What is photosynthesis?"
MODES = {
    "dense": "every neuron",
    "exact": "every gate, then only neurons that fire",
    "predicted": "only neurons that a predictor selects",
}
# Drawn with a fixed seed, because the most likely tokens of random weights soon repeat themselves.
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 1, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="written if it does not exist")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(
        "\nThe same prompt through a synthetic sparse model. Its weights are random, so ignore the text. The"
    )
    print("neurons that fire are planted and the predictor is ideal: a trained model gains less.")
    if not args.model.exists():
        from synthetic import SHAPES, write_sparse_model

        start = time.perf_counter()
        args.model.parent.mkdir(parents=True, exist_ok=True)
        write_sparse_model(args.model, SHAPES["demo"], GGMLType.Q4_0, kind="bamboo")
        size, seconds = args.model.stat().st_size / 1e6, time.perf_counter() - start
        print(f"Wrote {args.model.name}: {size:.0f} MB in {seconds:.0f} seconds, kept for the next time.")

    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    tokens: dict[str, list[int]] = {}
    stats: dict[str, StatsSummary] = {}
    for _ in range(args.rounds):
        for mode in MODES:
            with hotset.load(args.model, n_ctx=512, sparsity=mode, device="cpu") as model:
                answer = model.generate(PROMPT, max_tokens=args.tokens, **SAMPLING)
            speeds[mode].append(answer.timings.predicted_per_second)
            assert answer.stats is not None, "a ReLU model has statistics"
            tokens[mode], stats[mode] = answer.tokens, answer.stats

    header = ("mode", "tokens/s", "", "neurons that fire", "FFN weights read", "read per token")
    print("\n{:10} {:>8} {:6}  {:17}  {:22}  {:17}".format(*header))
    for mode, what in MODES.items():
        of, speed = stats[mode], statistics.median(speeds[mode])
        ratio = speed / statistics.median(speeds["dense"])
        share = ffn_bytes(of) / ffn_bytes(stats["dense"])
        read = size_of(of.bytes_touched_per_token, of.bytes_total_per_token)
        print(f"{mode:10} {speed:8.1f} {ratio:5.2f}×  {of.active_share:17.1%}", end="  ")
        print(f"{share:4.0%} {bar(share, 17):17}  {read:17}  {what}")
    same = "the same" if tokens["exact"] == tokens["dense"] else "NOT the same"
    pairs = zip(tokens["predicted"], tokens["dense"], strict=True)
    agree = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    n = len(tokens["dense"])
    print(
        f"\nexact drew {same} {n} tokens as dense, predicted {'all' if agree == n else f'the first {agree}'}."
    )


def ffn_bytes(stats: StatsSummary) -> float:
    return sum(layer.bytes for layer in stats.layers)


if __name__ == "__main__":
    main()
