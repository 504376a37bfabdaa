"""The gain of drafts: answers with and without them, in turn, on texts that answers repeat and on free text.

    python bench/speculation.py smollm2-135m
    python bench/speculation.py model.gguf --speculate draft --draft smaller.gguf
    python bench/speculation.py model.gguf --llama BUILD/bin

Prompts use the repository's own sources: summaries and quotes of its documents, edits of its code, questions
about a document; and free text that repeats nothing. Each answer is computed with and without drafts, `-r`
times in turn, in alternating order, so that a machine that becomes slower is slower for both. The tokens must
be the same, or the run fails. Results are tokens per second of decode.

With --llama, llama.cpp continues the same prompts: llama-lookup (ngram) or llama-speculative (draft) with
drafts, llama-lookup with drafts of no tokens without; greedy, with drafts of the same length.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import hotset

ROOT = Path(__file__).resolve().parents[1]
N_CTX = 4096
DRAFT_MAX = 8
HEADERS = ("work", "t/s without", "with", "ratio", "tokens per step", "accepted")
PEER_HEADERS = (
    "llama.cpp without",
    "with",
    "ratio",
    "accepted",
    "hotset with drafts ÷ llama.cpp with drafts",
)


def part(name: str, n_lines: int, first: int = 0) -> str:
    return "\n".join((ROOT / name).read_text("utf-8").splitlines()[first : first + n_lines])


def prompts() -> dict[str, list[str]]:
    """Return prompts by kind of work."""
    guide, memory = part("docs/get-started/first-run.md", 40), part("docs/guides/larger-than-memory.md", 30)
    units, errors = part("src/hotset/units.py", 40), part("src/hotset/errors.py", 40)
    return {
        "summary": [
            f"Summarise this text in its own words, sentence by sentence:\n\n{text}"
            for text in (guide, memory)
        ],
        "code editing": [
            f"Repeat this Python file with every docstring kept and type hints unchanged:\n\n{text}"
            for text in (units, errors)
        ],
        "questions": [
            f"{guide}\n\nWhich commands does this text show? Quote each of them.",
            f"{memory}\n\nWhat does this text say about memory budgets? Quote the sentences.",
        ],
        "free text": [
            "Write a short story about a lighthouse keeper and the sea.",
            "Explain to a child why the sky is blue.",
        ],
    }


def is_chat(model: hotset.Model) -> bool:
    """Return whether the model has a chat template; a synthetic one has none."""
    return "tokenizer.chat_template" in model.gguf.metadata


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def answer(model: hotset.Model, prompt: str, args: argparse.Namespace) -> hotset.Completion:
    options: dict[str, Any] = {"temperature": args.temperature, "seed": 1, "max_tokens": args.n_gen}
    if not is_chat(model):
        return model.generate(prompt, ignore_eos=True, **options)
    return model.chat(messages(prompt), ignore_eos=True, **options).completion


def peer_answer(
    model: hotset.Model, prompt: str, args: argparse.Namespace, *, drafts: bool
) -> dict[str, float]:
    """Return t/s of decode of one answer of llama.cpp, and the share of drafted tokens that it accepted."""
    name = "llama-speculative" if drafts and args.draft else "llama-lookup"
    argv = [str(args.llama / name), "-m", str(model.gguf.path), "-c", str(N_CTX), "-b", str(N_CTX)]
    argv += ["-n", str(args.n_gen), "--temp", "0", "--ignore-eos", "--no-escape"]
    argv += ["--spec-draft-n-max", str(DRAFT_MAX if drafts else 0)]
    argv += ["-md", args.draft] if name == "llama-speculative" else []
    argv += ["-t", str(args.threads)] if args.threads else []
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(model.chat_template.render(messages(prompt)) if is_chat(model) else prompt)
        file.flush()
        done = subprocess.run([*argv, "-f", file.name], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    numbers = {
        key: re.search(rf"{key}\D*([\d.]+)", said.rpartition("decoded")[2])
        for key in ("speed", "n_drafted", "n_accept")
    }
    if done.returncode or not all(numbers.values()):
        raise SystemExit(f"{' '.join(argv)} failed:\n{said[-2000:]}")
    speed, drafted, accepted = (float(found[1]) for found in numbers.values() if found)
    return {"ts": speed, "acceptance": accepted / max(drafted, 1)}


def compare(
    plain: hotset.Model, drafting: hotset.Model, prompt: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Compare with one prompt, in turn. The first answer of each reads the prompt into the cache."""
    speeds: dict[str, list[float]] = {"plain": [], "drafting": [], "peer": [], "peer_drafting": []}
    tokens_per_step = 0.0
    for i in range(args.repetitions + 1):
        found = {}
        for name in ("plain", "drafting") if i % 2 else ("drafting", "plain"):
            found[name] = answer(plain if name == "plain" else drafting, prompt, args)
            if i:
                speeds[name].append(found[name].timings.predicted_per_second)
        if found["plain"].tokens != found["drafting"].tokens:
            raise SystemExit(f"drafts changed the answer to {prompt[:60]!r}")
        tokens_per_step = found["drafting"].timings.tokens_per_step
        if i and args.llama:
            peer = peer_answer(plain, prompt, args, drafts=True)
            speeds["peer"].append(peer_answer(plain, prompt, args, drafts=False)["ts"])
            speeds["peer_drafting"].append(peer["ts"])
    timings = found["drafting"].timings
    beside = {}
    if args.llama:
        beside = {
            "peer_ts": statistics.median(speeds["peer"]),
            "peer_drafting_ts": statistics.median(speeds["peer_drafting"]),
            "peer_ratio": median_ratio(speeds["peer_drafting"], speeds["peer"]),
            "peer_acceptance": peer["acceptance"],
            "beside": median_ratio(speeds["drafting"], speeds["peer_drafting"]),
        }
    return {
        "plain_ts": statistics.median(speeds["plain"]),
        "drafting_ts": statistics.median(speeds["drafting"]),
        "ratio": median_ratio(speeds["drafting"], speeds["plain"]),
        "tokens_per_step": tokens_per_step,
        "acceptance": timings.accepted_tokens / max(timings.drafted_tokens, 1),
        **beside,
    }


def median_ratio(ours: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def cells(entry: dict[str, Any]) -> list[str]:
    found = [
        entry["work"],
        f"{entry['plain_ts']:.1f}",
        f"{entry['drafting_ts']:.1f}",
        f"{entry['ratio']:.2f}",
    ]
    found += [f"{entry['tokens_per_step']:.2f}", f"{entry['acceptance']:.0%}"]
    if "beside" in entry:
        found += [f"{entry['peer_ts']:.1f}", f"{entry['peer_drafting_ts']:.1f}", f"{entry['peer_ratio']:.2f}"]
        found += [f"{entry['peer_acceptance']:.0%}", f"{entry['beside']:.2f}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--draft")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--only", choices=prompts(), help="one kind of work (all)")
    parser.add_argument("--llama", type=Path, help="bin folder of a llama.cpp build")
    args = parser.parse_args()
    settings: dict[str, Any] = {"n_ctx": N_CTX, "n_threads": args.threads, "max_sequences": 1}
    entries = []
    with (
        hotset.load(args.model, **settings) as plain,
        hotset.load(
            args.model, speculate=args.speculate, draft=args.draft, draft_max=DRAFT_MAX, **settings
        ) as drafting,
    ):
        headers = HEADERS + (PEER_HEADERS if args.llama else ())
        print(f"| {' | '.join(headers)} |\n|---|{'--:|' * (len(headers) - 1)}")
        for kind, texts in prompts().items():
            for text in texts if args.only in (None, kind) else ():
                entry = {"work": kind, **compare(plain, drafting, text, args)}
                entries.append(entry)
                print(f"| {' | '.join(cells(entry))} |", flush=True)
    print(json.dumps(entries))


if __name__ == "__main__":
    main()
