"""Writes models of the shapes of Nemotron 3 Nano and BitNet 2B4T, in which some neurons do not fire.

usage: python bench/squared_relu.py OUT.gguf --shape nemotron-3-nano --idle 0.9 [--layers 32]
       python bench/squared_relu.py OUT.gguf --shape bitnet-2b4t --idle 0.6

Each neuron's row has weights on channels that are the same for every token, which act as its bias. Nemotron's
matrices are Q4_0, BitNet's TQ2_0 and its embedding Q6_K. Other weights are random, as in synthetic.py. For
BitNet's files llama.cpp computes SiLU, but it reads the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import NormalDist

import numpy as np
from planted import CONSTANT
from synthetic import ATTENTION_VARIANCE, EPSILON, FFN_VARIANCE, Shape, SparseKind, SparseModel, add_keys

from hotset.formats.encode import encode
from hotset.formats.gguf import GGUFWriter
from hotset.formats.quants import TYPES, GGMLType

NANO = Shape(2688, 1856, 52, 32, 2, experts=128, used=6, head=128)
NANO_LAYERS = ("MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME").ljust(NANO.layers, "E")
SHARED_FF, EXPERT_SCALE = 3712, 2.5
STATE_HEADS, STATE_HEAD, STATE, GROUPS, KERNEL = 64, 64, 128, 8, 4
BITNET = Shape(2560, 6912, 30, 20, 5, head=128)
SHAPES = {"nemotron-3-nano": NANO, "bitnet-2b4t": BITNET}


def fourth_moment(quantile: float) -> float:
    """Return the mean square of a squared ReLU's result for an input that is N(quantile, 1)."""
    x = np.linspace(-8, 8, 1 << 14)
    density = np.exp(-((x - quantile) ** 2) / 2) / math.sqrt(2 * math.pi)
    return float((np.maximum(x, 0) ** 4 * density).sum() * (x[1] - x[0]))


class NemotronH(SparseModel):
    """A model with Nemotron 3 Nano's layers, each of which is a state space, attention or experts."""

    def add_state_space(self, i: int) -> None:
        blk, d, inner = f"blk.{i}", self.shape.d, STATE_HEADS * STATE_HEAD
        n_conv = inner + 2 * GROUPS * STATE
        self.norm(f"{blk}.attn_norm", np.ones(d))
        self.matrix(f"{blk}.ssm_in", d, inner + n_conv + STATE_HEADS)
        rng, add = self._rng(f"{blk}.ssm"), self.writer.add_tensor
        conv = rng.standard_normal((n_conv, KERNEL), np.float32) * KERNEL**-0.5
        add(f"{blk}.ssm_conv1d.weight", conv, GGMLType.F32, (KERNEL, n_conv))
        add(f"{blk}.ssm_conv1d.bias", np.zeros(n_conv, np.float32), GGMLType.F32)
        add(f"{blk}.ssm_dt.bias", rng.uniform(-4, -2, STATE_HEADS).astype(np.float32), GGMLType.F32)
        decay = -rng.uniform(1, 16, (STATE_HEADS, 1)).astype(np.float32)
        add(f"{blk}.ssm_a", decay, GGMLType.F32, (1, STATE_HEADS))
        add(f"{blk}.ssm_d", np.ones((STATE_HEADS, 1), np.float32), GGMLType.F32, (1, STATE_HEADS))
        ones = np.ones((GROUPS, inner // GROUPS), np.float32)
        add(f"{blk}.ssm_norm.weight", ones, GGMLType.F32, (inner // GROUPS, GROUPS))
        spread = (ATTENTION_VARIANCE / self.shape.layers / inner) ** 0.5  # after a norm
        self.matrix(f"{blk}.ssm_out", inner, d, spread, silent_rows=len(CONSTANT))

    def add_attention(self, i: int) -> None:
        blk, d, heads = f"blk.{i}", self.shape.d, self.shape.heads * self.shape.head
        self.norm(f"{blk}.attn_norm", np.ones(d))
        self.matrix(f"{blk}.attn_q", d, heads)
        for name in ("attn_k", "attn_v"):
            self.matrix(f"{blk}.{name}", d, self.shape.kv_heads * self.shape.head)
        spread = (ATTENTION_VARIANCE / self.shape.layers / heads) ** 0.5
        self.matrix(f"{blk}.attn_output", heads, d, spread, silent_rows=len(CONSTANT))

    def add_experts(self, i: int, idle: float) -> None:
        blk, shape, d = f"blk.{i}", self.shape, self.shape.d
        quantile = NormalDist().inv_cdf(1 - idle)
        bias = quantile * self.stream(i).sigma * math.sqrt(1 - len(CONSTANT) / d)
        self.norm(f"{blk}.attn_norm", np.ones(d))
        router = self._rng(f"{blk}.router").standard_normal((shape.experts, d), np.float32) * d**-0.5
        self.writer.add_tensor(f"{blk}.ffn_gate_inp.weight", router, GGMLType.F32, (d, shape.experts))
        zeros = np.zeros(shape.experts, np.float32)
        self.writer.add_tensor(f"{blk}.exp_probs_b.bias", zeros, GGMLType.F32)
        half = FFN_VARIANCE / shape.layers / 2 / fourth_moment(quantile)  # experts, and the shared one
        for name, ff, n, weight in (
            ("exps", shape.ff, shape.experts, EXPERT_SCALE / shape.used**0.5),
            ("shexp", SHARED_FF, 0, 1.0),
        ):
            first = {"first_channels": CONSTANT, "first_scale": bias / len(CONSTANT), "experts": n}
            self.matrix(f"{blk}.ffn_up_{name}", d, ff, **first)
            spread = (half / ff) ** 0.5 / weight
            self.matrix(f"{blk}.ffn_down_{name}", ff, d, spread, silent_rows=len(CONSTANT), experts=n)


def write_nemotron_h(path: Path, shape: Shape, idle: float, n_vocab: int, seed: int = 0) -> None:
    """Write the first shape.layers layers. Memory: one matrix of all experts at a time."""
    name, layers = "nemotron_h_moe", NANO_LAYERS[: shape.layers]
    writer = GGUFWriter(path, name)
    of_layers = {
        "feed_forward_length": [shape.ff if kind == "E" else 0 for kind in layers],
        "attention.head_count_kv": [shape.kv_heads if kind == "*" else 0 for kind in layers],
    }
    add_keys(writer, name, shape, GGMLType.Q4_0, n_vocab, None, 8192, of_layers)
    for key, value in {
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": EPSILON,
        "attention.layer_norm_epsilon": EPSILON,
        "expert_count": shape.experts,
        "expert_used_count": shape.used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": shape.ff,
        "expert_shared_feed_forward_length": SHARED_FF,
        "expert_weights_norm": True,
        "expert_weights_scale": EXPERT_SCALE,
        "expert_gating_func": 2,  # a sigmoid
        "ssm.conv_kernel": KERNEL,
        "ssm.inner_size": STATE_HEADS * STATE_HEAD,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": STATE_HEADS,
        "ssm.group_count": GROUPS,
    }.items():
        writer.add(f"{name}.{key}", value)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        model = NemotronH(writer, shape, GGMLType.Q4_0, SparseKind(name, name, gated=False), pool, seed)
        model.add_ends(n_vocab, 0)
        for i, kind in enumerate(layers):
            if kind == "E":
                model.add_experts(i, idle)
            elif kind == "*":
                model.add_attention(i)
            else:
                model.add_state_space(i)
        writer.write()


N_CONSTANT = 64  # BitNet's channels that are the same for every token: the first half of a group of codes
_TERNARY = np.array(
    [sum(c << 2 * i for i, c in enumerate(codes)) for codes in itertools.product(range(3), repeat=4)]
)


def ternary(
    n_in: int, n_out: int, rng: np.random.Generator, n_first: int = 0, silent_rows: int = 0
) -> np.ndarray:
    """Return weights -s, 0 and s in TQ2_0, with a root mean square of 1 / sqrt(n_in): uint8 [n_out, bytes].

    n_first: this many constant channels have the weight -s, and the others of them 0.
    """
    layout = TYPES[GGMLType.TQ2_0].block
    assert layout is not None
    blocks = np.empty((n_out, n_in // 256), layout)
    blocks["qs"] = _TERNARY.astype(np.uint8)[rng.integers(0, 81, blocks["qs"].shape, np.uint8)]
    blocks["d"] = (1.5 / n_in) ** 0.5
    if n_first:
        codes = np.where(np.arange(N_CONSTANT) < n_first, 0, 1).astype(np.uint8).reshape(2, 32)
        blocks["qs"][:, 0, :32] = blocks["qs"][:, 0, :32] & 0xF0 | codes[0] | codes[1] << 2
    blocks["d"][:silent_rows] = 0
    return blocks.reshape(n_out, -1).view(np.uint8).reshape(n_out, -1)


def write_bitnet(path: Path, shape: Shape, idle: float, n_vocab: int, seed: int = 0) -> None:
    name, d, ff = "bitnet", shape.d, shape.ff
    writer = GGUFWriter(path, name)
    add_keys(writer, name, shape, GGMLType.TQ2_0, n_vocab, None, 4096)
    for key, value in {
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": EPSILON,
        "rope.freq_base": 5e5,
        "hidden_activation": "relu2",
    }.items():
        writer.add(f"{name}.{key}", value)
    # The stream's variance hardly grows, because the sub-norms' results of 1 pass a matrix of small weights.
    n_first = round(-NormalDist().inv_cdf(1 - idle) * math.sqrt((d - N_CONSTANT) * 2 / 3))
    rng = np.random.default_rng(seed)

    def embedding() -> np.ndarray:
        parts = []
        for first in range(0, n_vocab, 4096):
            values = rng.standard_normal((min(4096, n_vocab - first), d), np.float32)
            values[:, :N_CONSTANT] = 1
            parts.append(encode(values, GGMLType.Q6_K))
        return np.concatenate(parts)

    writer.add_tensor("token_embd.weight", embedding, GGMLType.Q6_K, (d, n_vocab))
    vectors = {"output_norm": d}
    for i in range(shape.layers):
        vectors |= {f"blk.{i}.{norm}": d for norm in ("attn_norm", "attn_sub_norm", "ffn_norm")}
        vectors[f"blk.{i}.ffn_sub_norm"] = ff
    for vector, size in vectors.items():
        weight = (ATTENTION_VARIANCE / shape.layers) ** 0.5 if "sub_norm" in vector else 1.0
        writer.add_tensor(f"{vector}.weight", np.full(size, weight, np.float32), GGMLType.F32)
    for matrix, (n_in, n_out) in shape.matrices(n_vocab):
        if not matrix.startswith("blk."):
            continue
        first = n_first if matrix.endswith("ffn_gate") else 0
        silent = N_CONSTANT if matrix.endswith(("attn_output", "ffn_down")) else 0

        def fill(
            n_in: int = n_in, n_out: int = n_out, first: int = first, silent: int = silent
        ) -> np.ndarray:
            return ternary(n_in, n_out, rng, first, silent)

        writer.add_tensor(f"{matrix}.weight", fill, GGMLType.TQ2_0, (n_in, n_out))
    writer.write()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--idle", type=float, default=0.9, help="share of neurons that do not fire (0.9)")
    parser.add_argument("--layers", type=int, help="write only the first layers")
    parser.add_argument("--n-vocab", type=int, default=32000, help="tokens (32000)")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.layers:
        shape = Shape(**vars(shape) | {"layers": args.layers})
    start = time.perf_counter()
    write = write_bitnet if args.shape == "bitnet-2b4t" else write_nemotron_h
    write(args.out, shape, args.idle, args.n_vocab)
    print(f"{args.out}: {args.out.stat().st_size / 1e9:.2f} GB, {time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
