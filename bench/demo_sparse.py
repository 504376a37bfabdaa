"""The second half of `make demo`: a real model against its sparse version, then a synthetic sparse model.

Both parts answer one prompt several times, in turn. The synthetic model (synthetic.py) is written once. Its
weights are random and its text is meaningless, but as in a trained ReLU model some neurons fire for most
tokens and most for few, and its speed is realistic.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import hotset
from hotset.cli.answer import bytes_touched
from hotset.formats.quants import GGMLType
from hotset.report.bars import bar
from hotset.sparsity.stats import StatsSummary
from hotset.storage import resolve
from hotset.units import human_size, size_of

FOLDER = Path(__file__).parents[1]
DEMO = FOLDER / "build" / "demo"
TEXT = FOLDER / "bench" / "texts" / "lighthouse.txt"
PROMPT = "What is photosynthesis?"
MODES = {
    "dense": "every neuron",
    "exact": "every gate, then only neurons that fire",
    "predicted": "only neurons that a predictor selects",
}
# Drawn with a fixed seed, because the most likely tokens of random weights soon repeat themselves.
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 1, "ignore_eos": True}


@dataclass
class Measured:
    """Results of a model: tokens per second by round, bytes per token, perplexity, share of idle neurons."""

    speeds: list[float] = field(default_factory=list)
    read: float = 0.0
    ppl: float = 0.0
    idle: float = 0.0


def compare_real(original: str, sparse: Path, n_tokens: int, n_rounds: int) -> None:
    """Print a table of a model and its sparse version."""
    measured = {name: Measured() for name in ("original", "sparse")}
    files = {"original": resolve(original), "sparse": sparse}
    for number in range(n_rounds):
        for name, found in measured.items():
            with hotset.load(files[name], n_ctx=512, device="cpu") as model:
                answer = model.generate(PROMPT, temperature=0, max_tokens=n_tokens, ignore_eos=True)
                found.speeds.append(answer.timings.predicted_per_second)
                found.read = bytes_touched(model, answer.timings, answer.stats)
                if not number:
                    result = model.perplexity(TEXT.read_text(), n_ctx=128)
                    found.ppl, found.idle = result.ppl, 1 - (result.active_share or 1)
    first = measured["original"]
    print(f"\n{files['original'].name} and its sparse version, in turn, {n_rounds} rounds:\n")
    print(f"{'':10} {'tokens/s':>8} {'':6}  {'idle neurons':>12}  {'read per token':>14}  {'perplexity':>10}")
    for name, found in measured.items():
        ratio = statistics.median(x / y for x, y in zip(found.speeds, first.speeds, strict=True))
        print(f"{name:10} {statistics.median(found.speeds):8.1f} {ratio:5.2f}×  {found.idle:12.0%}", end="  ")
        print(f"{human_size(found.read):>14}  {found.ppl:10.2f}")
    print(f"\nThe perplexity is of one short text ({TEXT.relative_to(FOLDER)}), so it is a rough figure.")
    print("Larger gains need a model in which fewer neurons fire: 5 to 10% in published ReLU models.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--original", default="smollm2-135m", help="the real model")
    parser.add_argument("--sparse", type=Path, default=DEMO / "smollm2-135m-relu.gguf", help="made from it")
    parser.add_argument(
        "--synthetic", type=Path, default=DEMO / "sparse.powerinfer.gguf", help="written if it does not exist"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    compare_real(args.original, args.sparse, args.tokens, args.rounds)
    compare_synthetic(args.synthetic, args.tokens, args.rounds)


def compare_synthetic(path: Path, n_tokens: int, n_rounds: int) -> None:
    """Print a table of the modes of a synthetic model."""
    print("\nA synthetic sparse model. Its weights are random, so ignore the text. 10% of the neurons fire")
    print("by construction, and the predictor is ideal: a trained model gains less.")
    if not path.exists():
        from synthetic import SHAPES, write_sparse_model

        start = time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sparse_model(path, SHAPES["demo"], GGMLType.Q4_0, kind="bamboo")
        size, seconds = path.stat().st_size / 1e6, time.perf_counter() - start
        print(f"Wrote {path.name}: {size:.0f} MB in {seconds:.0f} seconds, kept for the next time.")

    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    tokens: dict[str, list[int]] = {}
    stats: dict[str, StatsSummary] = {}
    for _ in range(n_rounds):
        for mode in MODES:
            with hotset.load(path, n_ctx=512, sparsity=mode, device="cpu") as model:
                answer = model.generate(PROMPT, max_tokens=n_tokens, **SAMPLING)
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
