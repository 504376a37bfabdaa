"""A long text under read faults: every answer is right or ends with a message, and nothing leaks.

usage: python tests/fuzz/fuzz_reads.py [MODEL.gguf] [--tokens 2000] [--share 0.01] [--streams 4] [--budget G]

The model first writes the expected texts with its file mapped. Then it writes them under a RAM budget (by
default the smallest that works), several at a time, while a share of the reads fails, returns fewer bytes or
finds the end of the file. An answer that ends with a message is requested again from its last token. Every
token must equal the token of the mapped file. At the end all blocks are free, and the process has no more
threads, open files and memory than before. Without faults each text must then come in one piece. Without
MODEL the script makes a tiny one. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from stored_weights import least_of

if __name__ == "__main__":  # as pytest does for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("support", "")]

import hotset
from hotset.errors import DeviceError, ReadError
from hotset.placement import ram

N_CTX = 256
PROMPT = 8  # tokens
# The errors that end an answer: DeviceError if the CPU's part of a step with a device fails.
ENDS = (ReadError, DeviceError)
TRIES = 500  # without a new token: then no step succeeds with this share of faults
# Bytes that the process may grow; more is a leak. A sanitizer keeps up to 256 MiB of freed memory.
LEAK = (512 if "HOTSET_SANITIZED" in os.environ else 16) << 20


@dataclass
class Report:
    """The results of an attack.

    n_tokens: received tokens, all of them right. n_failed: answers that ended with a message. problems: one
    sentence for each. stuck: texts that could not be finished, since every step had a fault.
    """

    n_tokens: int
    n_failed: int
    problems: list[str]
    stuck: int = 0


def held() -> tuple[int, int, int]:
    """Return the numbers of threads, open files and resident bytes of this process."""
    process = psutil.Process()
    return process.num_threads(), process.num_fds(), process.memory_info().rss


def write(model: hotset.Model, prompt: list[int], expected: list[int], report: Report, lock: Any) -> None:
    """Write one text and request the rest again after each fault."""
    text, tries = list(prompt), 0
    while len(text) < len(prompt) + len(expected) and tries < TRIES:
        at = len(text) - len(prompt)
        try:
            for chunk in model.stream(text, max_tokens=len(expected) - at, temperature=0, ignore_eos=True):
                if chunk.tokens:
                    tries = 0
                text += chunk.tokens
        except ENDS as error:
            tries += 1
            with lock:
                report.n_failed += 1
                if "\n" in str(error) or str(model.gguf.path) not in str(error):
                    report.problems.append(f"no message: {error}")
        except Exception as error:
            report.problems.append(f"another error: {error!r}")
            return
        found = text[len(prompt) :]
        if found != expected[: len(found)]:
            report.problems.append(f"wrong from token {at} on")
            return
    with lock:
        report.n_tokens += len(text) - len(prompt)
        report.stuck += tries >= TRIES


def attack(
    path: Path, n_tokens: int, share: float, streams: int, seed: int, budget: float, **settings: Any
) -> Report:
    """Write texts of n_tokens in total, `streams` at a time. budget: in GiB. settings: more for `load`."""
    settings = {"n_ctx": N_CTX, "max_sequences": streams, "device": "cpu", **settings}
    rng, report, lock = np.random.default_rng(seed), Report(0, 0, []), threading.Lock()
    each = min(N_CTX - PROMPT, -(-n_tokens // streams))
    with hotset.load(path, **settings) as mapped:
        prompts = rng.integers(3, min(mapped.config.n_vocab, 90), (-(-n_tokens // each), PROMPT)).tolist()
        options = {"max_tokens": each, "temperature": 0, "ignore_eos": True}
        texts = [list(one.tokens) for one in mapped.generate_many(prompts, **options)]
    with hotset.load(path, **settings, ram_budget=budget) as under:
        assert under.stored is not None
        assert list(under.generate(prompts[0], **options).tokens) == texts[0]
        before, n_free = held(), under.engine.scheduler.pool.n_available
        under.stored.reader.inject_faults(share, seed)
        waiting = list(zip(prompts, texts, strict=True))

        def work() -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    prompt, text = waiting.pop()
                write(under, prompt, text, report, lock)

        threads = [threading.Thread(target=work) for _ in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        under.stored.reader.inject_faults(0.0, 0)
        with contextlib.suppress(*ENDS):  # faults of earlier read-ahead
            under.generate(prompts[0], max_tokens=1, temperature=0)
        for _ in range(100):  # the system counts a joined thread for a moment longer
            after = held()
            if after[0] <= before[0]:
                break
            time.sleep(0.01)
        for name, a, b, room in zip(("threads", "files", "bytes"), before, after, (0, 0, LEAK), strict=True):
            if b > a + room:
                report.problems.append(f"{name}: {a} before, {b} after")
        if under.engine.has_work or under.engine.scheduler.pool.n_available != n_free:
            report.problems.append(f"blocks: {n_free}, then {under.engine.scheduler.pool.n_available}")
        for prompt, text in zip(prompts, texts, strict=True):
            if list(under.generate(prompt, **options).tokens) != text:
                report.problems.append("wrong without faults, after them")
    return report


def least_budget(path: Path, **settings: Any) -> float:
    """Return the smallest budget that works, in GiB."""
    return least_of(path, **{"n_ctx": N_CTX, "device": "cpu", **settings}) / 2**30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--share", type=float, default=0.01, help="of the reads that go wrong (0.01)")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--budget", type=float, help="GiB")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = args.model
        if path is None:
            from byte_models import write_sparse

            path = write_sparse(Path(scratch) / "model.gguf")
            ram.own_memory, ram.PROGRAM = lambda: 0, 0  # the allowance would hold the whole model
        budget = args.budget or least_budget(path, max_sequences=args.streams)
        report = attack(path, args.tokens, args.share, args.streams, args.seed, budget)
    for problem in report.problems:
        print(problem, file=sys.stderr)
    print(
        f"{report.n_tokens} tokens came and were right, {report.n_failed} answers ended with a message, "
        f"{report.stuck} texts could not be ended, {len(report.problems)} things were wrong"
    )
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
