"""The cost of sampling: the speed of default sampling relative to greedy, and single draws of each sampler.

usage: python bench/sampling.py [--vocab 152064] [--only-draws]

Sampling has a cost per token that grows with the vocabulary: a small model with a large vocabulary is its
worst case. The model is synthetic: at 40 GB/s its step takes about 3 ms, most of it for the output matrix.

Draws are timed on one thread, in its processor time, for normally distributed logits. A deviation of 0.2 is
nearly flat. The limit is 1 ms. A sampler of the whole vocabulary finds the bucket of each logit, weighs it
and adds the weight to its bucket, once for each temperature: 1, and the draw's. The
additions go to scattered places, so no vector instruction does them. They and one scan of all buckets for
each boundary limit the speed, with a series of six terms for each weight.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import peers
from synthetic import Shape, write_model

import hotset
from hotset.engine.sampler import Sampler, SamplingParams, draw_tokens
from hotset.formats.quants import GGMLType

TARGET = 0.9
DRAW_MS = 1.0  # the limit per draw
DEVIATIONS = (0.2, 1.0, 3.0, 6.0)  # of logits
_ALL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_XTC: dict[str, Any] = _ALL | {"xtc_probability": 1.0, "xtc_threshold": 0.01}
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "default": {},
    "temperature": _ALL,
    "top-p 0.9": _ALL | {"top_p": 0.9},
    "top-p 0.999999": _ALL | {"top_p": 0.999999},
    "min-p 1e-6": _ALL | {"min_p": 1e-6},
    "typical 0.9": _ALL | {"typical_p": 0.9},
    "top-n-sigma 2": _ALL | {"top_n_sigma": 2.0},
    "dynamic temperature": _ALL | {"dynatemp_range": 0.5},
    "XTC": _XTC,
    "XTC, DRY, dynamic temperature": _XTC | {"dry_multiplier": 0.8, "dynatemp_range": 0.5},
    "typical, top-p, XTC, dynamic temperature": _XTC
    | {"typical_p": 0.95, "top_p": 0.99, "dynatemp_range": 0.5},
    "temperature, logprobs 20": _ALL | {"logprobs": 20},
    "mirostat 1, tau 16": {"mirostat": 1, "mirostat_tau": 16.0},
    "mirostat 2, tau 16": {"mirostat": 2, "mirostat_tau": 16.0},
}
SHAPE = Shape(d=1024, ff=2816, layers=4, heads=16, kv_heads=4)
PROMPT = [1, *range(1000, 1031)]


def draw_ms(params: dict[str, Any], deviation: float, n_vocab: int, n_rows: int = 12) -> float:
    """Return the median processor time of a draw in milliseconds, after a first round that warms up."""
    rng = np.random.default_rng(5)
    rows = [(rng.standard_normal(n_vocab) * deviation).astype(np.float32) for _ in range(n_rows)]
    sampler = Sampler(SamplingParams(seed=9, **params), n_vocab, [1, 2, 1, 2])
    seconds = []
    for row in rows * 3:
        largest = row.reshape(-1, 64).max(axis=1) if n_vocab % 64 == 0 else None
        job = sampler.job(row, largest)
        begun = time.thread_time()
        [(token, _)] = draw_tokens([job], None)
        seconds.append(time.thread_time() - begun)
        sampler.accept(sampler.take(token))
    return 1000 * statistics.median(seconds[n_rows:])


def measure_draws(n_vocab: int) -> dict[str, list[float]]:
    """Measure and print the draws of each sampler, by the deviation of the logits."""
    found = {name: [draw_ms(params, each, n_vocab) for each in DEVIATIONS] for name, params in DRAWS.items()}
    peers.print_table(
        ["draw, ms", *(f"deviation {each:g}" for each in DEVIATIONS), f"limit {DRAW_MS:g} ms"],
        [
            [name, *(f"{each:.2f}" for each in times), peers.verdict(max(times) <= DRAW_MS)]
            for name, times in found.items()
        ],
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=152_064, help="size of the vocabulary (152064)")
    parser.add_argument("--tokens", type=int, default=128, help="generated at a time (128)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only-draws", action="store_true", help="measure no model")
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()
    peers.wait_until_quiet(args.force)
    print(f"One thread, a vocabulary of {args.vocab}:\n")
    draws = measure_draws(args.vocab)
    if args.only_draws:
        print()
        peers.print_json("draws", machine=peers.machine(), vocab=args.vocab, draws=draws)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large-vocabulary.gguf"
        write_model(path, SHAPE, GGMLType.Q4_0, args.vocab)
        peers.wait_until_quiet(args.force)
        with hotset.load(path, n_threads=args.threads, device="cpu") as model:

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
    peers.print_json(
        "sampling", machine=peers.machine(), vocab=args.vocab, draws=draws, pairs=pairs, kept=kept
    )


if __name__ == "__main__":
    main()
