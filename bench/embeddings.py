"""Embeddings of many short texts: hotset compared with llama.cpp and PyTorch, in each type of the weights.

usage: python bench/embeddings.py CHECKPOINT [--llama-cpp BUILD] [--types F16,F32,Q8_0] [--runs 5]

CHECKPOINT is the folder of a published encoder, such as all-MiniLM-L6-v2. It is converted to each type into
OUT. Programs run in turn, with the model already loaded: 128 texts of 99 tokens. PyTorch runs the checkpoint
in F32, whatever the type.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import peers
from peers import Comparison

import hotset

TEXT = Path(__file__).parent / "texts" / "lighthouse.txt"
N_TEXTS, N_TOKENS = 128, 99
PROMPT_EVAL = re.compile(r"prompt eval time =\s*([\d.]+) ms")


def converted(checkpoint: Path, type: str, folder: Path) -> Path:
    """Return a file of the checkpoint with weights of a type, written if it does not exist."""
    path = folder / f"{checkpoint.name}.{type.lower()}.gguf"
    if not path.exists():
        command = [sys.executable, "-m", "hotset.cli.main", "convert", str(checkpoint), str(path)]
        subprocess.run([*command, "--type", type.lower()], check=True, stdout=sys.stderr)
    return path


def texts_for(path: Path) -> list[str]:
    """Return texts of N_TOKENS tokens for the file's tokenizer, markers included."""
    words, texts = TEXT.read_text("utf-8").split(), []
    with hotset.load(path, device="cpu") as model:
        for i in range(N_TEXTS):
            own = [words[(i * 37 + j) % len(words)] for j in range(N_TOKENS)]
            while len(model.encode(" ".join(own))) > N_TOKENS:
                own.pop()
            texts.append(" ".join(own))
    return texts


def of_hotset(path: Path, texts: list[str], threads: int) -> float:
    with hotset.load(path, device="cpu", n_threads=threads) as model:
        model.embed(texts[:8])
        began = time.perf_counter()
        model.embed(texts)
        return time.perf_counter() - began


def of_llama(program: Path, path: Path, texts: list[str], threads: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(texts))
        file.flush()
        command = [str(program), "-m", str(path), "-f", file.name, "-t", str(threads)]
        log = peers.run([*command, "--embd-output-format", "json", "--perf", "-v"], {})[1]
    found = PROMPT_EVAL.search(log)
    if found is None:
        raise peers.ProgramFailed(f"{program} printed no timings:\n{log.strip()[-2000:]}")
    return float(found[1]) / 1e3


def of_torch(checkpoint: Path, threads: int) -> Callable[[list[str]], float]:
    """Return a function that embeds texts with PyTorch in batches of 32, and returns the seconds."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(threads)
    model, tokenizer = AutoModel.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)

    def run(texts: list[str]) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            for at in range(0, len(texts), 32):
                model(**tokenizer(texts[at : at + 32], padding=True, return_tensors="pt"))
        return time.perf_counter() - began

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="build of llama.cpp, or its bin folder")
    parser.add_argument("--types", default="F16,F32,Q8_0", help="comma-separated")
    parser.add_argument("--runs", type=int, default=5, help="runs of each program (5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/embeddings"), metavar="DIR")
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = {type: converted(args.checkpoint, type, args.out) for type in args.types.split(",")}
    texts = texts_for(next(iter(files.values())))
    with_torch = of_torch(args.checkpoint, args.threads)
    with_torch(texts[:32])
    theirs = peers.find_program(args.llama_cpp, "llama-embedding") if args.llama_cpp else None
    peers.wait_until_quiet(args.force)
    rows, results = [], {}
    for type, path in files.items():
        programs: dict[str, Callable[[], float]] = {
            "hotset": lambda path=path: of_hotset(path, texts, args.threads),
            "PyTorch": lambda: with_torch(texts),
        }
        if theirs is not None:
            programs["llama.cpp"] = lambda path=path: of_llama(theirs, path, texts, args.threads)

        def one(i: int, programs: dict[str, Callable[[], float]] = programs) -> dict[str, float]:
            names = list(programs) if i % 2 == 0 else list(reversed(programs))
            return {name: N_TEXTS * N_TOKENS / programs[name]() for name in names}

        taken, disturbed = peers.undisturbed(args.runs, one, type, again=not args.force)
        found = Comparison({name: [each[name] for each in taken] for name in programs}, disturbed=disturbed)
        speeds = [statistics.median(found.speeds[name]) for name in programs]
        ratios = {name: found.ratios(name) for name in programs if name != "hotset"}
        results[type] = found.speeds
        rows.append([
            type,
            *(f"{N_TEXTS * N_TOKENS / speed:.2f} s" for speed in speeds),
            *(f"{statistics.median(own):.2f}× ({min(own):.2f} to {max(own):.2f})" for own in ratios.values()),
        ])  # fmt: skip
    peers.print_table(["type", *programs, *(f"÷ {name}" for name in ratios)], rows)
    print()
    peers.print_json("embeddings", machine=peers.machine(), model=args.checkpoint.name, speeds=results)


if __name__ == "__main__":
    main()
