"""Predictors in one table: their recall, their cost, and the effect of their errors on the model.

usage: python bench/predictors.py --model MODEL.gguf [--text FILE] [--kinds mlp,mlp:q4_0,svd:128]

Recall and precision count neurons, over all layers, compared with the neurons that fire for the same FFN
inputs; `of values` is recall with each neuron weighted by its magnitude. KL is the mean divergence of the
next token's distribution from the dense model's, in nats, with errors accumulated over the layers. Predictors
are built again, in a separate folder.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peers
from anatomy import anatomy, random_tokens

import hotset
from hotset.formats.gguf import open_gguf
from hotset.units import human_size

SVD_RANKS = (32, 64, 128, 256, 512)
BUILT = re.compile(r"^predictor .*built in ([\d.]+) s")


@dataclass(frozen=True)
class Row:
    """One predictor. Shares are of neurons; seconds per decoded token, and the predictor's part of them."""

    kind: str
    recall: float
    of_values: float
    precision: float
    selected: float
    n_bytes: int
    build_seconds: float | None
    seconds: float
    predictor_seconds: float
    kl: float
    agreement: float  # how often the most likely token is the dense model's


def default_kinds(model: Path) -> list[str]:
    with open_gguf(model) as file:
        published = "blk.0.fc1.weight" in file.tensors
    kinds = ["mlp", "mlp:q8_0", "mlp:q4_0", "mlp:q3_k"] if published else []
    return [*kinds, "svd", *(f"svd:{rank}" for rank in SVD_RANKS)]


@contextmanager
def bare(model: Path) -> Iterator[Path]:
    """Give the model another path, for which nothing has been built."""
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / model.name
        link.symlink_to(model.resolve())
        yield link


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = (logits - logits.max(axis=-1, keepdims=True)).astype(np.float64)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergence(dense: np.ndarray, other: np.ndarray) -> float:
    """Return the mean over tokens of KL(dense || other); arguments are logits [n_tokens, n_vocab]."""
    p, q = log_softmax(dense), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def measure(path: Path, kind: str, tokens: list[int], dense: np.ndarray, settings: dict[str, Any]) -> Row:
    with hotset.load(path, sparsity="predicted", predictor=kind, **settings) as model:
        built = [float(found[1]) for note in model.notes if (found := BUILT.search(note))]
        quality = model.measure_predictor(tokens)
        selected = np.array([layer.selected_share for layer in quality])
        active = np.array([layer.active_share for layer in quality])

        def over_layers(shares: list[float], weights: np.ndarray) -> float:
            return float(np.average(np.nan_to_num(shares), weights=weights if weights.any() else None))

        logits = model.logits(tokens)
        made_of = anatomy(model)
        operations = [op for op in model.graph.ops if op.part == "predictor"]
        weights = {op.weight for op in operations if hasattr(op, "weight")}
        return Row(
            kind=kind,
            recall=over_layers([layer.recall for layer in quality], active),
            of_values=over_layers([layer.of_magnitude for layer in quality], active),
            precision=over_layers([layer.precision for layer in quality], selected),
            selected=float(selected.mean()),
            n_bytes=sum(model.weights.tensors[name].nbytes for name in weights),
            build_seconds=sum(built) if built else None,
            seconds=made_of.seconds,
            predictor_seconds=made_of.predictor,
            kl=divergence(dense, logits),
            agreement=float((dense.argmax(-1) == logits.argmax(-1)).mean()),
        )


def cells(row: Row) -> list[str]:
    return [
        row.kind,
        f"{row.recall:.1%}",
        f"{row.of_values:.1%}",
        f"{row.precision:.1%}",
        f"{row.selected:.1%}",
        human_size(row.n_bytes),
        "" if row.build_seconds is None else f"{row.build_seconds:.1f}",
        f"{row.predictor_seconds * 1e3:.1f}",
        f"{row.seconds * 1e3:.1f}",
        f"{row.kl:.4f}",
        f"{row.agreement:.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kinds", help="comma-separated; by default all, at several settings")
    parser.add_argument("--text", type=Path, help="its beginning is what is predicted; else random tokens")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activation", help="of a plain file that does not say it: relu, drelu, ...")
    args = parser.parse_args()
    kinds = args.kinds.split(",") if args.kinds else default_kinds(args.model)
    settings = {
        "device": "cpu",
        "n_ctx": max(args.tokens, 64),
        "n_threads": args.threads,
        "activation": args.activation,
    }
    with bare(args.model) as path:
        with hotset.load(path, sparsity="dense", **settings) as model:
            if args.text:
                text = args.text.read_text(encoding="utf-8", errors="replace")[: 16 * args.tokens]
                tokens = list(model.tokenizer.encode(text, add_special=True))[: args.tokens]
            else:
                tokens = random_tokens(model, args.tokens, seed=1)
            dense = model.logits(tokens)
            base = anatomy(model)
        with hotset.load(path, sparsity="exact", **settings) as model:
            exact = anatomy(model)
        rows = []
        for kind in kinds:
            rows.append(measure(path, kind, tokens, dense, settings))
            print(f"measured {kind}", file=sys.stderr)
    print(f"{args.model.name}, {len(tokens)} tokens of {args.text or 'random ids'}:")
    print(f"{base.active:.1%} of neurons are active; a token takes {base.seconds * 1e3:.1f} ms dense,")
    print(f"{exact.seconds * 1e3:.1f} ms exact\n")
    headers = ["predictor", "recall", "of values", "precision", "selected", "size", "build s"]
    headers += ["predictor ms", "token ms", "KL", "same token"]
    peers.print_table(headers, [cells(row) for row in rows])
    print()
    peers.print_json(
        "predictors",
        machine=peers.machine(),
        model=args.model.name,
        text=args.text and args.text.name,
        n_tokens=len(tokens),
        dense=asdict(base),
        exact=asdict(exact),
        results=[asdict(row) for row in rows],
    )


if __name__ == "__main__":
    main()
