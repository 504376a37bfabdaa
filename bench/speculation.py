"""What drafts gain: answers with and without them, in turns, on texts that answers repeat and on free text.

    python bench/speculation.py smollm2-135m
    python bench/speculation.py model.gguf --speculate draft --draft smaller.gguf

Prompts are made of the repository's own sources: summaries and quotes of its documents, edits of its code,
questions over a document; and free text that repeats nothing. Each answer is computed without drafts and with
them, `-r` times in turns, the order swapped every time, so that a machine that becomes slower meanwhile is
slower for both. The tokens must be the same, or the run fails. Figures are tokens per second of decode.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import hotset

ROOT = Path(__file__).resolve().parents[1]


def part(name: str, n_lines: int, first: int = 0) -> str:
    return "\n".join((ROOT / name).read_text("utf-8").splitlines()[first : first + n_lines])


def prompts() -> dict[str, list[str]]:
    """By kind of work."""
    guide, memory = part("docs/guides/start.md", 40), part("docs/MEMORY.md", 30)
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


def answer(model: hotset.Model, prompt: str, args: argparse.Namespace) -> hotset.Completion:
    options: dict[str, Any] = {"temperature": args.temperature, "seed": 1, "max_tokens": args.n_gen}
    if "tokenizer.chat_template" not in model.gguf.metadata:  # a synthetic model
        return model.generate(prompt, ignore_eos=True, **options)
    return model.chat([{"role": "user", "content": prompt}], ignore_eos=True, **options).completion


def compare(
    plain: hotset.Model, drafting: hotset.Model, prompt: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One prompt, in turns. The first answer of each reads the prompt into the cache."""
    speeds: dict[str, list[float]] = {"plain": [], "drafting": []}
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
    ratios = [b / a for a, b in zip(speeds["plain"], speeds["drafting"], strict=True)]
    timings = found["drafting"].timings
    return {
        "plain_ts": statistics.median(speeds["plain"]),
        "drafting_ts": statistics.median(speeds["drafting"]),
        "ratio": statistics.median(ratios),
        "tokens_per_step": tokens_per_step,
        "acceptance": timings.accepted_tokens / max(timings.drafted_tokens, 1),
    }


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
    args = parser.parse_args()
    settings: dict[str, Any] = {"n_ctx": 2048, "n_threads": args.threads, "max_sequences": 1}
    entries = []
    with (
        hotset.load(args.model, **settings) as plain,
        hotset.load(args.model, speculate=args.speculate, draft=args.draft, **settings) as drafting,
    ):
        print("| work | t/s without | with | ratio | tokens per step | accepted |\n|---|--:|--:|--:|--:|--:|")
        for kind, texts in prompts().items():
            for text in texts if args.only in (None, kind) else ():
                entry = {"work": kind, **compare(plain, drafting, text, args)}
                entries.append(entry)
                print(
                    f"| {kind} | {entry['plain_ts']:.1f} | {entry['drafting_ts']:.1f} | "
                    f"{entry['ratio']:.2f} | {entry['tokens_per_step']:.2f} | {entry['acceptance']:.0%} |",
                    flush=True,
                )
    print(json.dumps(entries))


if __name__ == "__main__":
    main()
