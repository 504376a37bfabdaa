"""The sparse engine compared with llama.cpp on the dense file and PowerInfer on the sparse one, in turn.

usage: python bench/compare_sparse.py --llama BUILD/bin --powerinfer BUILD/bin/main \\
           --sparse bamboo7.powerinfer.gguf --dense bamboo7.gguf --drelu

Both files have the same weights (bench/synthetic.py). Every round runs each program on the same test within
seconds of the others and gives ratios; the table has medians. A round also measures the rates at which the
file streams and at which a random tenth of rows is gathered. With the bytes that a token of each mode reads,
they give the roofline of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import peers
from anatomy import Anatomy, anatomy
from peers import Job, Program
from sparse_ffn import gathering_rate

import hotset
from hotset.formats.gguf import open_gguf
from hotset.text.tokenizer import load_tokenizer

ROOFLINE_TARGET = 0.85
PROMPT_TARGET = 2.5  # × PowerInfer
# Smallest ratios of decode to llama.cpp and PowerInfer, by mode, with a ReLU gate and with dReLU.
TARGETS = {
    "llama": {"predicted": (2.0, 2.0), "exact": (1.7, None)},
    "bamboo": {"predicted": (2.5, 2.5), "exact": (1.8, None)},
}
PROMPT_EVAL = re.compile(r"prompt eval time =\s*([\d.]+) ms /\s*(\d+) tokens")
EVAL = re.compile(r"(?<!prompt )eval time =\s*([\d.]+) ms /\s*(\d+) runs")


@dataclass(frozen=True)
class PowerInfer:
    """PowerInfer's `main`, which benchmarks itself. It samples, so that tokens vary as in other programs."""

    program: Path
    prompt: str
    name: str = "PowerInfer"

    def bench(self, job: Job) -> dict[str, dict[str, Any]]:
        """Do the same as Program.bench; `main` runs a prompt and then decodes, once per repetition."""
        samples: dict[str, list[float]] = {"pp": [], "tg": []}
        for seed in range(job.repetitions):
            argv = [str(self.program), "-m", str(job.model), "-t", str(job.n_threads), "-s", str(seed + 1)]
            argv += ["-n", str(job.n_gen), "-c", str(job.n_prompt + job.n_gen + 256), "--ignore-eos"]
            argv += ["--temp", "1.0", "-b", "512", "-p", self.prompt]
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
            prompt, run = PROMPT_EVAL.search(done.stderr), EVAL.search(done.stderr)
            if done.returncode or prompt is None or run is None:
                sys.exit(f"{' '.join(argv[:-1])} failed:\n{done.stderr.strip()[-2000:]}")
            for kind, found in (("pp", prompt), ("tg", run)):
                samples[kind].append(int(found[2]) / float(found[1]) * 1e3)
        return {kind: {"samples_ts": speeds} for kind, speeds in samples.items()}


def text_of(path: Path, n: int) -> str:
    """Return random letters and words of about n tokens for the file's tokenizer."""
    rng = np.random.default_rng(0)
    text = "a"
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file.metadata)
        while len(tokenizer.encode(text, add_special=True)) < n:
            text += " " + "".join(rng.choice(list("aeioudgklmnprst"), rng.integers(1, 5)))
    return text


@dataclass(frozen=True)
class Mode:
    """A mode of hotset, on the sparse file or on the plain one ("exact@plain")."""

    name: str
    file: Path
    options: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def program(self) -> Program:
        ours = peers.hotset()
        return replace(ours, name=f"hotset {self.name}", command=(*ours.command, *self.options))


def mode(text: str, args: argparse.Namespace) -> Mode:
    sparsity, _, file = text.partition("@")
    if sparsity not in ("dense", "exact", "predicted") or file not in ("", "plain"):
        sys.exit(f"{text} is not a mode: give dense, exact or predicted, or these with @plain.")
    settings: dict[str, Any] = {"sparsity": sparsity}
    if sparsity == "predicted" and args.predictor:
        settings["predictor"] = args.predictor
    if file:
        settings["activation"] = "drelu" if args.drelu else "relu"
    options = tuple(part for key, value in settings.items() for part in (f"--{key}", value))
    return Mode(text, args.dense if file else args.sparse, options, settings)


@dataclass
class Round:
    """The results of a round: tokens per second by program and kind; rates in bytes per second."""

    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    streaming: float = 0.0
    gathering: float = 0.0


def run_rounds(
    modes: Sequence[Mode],
    rivals: Sequence[tuple[Any, Path]],
    job: Job,
    n_rounds: int,
    gather: Callable[[], float],
) -> tuple[list[Round], int]:
    """Run all programs in turn, in reverse order in every second round."""
    turns = [(m.program, m.file) for m in modes] + list(rivals)
    read = peers.bandwidth_reader(job.model, job.n_threads)
    read()

    def one(i: int) -> Round:
        taken, streaming, gathering = Round(), [], []
        for program, file in turns if i % 2 == 0 else reversed(turns):
            streaming.append(read())
            gathering.append(gather())
            entries = program.bench(replace(job, model=file))
            taken.speeds[program.name] = {
                kind: statistics.median(entry["samples_ts"]) for kind, entry in entries.items()
            }
        taken.streaming, taken.gathering = statistics.median(streaming), statistics.median(gathering)
        return taken

    return peers.undisturbed(n_rounds, one, "round")


@dataclass
class Row:
    """One mode and test. Speeds are tokens per second; ratios are by round; shares are of the roofline."""

    mode: str
    test: str
    kind: str
    speed: float
    ratios: dict[str, list[float]]
    peers: dict[str, float]
    at_best: float | None
    roofline: list[float] | None
    active: float
    targets: dict[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return whether every target is reached, or "" without targets."""
        found = {name: statistics.median(ratios) for name, ratios in self.ratios.items()}
        if self.roofline is not None:
            found["roofline"] = statistics.median(self.roofline)
        asked = [found[name] >= least for name, least in self.targets.items() if name in found]
        return peers.verdict(all(asked)) if asked else ""


def make_row(
    m: Mode, made_of: Anatomy, test: str, kind: str, rounds: Sequence[Round], rivals: Sequence[str]
) -> Row:
    name = m.program.name
    ours = [r.speeds[name][kind] for r in rounds]
    row = Row(
        mode=m.name,
        test=test,
        kind=kind,
        speed=statistics.median(ours),
        ratios={
            rival: [r.speeds[name][kind] / r.speeds[rival][kind] for r in rounds]
            for rival in rivals
            if kind in rounds[0].speeds[rival]
        },
        peers={rival: statistics.median(r.speeds[rival].get(kind, 0.0) for r in rounds) for rival in rivals},
        at_best=None,
        roofline=None,
        active=made_of.active,
    )
    if kind == "tg":
        best = [made_of.at_best(r.streaming, r.gathering) for r in rounds]
        row.at_best = statistics.median(best)
        row.roofline = [speed / limit for speed, limit in zip(ours, best, strict=True)]
    return row


def set_targets(row: Row, drelu: bool) -> None:
    if row.mode not in ("exact", "predicted"):
        return
    if row.kind == "pp":
        row.targets = {"PowerInfer": PROMPT_TARGET} if row.mode == "predicted" else {}
        return
    least = TARGETS["bamboo" if drelu else "llama"][row.mode]
    row.targets = {name: x for name, x in zip(("llama.cpp", "PowerInfer"), least, strict=True) if x}
    if row.mode == "predicted":
        row.targets["roofline"] = ROOFLINE_TARGET


def cells(row: Row, rivals: Sequence[str]) -> list[str]:
    def ratio(rival: str) -> str:
        values = row.ratios.get(rival)
        if not values:
            return ""
        return f"{statistics.median(values):.2f}× ({min(values):.2f} to {max(values):.2f})"

    best = "" if row.at_best is None else f"{row.at_best:.1f}"
    share = "" if row.roofline is None else f"{statistics.median(row.roofline):.0%}"
    asked = ", ".join(f"{x:.0%}" if name == "roofline" else f"{x:.1f}×" for name, x in row.targets.items())
    known = [f"{row.peers[rival]:.2f}" if row.peers[rival] else "" for rival in rivals]
    numbers = [row.mode, row.test, f"{row.active:.1%}", f"{row.speed:.2f}", *known, *map(ratio, rivals)]
    return [*numbers, best, share, asked, row.verdict]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.common_arguments(parser, rounds=5)
    parser.add_argument("--powerinfer", type=Path, help="PowerInfer's program `main`; optional")
    parser.add_argument("--sparse", type=Path, required=True, help="PowerInfer GGUF file")
    parser.add_argument("--dense", type=Path, required=True, help="plain GGUF file of the same weights")
    parser.add_argument("--drelu", action="store_true", help="the plain file's activation, and its targets")
    parser.add_argument("--modes", default="dense,exact,predicted", help="also exact@plain, dense@plain")
    parser.add_argument("--predictor", help="for predicted: mlp:q4_0, svd:128, ...")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=256, help="tokens; 0: decode only (256)")
    parser.add_argument("--gen", type=int, default=32, help="tokens decoded (32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line there too")
    args = parser.parse_args()
    modes = [mode(text, args) for text in args.modes.split(",")]

    job = Job(args.sparse, args.prompt, args.gen, n_threads=args.threads, repetitions=2)
    rivals: list[tuple[Any, Path]] = [(peers.llama_bench(args.llama), args.dense)]
    if args.powerinfer:
        rivals.append((PowerInfer(args.powerinfer, text_of(args.sparse, args.prompt or 8)), args.sparse))
    peers.wait_until_quiet(args.force)

    parts = {}
    for m in modes:  # also builds the sidecars that a mode needs
        with hotset.load(m.file, n_ctx=64, n_threads=args.threads, device="cpu", **m.settings) as model:
            parts[m.name] = anatomy(model)
            made_of = parts[m.name]
            print(
                f"{m.name}: {made_of.streamed / 1e9:.2f} GB streamed and {made_of.gathered / 1e9:.2f} GB "
                f"gathered per token, {made_of.selected:.1%} of neurons selected, {made_of.active:.1%} active"
            )
    gather = gathering_rate(args.sparse, args.threads)
    rounds, disturbed = run_rounds(modes, rivals, job, args.rounds, gather)
    names = [program.name for program, _ in rivals]
    rows = [make_row(m, parts[m.name], test, kind, rounds, names) for test, kind in job.tests for m in modes]
    for row in rows:
        set_targets(row, args.drelu)
    streaming, gathering = (
        statistics.median(getattr(r, rate) for r in rounds) / 1e9 for rate in ("streaming", "gathering")
    )
    print(
        f"\n{args.sparse.name}, {args.rounds} rounds, {disturbed} disturbed; streaming {streaming:.1f} GB/s,"
    )
    print(f"gathering a random tenth of rows {gathering:.1f} GB/s (medians)\n")
    headers = ["mode", "test", "active", "hotset t/s", *(f"{name} t/s" for name in names)]
    headers += [*(f"÷ {name}" for name in names), "at best t/s", "of it", "target", ""]
    peers.print_table(headers, [cells(row, names) for row in rows])
    print()
    facts = {
        "machine": peers.machine(),
        "sparse": args.sparse.name,
        "dense": args.dense.name,
        "disturbed": disturbed,
        "rounds": [asdict(r) for r in rounds],
        "anatomy": {name: asdict(part) for name, part in parts.items()},
        "results": [asdict(row) | {"verdict": row.verdict} for row in rows],
    }
    peers.print_json("compare_sparse", **facts)
    if args.json:
        args.json.write_text(json.dumps(facts) + os.linesep)


if __name__ == "__main__":
    main()
