"""Fuzzes whole small models of random shapes: the native plan against the NumPy reference and against itself.

usage: python tests/fuzz/fuzz_shapes.py [--seconds 60] [--seed 0] [--case N] [--verbose]

Shapes are random (architecture, heads, KV heads, head sizes, widths, layers, neurons, tensor types), so are
the cache's type, the mode, the predictor, threads, pages, sequences and how they are cut into steps. Of each
case every operation of some steps is compared with the reference (derived_bounds.Oracle), and the logits, to
the bit, with those of another number of threads, instruction set and cut. A case is its seed and number: what
fails is printed so, and `--seed S --case N` runs it again. The exit status is 1 if one fails.
"""

import argparse
import itertools
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # as pytest does for the tests
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from derived_bounds import Oracle
from tiny_gguf import write_llama, write_relu

from hotset import _core
from hotset.backends.base import PAGE_SIZE, Batch
from hotset.backends.cpu import CpuBackend
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import DECODABLE, TYPES, GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.sparsity.modes import choose, prepare

ENCODED = sorted(t for t in DECODABLE if not t.name.startswith("IQ"))
ORACLE_ROWS = 3_000  # tokens times heads times layers that the oracle looks at: it is slow
MOST_HEADS = 96
MOST_WIDTH = 1024  # of all heads together


@dataclass
class Case:
    """What was drawn: a file, how to run it, and what."""

    path: Path
    mode: str
    predictor: str | None
    kv_type: Any
    sequences: list[np.ndarray]  # tokens of each
    max_batch: int
    facts: str  # for a person


def one_of(rng: np.random.Generator, *items: Any) -> Any:
    return items[rng.integers(len(items))]


def random_types(rng: np.random.Generator, columns: dict[str, int], default: int, types: Any) -> Any:
    """type_of for a writer: a type whose blocks fit the columns of each matrix, of few types or of many."""
    some = [types[i] for i in rng.permutation(len(types))[: rng.integers(1, 6)]] + [GGMLType.F32]
    chosen: dict[str, GGMLType] = {}

    def type_of(name: str) -> GGMLType:
        if name not in chosen:
            width = columns.get(name.rpartition(".")[2], default)
            fitting = [t for t in some if width % TYPES[t].block_size == 0]
            chosen[name] = fitting[0] if rng.random() < 0.5 else one_of(rng, *fitting)
        return chosen[name]

    return type_of


def draw(rng: np.random.Generator, folder: Path) -> Case:
    """A random case; its file is written to `folder`."""
    unit = int(one_of(rng, 2, 16, 32, 32, 32, 256, 256))
    head_dim = int(one_of(rng, 2, 6, 8, 16, 24, 32, 32, 64, 64, 96, 128, 256))
    n_vocab, n_layer = int(rng.integers(2, 200)), int(rng.integers(1, 4))
    n_ff = unit * int(rng.integers(1, 1 + max(1, (800 if rng.random() < 0.3 else 96) // unit)))
    path, keys = folder / "model.gguf", {}
    threshold = float(one_of(rng, -1e30, 0.0, 0.1, 0.3, 1e30))
    if rng.random() < 0.5:
        architecture = str(one_of(rng, "llama", "qwen2", "qwen3"))
        n_embd, most = unit * int(rng.integers(1, 1 + max(1, 256 // unit))), max(1, MOST_WIDTH // head_dim)
        group = int(rng.integers(1, 1 + min(most, one_of(rng, 1, 4, 32))))
        n_head_kv = int(rng.integers(1, 1 + max(1, min(MOST_HEADS, most) // group)))
        if rng.random() < 0.3:
            keys[f"{architecture}.attention.sliding_window"] = int(rng.integers(1, 200))
        if rng.random() < 0.3:
            keys[f"{architecture}.rope.dimension_count"] = 2 * int(rng.integers(1, head_dim // 2 + 1))
        relu = rng.random() < 0.3
        if relu:
            keys[f"{architecture}.hidden_activation"] = str(one_of(rng, "relu", "relu2"))
        elif rng.random() < 0.3:
            keys[f"{architecture}.hidden_activation"] = str(one_of(rng, "gelu", "gelu_tanh"))
        columns = {"attn_output": n_head_kv * group * head_dim, "ffn_down": n_ff}
        write_llama(
            path, architecture=architecture, n_layer=n_layer, n_embd=n_embd, n_ff=n_ff,
            n_head=n_head_kv * group, n_head_kv=n_head_kv, head_dim=head_dim, n_vocab=n_vocab, n_ctx=4096,
            tied=bool(rng.integers(2)), type_of=random_types(rng, columns, n_embd, sorted(DECODABLE)),
            keys=keys, seed=int(rng.integers(1 << 30)),
        )  # fmt: skip
        modes, predictors = (["dense", "exact", "predicted"] if relu else ["dense"]), ["sign:0", "svd:4"]
        n_head = n_head_kv * group
    else:
        relu, dialect = True, str(one_of(rng, "powerinfer", "gguf"))
        architecture = str(one_of(rng, "llama", "bamboo", "falcon", "opt"))
        n_head = int(one_of(rng, 1, 2, 4, 6, 8, 12, 16, 40, 56, 72))
        head_dim = min(head_dim, max(2, MOST_WIDTH // n_head // 2 * 2))
        step = np.lcm(unit, n_head * 2)
        if step > MOST_WIDTH:  # then no type with blocks fits
            step = n_head * 2
        n_embd = int(step * max(1, round(n_head * head_dim / step)))
        head_dim = n_embd // n_head
        divisors = [d for d in range(1, n_head + 1) if n_head % d == 0]
        n_head_kv = n_head if architecture == "opt" else int(one_of(rng, *divisors))
        ranks = tuple(int(x) for x in rng.integers(1, 96, n_layer) * (1 if rng.random() < 0.3 else 32))
        columns = {
            "ffn_down": n_ff,
            "fc2": 1,
        }  # fc2's columns are the rank of its layer: any type but float may not fit
        if all(rank % 32 == 0 for rank in ranks):
            columns["fc2"] = 32
        write_relu(
            path, architecture, dialect=dialect, two_norms=bool(rng.integers(2)), ranks=ranks,
            threshold=threshold, n_embd=n_embd, n_ff=n_ff, n_head=n_head, n_head_kv=n_head_kv,
            n_vocab=n_vocab, n_ctx=4096, type_of=random_types(rng, columns, n_embd, ENCODED),
            seed=int(rng.integers(1 << 30)),
        )  # fmt: skip
        modes, predictors = ["dense", "exact", "predicted"], ["sign:0", "svd:4"]
        if dialect == "powerinfer":
            predictors += [None, None]
    mode = str(one_of(rng, *modes))
    predictor = one_of(rng, *predictors) if mode == "predicted" else None
    kv_type = str(one_of(rng, "f32", "f16", "q8_0")) if head_dim % 32 == 0 else str(one_of(rng, "f32", "f16"))
    lengths = one_of(
        rng,
        [int(rng.integers(1, 30))],
        [int(rng.integers(30, 700))],
        rng.integers(1, 40, rng.integers(1, 24)).tolist(),
        [*rng.integers(1, 4, rng.integers(1, 200)).tolist(), int(rng.integers(1, 200))],
        [int(rng.integers(520, 1400)), *rng.integers(1, 20, 3).tolist()],
    )
    sequences = [rng.integers(0, n_vocab, n).astype(np.int32) for n in lengths]
    max_batch = max(1, int(one_of(rng, 1, 9, 64, 512, sum(lengths), sum(lengths))))
    if max_batch < 9:  # as many steps as there is patience for
        sequences = [s[:12] for s in sequences[:3]]
    elif max_batch < 64:
        sequences = [s[:60] for s in sequences[:6]]
    lengths = [len(s) for s in sequences]
    facts = (
        f"{architecture} {mode} {predictor or ''} kv {kv_type}, {n_layer} layers, width {n_embd}, "
        f"{n_head}/{n_head_kv} heads of {head_dim}, {n_ff} neurons, {len(lengths)} sequences of "
        f"{sum(lengths)} tokens, batch {max_batch} {keys}"
    )
    return Case(path, mode, predictor, kv_type, sequences, max_batch, facts)


def steps(rng: np.random.Generator, case: Case, pages: list[list[int]], max_batch: int, patience: int) -> Any:
    """The case's tokens cut at random: batches, and which (sequence, position) each logits row belongs to."""
    done = [0] * len(case.sequences)
    width = max(len(p) for p in pages)
    for _ in range(100_000):
        waiting = [i for i in rng.permutation(len(done)).tolist() if done[i] < len(case.sequences[i])]
        if not waiting:
            return
        room, parts = max_batch, []
        for i in waiting:
            left = len(case.sequences[i]) - done[i]
            n = min(left, room, int(one_of(rng, 1, max(1, left // patience), left, left)))
            if n == 0 or (parts and rng.random() < 0.1):
                break
            parts.append((i, done[i], n))
            done[i] += n
            room -= n
        table = np.full((len(parts), width), -1, np.int32)
        for row, (i, _, _) in enumerate(parts):
            table[row, : len(pages[i])] = pages[i]
        tokens = np.concatenate([case.sequences[i][at : at + n] for i, at, n in parts])
        owners = np.concatenate([np.full(n, row, np.int32) for row, (_, _, n) in enumerate(parts)])
        where = [(i, position) for i, at, n in parts for position in range(at, at + n)]
        wanted = np.flatnonzero(rng.random(len(tokens)) < one_of(rng, 0.0, 0.3, 1.0, 1.0)).astype(np.int32)
        positions = np.array([position for _, position in where], np.int32)
        yield Batch(tokens, positions, owners, table, wanted), [where[t] for t in wanted]
    raise AssertionError("the case does not end")


def run_case(seed: int, number: int, folder: Path, say: Any = lambda facts: None) -> None:
    """Raises AssertionError (or whatever else went wrong) if the case fails."""
    rng = np.random.default_rng([seed, number])
    case = draw(rng, folder)
    say(case.facts)
    with open_gguf(case.path) as gguf:
        config = config_from_gguf(gguf)
        ready = prepare(gguf, config, choose(config, gguf.tensors, case.mode, case.predictor))
        graph = describe(config, ready.weights.tensors, ready.predictor)
        every = tuple(value.name for value in graph.values)
        most_tapped = max(1, ORACLE_ROWS // (config.n_head * config.n_layer))
        n_pages = sum(-(-len(s) // PAGE_SIZE) for s in case.sequences)

        def run(tapped: bool, **options: Any) -> dict[tuple[int, int], np.ndarray]:
            """Logits by sequence and position."""
            free = iter(rng.permutation(n_pages).tolist())
            pages = [list(itertools.islice(free, -(-len(s) // PAGE_SIZE))) for s in case.sequences]
            given = {"n_pages": n_pages, "kv_type": case.kv_type, "max_batch": case.max_batch, **options}
            backend = CpuBackend(ready.weights, graph, **given)
            oracle = Oracle(
                ready.weights, graph, n_pages=n_pages, kv_type=case.kv_type, max_batch=case.max_batch
            )
            room, rows = most_tapped, {}
            try:
                for batch, where in steps(rng, case, pages, given["max_batch"], 10):
                    if tapped and room > 0:
                        room -= len(batch.tokens)
                        batch = Batch(
                            batch.tokens,
                            batch.positions,
                            batch.sequences,
                            batch.page_tables,
                            batch.outputs,
                            every,
                        )
                    found = backend.step(batch)
                    if batch.taps:
                        oracle.check(batch, found)
                    assert found.logits.shape == (len(where), config.n_vocab)
                    rows.update(zip(where, found.logits.copy(), strict=True))
            finally:
                backend.close()
            return rows

        def isa() -> str:
            return str(one_of(rng, *_core.available_isas(), None) or _core.isa())

        sparse = case.mode != "dense"
        small = min(case.max_batch, most_tapped)
        first = run(True, n_threads=int(rng.integers(1, 5)), isa=isa(), sparse=sparse, max_batch=small)
        others = [{"sparse": sparse, "max_batch": sum(map(len, case.sequences))}, {"sparse": not sparse}]
        for options in others:  # what is left out of reading changes nothing
            second = run(False, n_threads=int(rng.integers(1, 5)), isa=isa(), **options)
            for at in first.keys() & second.keys():
                assert np.isfinite(first[at]).all(), at
                np.testing.assert_array_equal(second[at], first[at], err_msg=f"sequence and position {at}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--verbose", action="store_true", help="say each case before it runs")
    args = parser.parse_args()
    failed, end = 0, time.monotonic() + args.seconds
    numbers = itertools.count() if args.case is None else [args.case]
    count = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number in numbers:
            if args.case is None and time.monotonic() > end:
                break
            facts: list[str] = []

            def say(text: str, number: int = number, facts: list[str] = facts) -> None:
                facts.append(text)
                if args.verbose or args.case is not None:
                    print(f"{number}: {text}", flush=True)

            try:
                run_case(args.seed, number, Path(scratch), say)
            except Exception:
                failed += 1
                print(f"--seed {args.seed} --case {number} {facts}", file=sys.stderr)
                traceback.print_exc()
            count += 1
    print(f"{count} models, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
