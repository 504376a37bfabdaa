"""Estimates the loss of every threshold of a model, from one forward and one backward pass.

Setting small values to zero changes the logits. To second order, the resulting divergence is half the square
of the change of the log-probability of a token drawn from the output (the expectation of such squares is the
Fisher information). This change is the gradient times the change of the values, which is known for every
threshold at once: minus the values below it. With g the gradient of the log-probabilities of drawn tokens for
the values x of a site:

    loss(t) = mean over tokens of (Σ over |x_i| < t of g_i x_i)² / 2        in nats of KL per token

All sites and thresholds of a model together cost about four runs over a text, while measuring each would take
a run per layer, site and threshold. The joint loss of several sites is assumed to be the sum; thresholds.py
measures how well that holds.

The two sites of an FFN's neurons overlap (a neuron with a zero gate is also zero for the down projection), so
their loss is a function of pairs of thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hotset.backends.torch.graph import TorchGraph
from hotset.model.operations import Threshold

if TYPE_CHECKING:
    from hotset.model.graph import Graph
    from hotset.model.operations import Value

INPUTS = ("attn_in", "attn_out", "ffn_in")
NEURONS = ("gate", "down_in")  # two sites that overlap
# Candidate thresholds of a site, as the shares of its values in a text that they set to zero.
_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)
_SHARES_GATE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_SHARES_OF = dict.fromkeys((*INPUTS, "down_in"), _SHARES) | {"gate": _SHARES_GATE}


def sites_of(graph: Graph) -> list[dict[str, Threshold]]:
    """Return each layer's thresholds in a graph, by their names in LayerThresholds."""
    sites: list[dict[str, Threshold]] = [{} for _ in range(graph.n_layer)]
    for op in graph.primitives:
        if isinstance(op, Threshold):
            sites[op.layer][op.site] = op
    return sites


@dataclass
class LayerLosses:
    """The losses of one layer; sums over n_tokens.

    thresholds: of each site, ascending from 0, [n]. loss, zeroed: of each input, [n]: Σ of squares / 2, and
    values set to zero. "neurons" has, [n_gate, n_down], the loss of neurons, and the neurons that are zero
    for the down projection; "gate" has the neurons with a zero gate, [n_gate]. For experts, whose down
    projection has no site, "gate" is like an input.
    """

    thresholds: dict[str, np.ndarray]
    widths: dict[str, int]
    loss: dict[str, np.ndarray]
    zeroed: dict[str, np.ndarray]
    n_tokens: int = 0

    @classmethod
    def empty(cls, thresholds: dict[str, np.ndarray], widths: dict[str, int]) -> LayerLosses:
        has_both = set(NEURONS) <= thresholds.keys()
        shapes: dict[str, tuple[int, ...]] = {
            name: (len(values),) for name, values in thresholds.items() if not (has_both and name in NEURONS)
        }
        zeroed = dict(shapes)
        if has_both:
            gate, down = (len(thresholds[name]) for name in NEURONS)
            shapes["neurons"] = zeroed["neurons"] = (gate, down)
            zeroed["gate"] = (gate,)
        return cls(
            thresholds, widths,
            {name: np.zeros(shape) for name, shape in shapes.items()},
            {name: np.zeros(shape) for name, shape in zeroed.items()},
        )  # fmt: skip

    def only(self, names: Collection[str], share: float | None = None) -> LayerLosses:
        """Return a copy with thresholds only for `names`; with a share, only the nearest one to it."""
        at = {name: self._offers_of(name, name in names, share) for name in self.thresholds}

        def taken(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            pairs = {"neurons": NEURONS}
            return {
                name: one[np.ix_(*(at[place] for place in pairs.get(name, (name,))))]
                for name, one in values.items()
            }

        return LayerLosses(
            taken(self.thresholds), self.widths, taken(self.loss), taken(self.zeroed), self.n_tokens
        )

    def _offers_of(self, name: str, offered: bool, share: float | None) -> np.ndarray:
        """Return the indexes of a site's remaining thresholds."""
        if not offered:
            return np.zeros(1, np.int64)
        if share is None:
            return np.arange(len(self.thresholds[name]))
        values = self.zeroed["neurons"][0] if name == "down_in" else self.zeroed[name]
        wanted = share * self.n_tokens * self.widths[name]
        nearest: np.ndarray = np.argmin(np.abs(values - wanted), keepdims=True)
        return nearest

    def add_input(self, name: str, x: Tensor, gradient: Tensor) -> None:
        """Count the values x [n_tokens, width] of an input with their gradient."""
        bins = _bins(x, self.thresholds[name])
        n = len(self.thresholds[name])
        # Bin b is between thresholds b and b + 1: threshold i zeroes the bins below i.
        moved = _before(_sums(x * gradient, bins, n))
        self.loss[name] += _half_squares(moved)
        self.zeroed[name] += np.concatenate(([0], np.cumsum(np.bincount(bins.flatten(), minlength=n))))[:n]

    def add_neurons(self, gate: Tensor, neurons: Tensor, gradient: Tensor) -> None:
        """Count the neurons [n_tokens, n_ff] with their gradient, and the activated gates."""
        n_gate, n_down = (len(self.thresholds[name]) for name in NEURONS)
        of_gate, of_down = _bins(gate, self.thresholds["gate"]), _bins(neurons, self.thresholds["down_in"])
        bins = of_gate * n_down + of_down
        sums = _sums(neurons * gradient, bins, n_gate * n_down).view(-1, n_gate, n_down)
        # The values in bins at or above both thresholds are kept.
        kept = sums.flip(1, 2).cumsum(1).cumsum(2).flip(1, 2)
        self.loss["neurons"] += _half_squares(kept[:, :1, :1] - kept)
        counts = np.bincount(bins.flatten(), minlength=n_gate * n_down).reshape(n_gate, n_down)
        above = counts[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1]
        self.zeroed["neurons"] += above[0, 0] - above
        self.zeroed["gate"] += above[0, 0] - above[:, 0]


def _bins(x: Tensor, thresholds: np.ndarray) -> Tensor:
    """Return the index of the largest threshold that is ≤ each |x|: int64, shaped like x."""
    return torch.bucketize(x.abs(), torch.from_numpy(thresholds).to(x.dtype), right=True) - 1


def _sums(values: Tensor, bins: Tensor, n: int) -> Tensor:
    """Return for each row the sum of the values of each bin: float64 [n_rows, n]."""
    return torch.zeros(len(values), n, dtype=torch.float64).scatter_add_(1, bins, values.double())


def _before(sums: Tensor) -> Tensor:
    """Return for each column the sum of the columns before it."""
    return torch.nn.functional.pad(sums.cumsum(1)[:, :-1], (1, 0))


def _half_squares(moved: Tensor) -> np.ndarray:
    return (moved.square().sum(0) / 2).numpy()


class LossPass:
    """A collection of the losses of a model's layers, text by text.

    model: of a graph with a threshold at every site that may have one. first: a text [n_tokens] whose values
    determine the candidate thresholds.
    """

    def __init__(self, model: TorchGraph, first: Tensor) -> None:
        self.model = model
        self.sites = sites_of(model.graph)
        self._at = {
            threshold.out.id: (i, name) for i, of in enumerate(self.sites) for name, threshold in of.items()
        }
        self._watched = [value for value in model.graph.values if value.id in self._at]
        self.layers = self._offers(first)

    def _offers(self, first: Tensor) -> list[LayerLosses]:
        found: list[dict[str, np.ndarray]] = [{} for _ in self.sites]

        def look(id: int) -> Callable[[Tensor], Tensor]:
            def edit(x: Tensor) -> Tensor:
                layer, name = self._at[id]
                at = torch.tensor(_SHARES_OF[name][1:])
                # Sorting, because torch's quantile limits the number of elements.
                ordered = x.abs().flatten().sort().values
                places = (at * len(ordered)).long()
                found[layer][name] = np.concatenate(([0.0], np.unique(ordered[places].numpy())))
                return x

            return edit

        edits = {value.id: look(value.id) for value in self._watched}
        self.model.streams(first[None], self.model.edited(edits))
        return [
            LayerLosses.empty(thresholds, {name: site.x.width for name, site in sites.items()})
            for thresholds, sites in zip(found, self.sites, strict=True)
        ]

    def add(self, tokens: Tensor, seed: int) -> None:
        """Add a text, int64 [n_tokens]; seed: of the tokens that are drawn from the model's output."""
        generator = torch.Generator().manual_seed(seed)

        def loss(logits: Tensor) -> Tensor:
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            return logits.log_softmax(-1).gather(1, drawn).sum()

        held: dict[tuple[int, str], Tensor] = {}

        def found(value: Value, x: Tensor, gradient: Tensor) -> None:
            layer, name = self._at[value.id]
            losses = self.layers[layer]
            if name in NEURONS and set(NEURONS) <= self.sites[layer].keys():
                # The gradient of the neurons is used; of the gate only the values.
                held[layer, name] = x if name == "gate" else torch.stack((x, gradient))
                if all((layer, one) in held for one in NEURONS):
                    neurons, of_neurons = held.pop((layer, "down_in"))
                    losses.add_neurons(held.pop((layer, "gate")), neurons, of_neurons)
            else:
                losses.add_input(name, x, gradient)

        text = tokens[None]
        self.model.gradients(text, self.model.streams(text), loss, self._watched, found)
        for layer in self.layers:
            layer.n_tokens += len(tokens)
