"""Writes two models of one vocabulary whose greedy tokens are the same at a planted share of positions.

usage: python bench/draft_pair.py TARGET.gguf DRAFT.gguf [--shape 7b] [--draft-shape 135m] [--agree 0.7]
       python bench/speculation.py TARGET.gguf --speculate draft --draft DRAFT.gguf --only "free text"

Every matrix has its real size and type. But the layers add little to the residual stream, and row f(t) of the
output matrix is the embedding of t, where f is one cycle through all words: so f(t) follows t. In the draft
model some rows are swapped, so that other words follow some tokens. Acceptance is measured by real
verification.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from synthetic import SHAPES, Shape, add_llama, random_matrix

from hotset.formats.gguf import GGUFWriter
from hotset.formats.quants import GGMLType

N_VOCAB, N_SPECIAL = 32000, 259  # control tokens and bytes
N_CTX = 8192
ADDED = 0.02  # root mean square of each addition of a layer to a stream of 1


def followers(agree: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the token that follows each token, int64 [N_VOCAB], in the target and in the draft model."""
    rng = np.random.default_rng(seed)
    target = np.arange(N_VOCAB)
    cycle = rng.permutation(np.arange(N_SPECIAL, N_VOCAB))
    target[cycle] = np.roll(cycle, -1)
    draft = target.copy()
    wrong = rng.choice(cycle, round((1 - agree) * len(cycle)), replace=False)
    draft[wrong] = target[np.roll(wrong, 1)]
    return target, draft


def write(path: Path, shape: Shape, type: GGMLType, follows: np.ndarray, seed: int) -> None:
    """Write a model. follows: the token after each token. Memory: one matrix at a time."""
    writer = GGUFWriter(path, "llama")
    add_llama(writer, shape, type, N_VOCAB, None, N_CTX)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        embedding = random_matrix(type, shape.d, N_VOCAB, seed, pool, 1.0)
        output = embedding.copy()
        output[follows[N_SPECIAL:]] = embedding[N_SPECIAL:]
        embedding[:N_SPECIAL] = embedding[N_SPECIAL : 2 * N_SPECIAL]  # bytes are followed like words
        for i, (name, (n_in, n_out)) in enumerate(shape.matrices(N_VOCAB)):

            def fill(name: str = name, n_in: int = n_in, n_out: int = n_out, i: int = i) -> np.ndarray:
                if name in ("token_embd", "output"):
                    return embedding if name == "token_embd" else output
                added = ADDED if name.endswith(("attn_output", "ffn_down")) else 1.0
                return random_matrix(type, n_in, n_out, (seed, i), pool, added * n_in**-0.5)

            writer.add_tensor(f"{name}.weight", fill, type, (n_in, n_out))
        writer.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--draft-shape", choices=SHAPES, default="135m")
    parser.add_argument("--type", default="q4_0", help="of all matrices (q4_0)")
    parser.add_argument(
        "--agree", type=float, default=0.7, help="share of tokens with the same next token in both (0.7)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target, draft = followers(args.agree, args.seed)
    write(args.target, SHAPES[args.shape], GGMLType[args.type.upper()], target, args.seed)
    write(args.draft, SHAPES[args.draft_shape], GGMLType[args.type.upper()], draft, args.seed + 1)


if __name__ == "__main__":
    main()
