"""Writes a real small MoE model from a dense one: FFNs split into experts by co-activation, with a router.

usage: python bench/split_experts.py MODEL.gguf TEXT OUT.gguf [--experts 64] [--used 8] [--shared 512]

Its purpose is its routes on real text (bench/expert_cache.py). No training recovers the loss of the split;
--score TEXT prints it as perplexity. A neuron's contribution is |value| times the norm of its column of down,
over --tokens tokens of TEXT. In each layer:

- the neurons that contribute most on average are shared: every token uses them;
- the others become experts of equal size, so that neurons that are active together are in one expert: by
  balanced k-means of their contributions (rows of length 1, random projections), an assignment problem per
  round;
- the router is distilled: a linear layer on the FFN's input that is trained by logistic regression to name,
  for each token, the experts that contribute most.

Every chosen expert has the weight 1, as in the dense model: the router's sigmoid has such a large bias that
it is 1 in float32, and the highest scores are chosen before the sigmoid.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

import hotset
from hotset.formats.gguf import GGUFFile, GGUFWriter, copy_metadata
from hotset.formats.quants import GGMLType, dequantize

WIDTH = 64  # of the random projections that compare neurons
CERTAIN = 40.0  # a score at which the sigmoid is 1
ROW = 512  # tokens per sequence


def balanced_kmeans(points: np.ndarray, n_clusters: int, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """Return each point's cluster; all have equal size. points: float [n, width], rows of length 1."""
    size = len(points) // n_clusters
    assert size * n_clusters == len(points), f"{len(points)} neurons do not make {n_clusters} equal experts"
    centres = points[rng.choice(len(points), n_clusters, replace=False)]
    clusters = np.zeros(len(points), np.int64)
    for _ in range(rounds):
        cost = -np.repeat(points @ centres.T, size, axis=1)  # a column for each place in a cluster
        found = linear_sum_assignment(cost)[1] // size
        if (found == clusters).all():
            break
        clusters = found
        sums = np.stack([points[clusters == i].sum(axis=0) for i in range(n_clusters)])
        centres = sums / (np.linalg.norm(sums, axis=1, keepdims=True) + 1e-12)
    return clusters


def distilled_router(
    inputs: np.ndarray, contributions: np.ndarray, n_used: int, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Train a router; return weights [n_experts, width], bias [n_experts], and recall.

    recall: on held-out tokens, the share of the experts with the largest contributions that it chooses.
    """
    torch.manual_seed(seed)
    x, y = torch.from_numpy(inputs), torch.from_numpy(contributions)
    wanted = torch.zeros_like(y).scatter_(1, y.topk(n_used, dim=1).indices, 1.0)
    n_train = len(x) * 7 // 8
    layer = torch.nn.Linear(x.shape[1], y.shape[1])
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = torch.randint(n_train, (512,))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(layer(x[batch]), wanted[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        named = layer(x[n_train:]).topk(n_used, dim=1).indices
        recall = wanted[n_train:].gather(1, named).mean()
    return layer.weight.detach().numpy(), layer.bias.detach().numpy(), float(recall)


class Splitter:
    """A writer of the MoE model of a dense, gated model of the llama architecture."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.n_experts, self.n_used, self.n_shared = arguments.experts, arguments.used, arguments.shared
        self.steps, self.rounds, self.seed = arguments.steps, arguments.rounds, arguments.seed

    def write(self, model: hotset.Model, rows: np.ndarray, target: Path) -> None:
        gguf, config = model.gguf, model.config
        assert (config.architecture, config.layers[0].gated) == ("llama", True), (
            "a gated model of that family"
        )
        n_routed = config.n_ff[0] - self.n_shared
        writer = GGUFWriter(target, "llama")
        keys = {
            "llama.expert_count": self.n_experts,
            "llama.expert_used_count": self.n_used,
            "llama.expert_feed_forward_length": n_routed // self.n_experts,
            "llama.expert_shared_feed_forward_length": self.n_shared,
            "llama.expert_gating_func": 2,  # sigmoid
            "llama.expert_weights_norm": False,
            "general.name": f"{config.architecture} split into {self.n_experts} experts",
        }
        copy_metadata(gguf, writer, without=(*keys, "general.architecture"))
        for key, value in keys.items():
            writer.add(key, value)
        for name, info in gguf.tensors.items():
            if not any(f".ffn_{part}.weight" in name for part in ("gate", "up", "down")):
                writer.add_tensor(name, gguf.data(name), info.type, info.shape)
        for layer in range(config.n_layer):
            self._split(writer, model, rows, layer)
        writer.write()

    def _split(self, writer: GGUFWriter, model: hotset.Model, rows: np.ndarray, layer: int) -> None:
        began, rng = time.monotonic(), np.random.default_rng([self.seed, layer])
        names = (f"blk.{layer}.ffn_norm", f"blk.{layer}.ffn_act")
        seen = [model.taps(row.tolist(), names) for row in rows]
        inputs, values = (np.concatenate([one[name] for one in seen]) for name in names)
        gate, up, down = (
            matrix(model.gguf, f"blk.{layer}.ffn_{part}.weight") for part in ("gate", "up", "down")
        )
        values = np.abs(values) * np.linalg.norm(down, axis=0)
        order = np.argsort(-values.mean(axis=0), kind="stable")
        shared, routed = np.sort(order[: self.n_shared]), np.sort(order[self.n_shared :])
        points = values[:, routed].T @ rng.standard_normal((len(values), WIDTH)).astype(np.float32)
        points /= np.linalg.norm(points, axis=1, keepdims=True) + 1e-12
        clusters = balanced_kmeans(points, self.n_experts, self.rounds, rng)
        members = routed[np.argsort(clusters, kind="stable")]  # by expert
        each = (values[:, members] ** 2).reshape(len(values), self.n_experts, -1).sum(axis=2)
        weight, bias, recall = distilled_router(inputs, each, self.n_used, self.steps, self.seed + layer)
        shape = (self.n_experts, -1)
        half = GGMLType.F16
        for part, rows_of in (("gate", gate), ("up", up), ("down", down.T)):
            expert = rows_of[members].reshape(*shape, rows_of.shape[1])
            common = rows_of[shared]
            if part == "down":
                expert, common = expert.swapaxes(1, 2), common.T
            name = f"blk.{layer}.ffn_{part}"
            writer.add_tensor(f"{name}_exps.weight", np.ascontiguousarray(expert, np.float32), half)
            if self.n_shared:
                writer.add_tensor(f"{name}_shexp.weight", np.ascontiguousarray(common, np.float32), half)
        router = f"blk.{layer}.ffn_gate_inp"
        writer.add_tensor(f"{router}.weight", weight, GGMLType.F32)
        writer.add_tensor(f"{router}.bias", (bias + CERTAIN).astype(np.float32), GGMLType.F32)
        print(
            f"layer {layer}: recall of the router {recall:.2f}, {time.monotonic() - began:.0f} s", flush=True
        )


def matrix(gguf: GGUFFile, name: str) -> np.ndarray:
    """Return float32 [rows, columns]."""
    info = gguf.tensors[name]
    return dequantize(gguf.data(name), info.type, info.shape)


def score(path: Path, text: Path, chunks: int) -> float:
    """Return the perplexity over the beginning of a text."""
    with hotset.load(path, device="cpu", n_ctx=ROW) as model:
        return model.perplexity(text.read_text("utf-8"), n_ctx=ROW, chunks=chunks).ppl


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=64, help="of a layer")
    parser.add_argument("--used", type=int, default=8, help="of a token")
    parser.add_argument("--shared", type=int, default=512, help="neurons that every token uses")
    parser.add_argument("--tokens", type=int, default=8 * ROW, help="of the text")
    parser.add_argument("--rounds", type=int, default=8, help="of k-means")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the router")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score", type=Path, help="print the perplexity of this text, before and after")
    parser.add_argument("--chunks", type=int, default=8, help="of it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with hotset.load(arguments.model, device="cpu", n_ctx=ROW) as model:
        tokens = model.tokenizer.encode(arguments.text.read_text("utf-8"), add_special=True)
        rows = model.tokenizer.rows(tokens[: arguments.tokens], ROW)
        Splitter(arguments).write(model, rows, arguments.out)
    if arguments.score is not None:
        before, after = (
            score(path, arguments.score, arguments.chunks) for path in (arguments.model, arguments.out)
        )
        print(f"perplexity {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    main()
