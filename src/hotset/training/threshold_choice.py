"""Chooses the thresholds of a model: at every site the one whose loss is worth the saved bytes.

With one price for the whole model, each site takes the threshold with the least loss + price * bytes read.
This equals the end of a greedy search by loss per saved byte. A bisection of the price reaches the requested
loss or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.model.operations import ExpertLinear, ExpertSum, Ffn, Linear, TransposedLinear
from hotset.model.thresholds import LayerThresholds
from hotset.training.threshold_losses import LayerLosses, sites_of

KINDS = ("attn_in", "attn_out", "ffn_in", "neurons")  # kinds of losses
_BISECTIONS = 60


@dataclass(frozen=True)
class SiteBytes:
    """Bytes of a layer's matrices that its thresholds can save.

    Neurons with a zero gate also save bytes of up, and zero neurons bytes of down. For experts, the bytes are
    of one token: of up, and of down if it is neuron-major.
    """

    attn_in: int = 0
    attn_out: int = 0
    gate: int = 0
    up: int = 0
    down: int = 0

    @property
    def total(self) -> int:
        return self.attn_in + self.attn_out + self.gate + self.up + self.down


@dataclass(frozen=True)
class ThresholdChoice:
    """Thresholds of every layer.

    loss: predicted, in nats of KL, by kind. saved: share of the bytes of the matrices whose inputs can be
    thresholded. kept: per layer, the shares of values that remain, by the names of thresholds (down_in: of
    neurons, whichever threshold makes them zero).
    """

    layers: tuple[LayerThresholds, ...]
    loss: Mapping[str, float]
    saved: float
    kept: tuple[Mapping[str, float], ...] = ()

    @property
    def total_loss(self) -> float:
        return sum(self.loss.values())

    def only(self, kind: str) -> tuple[LayerThresholds, ...]:
        """Return the thresholds of one kind; the others are 0."""
        names = ("gate", "down_in") if kind == "neurons" else (kind,)
        return tuple(
            LayerThresholds(**{name: getattr(layer, name) for name in names}) for layer in self.layers
        )


def bytes_of_sites(graph: Graph, weights: WeightSource) -> list[SiteBytes]:
    """Return the bytes per layer of a graph with a threshold at every site."""
    ops, tensors, found = list(graph.primitives), weights.tensors, []
    for layer, sites in enumerate(sites_of(graph)):
        of: dict[str, int] = {}
        for name in ("attn_in", "attn_out"):
            if (site := sites.get(name)) is not None:
                of[name] = sum(
                    op.matrix_bytes(tensors) for op in ops if isinstance(op, Linear) and op.x == site.out
                )
        ffn = next((op for op in graph.ops if isinstance(op, Ffn) and op.layer == layer), None)
        if ffn is not None and "ffn_in" in sites:
            for name, op in (("gate", ffn.gate), ("up", ffn.up), ("down", ffn.down)):
                if isinstance(op, Linear | TransposedLinear):
                    of[name] = op.matrix_bytes(tensors)
        elif ffn is not None and "gate" in sites:
            if ffn.gate is not None and isinstance(ffn.up, ExpertLinear):
                of["up"] = ffn.up.matrix_bytes(tensors)
            if isinstance(ffn.down, ExpertSum) and ffn.down.neuron_major:
                of["down"] = ffn.down.matrix_bytes(tensors)
        found.append(SiteBytes(**of))
    return found


class ThresholdChoices:
    """All thresholds that a model may have. factors: measured corrections of the losses, by kind."""

    def __init__(
        self, losses: Sequence[LayerLosses], sizes: Sequence[SiteBytes], gated: Sequence[bool]
    ) -> None:
        self.total = sum(size.total for size in sizes)
        self.factors = dict.fromkeys(KINDS, 1.0)
        self._layers = [_LayerChoice(*one) for one in zip(losses, sizes, gated, strict=True)]

    def at_price(self, price: float) -> ThresholdChoice:
        """Return the choice for a price per byte, in nats."""
        chosen = [layer.best(price, self.factors) for layer in self._layers]
        loss = {kind: sum(one.loss.get(kind, 0.0) for one in chosen) for kind in KINDS}
        saved = sum(one.saved for one in chosen) / self.total
        return ThresholdChoice(
            tuple(one.layer_thresholds for one in chosen), loss, saved, tuple(one.kept for one in chosen)
        )

    def with_loss(self, loss: float) -> ThresholdChoice:
        """Return the thresholds that save most with at most this loss."""
        low, _ = self._bracket(lambda choice: choice.total_loss <= loss)
        return self.at_price(math.exp(low))

    def with_share(self, share: float) -> ThresholdChoice:
        """Return the thresholds with the least loss that save this share, or as much as possible."""
        _, high = self._bracket(lambda choice: choice.saved < share)
        return self.at_price(math.exp(high))

    def _bracket(self, fits: Callable[[ThresholdChoice], bool]) -> tuple[float, float]:
        """Return two adjacent prices of which only the lower one fits."""
        low, high = -80.0, 20.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if fits(self.at_price(math.exp(middle))):
                low = middle
            else:
                high = middle
        return low, high


@dataclass(frozen=True)
class _Chosen:
    layer_thresholds: LayerThresholds
    loss: Mapping[str, float]
    saved: float
    kept: Mapping[str, float]


class _LayerChoice:
    def __init__(self, losses: LayerLosses, size: SiteBytes, gated: bool) -> None:
        self.thresholds = losses.thresholds
        n = max(losses.n_tokens, 1)
        self.loss = {kind: values / n for kind, values in losses.loss.items()}

        def share(name: str) -> np.ndarray:
            width = losses.widths["down_in" if name == "neurons" else name]
            return losses.zeroed[name] / (n * width)

        self.zeroed = {name: share(name) for name in losses.zeroed}
        self.saved: dict[str, np.ndarray] = {
            name: self.zeroed[name] * getattr(size, name)
            for name in ("attn_in", "attn_out")
            if name in self.loss
        }
        if "gate" in self.loss:  # of experts
            self.saved["gate"] = self.zeroed["gate"] * (size.up + size.down)
        if "ffn_in" in self.loss:
            of_input = self.zeroed["ffn_in"][:, None, None]
            of_gate = self.zeroed["gate"][None, :, None] if gated else np.zeros((1, 1, 1))
            # Rows of up are skipped by neuron or by channel, whichever saves more.
            self.saved_ffn = (
                size.gate * of_input
                + size.up * np.maximum(of_input, of_gate)
                + size.down * self.zeroed["neurons"][None]
            )

    def best(self, price: float, factors: Mapping[str, float]) -> _Chosen:
        layer_thresholds: dict[str, float] = {}
        loss: dict[str, float] = {}
        kept: dict[str, float] = {}
        saved = 0.0
        for name, own in self.saved.items():
            kind = "neurons" if name == "gate" else name
            at = int(np.argmin(factors[kind] * self.loss[name] - price * own))
            layer_thresholds[name] = float(self.thresholds[name][at])
            loss[kind] = factors[kind] * float(self.loss[name][at])
            kept[name] = 1 - float(self.zeroed[name][at])
            saved += float(own[at])
        if "ffn_in" in self.loss:
            of_input = factors["ffn_in"] * self.loss["ffn_in"]
            of_neurons = factors["neurons"] * self.loss["neurons"]
            worth = of_input[:, None, None] + of_neurons[None] - price * self.saved_ffn
            i, g, d = map(int, np.unravel_index(int(np.argmin(worth)), worth.shape))
            places = {"ffn_in": i, "gate": g, "down_in": d}
            layer_thresholds |= {name: float(self.thresholds[name][at]) for name, at in places.items()}
            loss |= {"ffn_in": float(of_input[i]), "neurons": float(of_neurons[g, d])}
            kept |= {"ffn_in": 1 - float(self.zeroed["ffn_in"][i]), "gate": 1 - float(self.zeroed["gate"][g])}
            kept["down_in"] = 1 - float(self.zeroed["neurons"][g, d])
            saved += float(self.saved_ffn[i, g, d])
        return _Chosen(LayerThresholds(**layer_thresholds), loss, saved, kept)
