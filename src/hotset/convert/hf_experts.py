"""The experts in a config.json: their number, their width, and how a router chooses among them."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.hf_values import flag, integer
from hotset.errors import UnsupportedModelError
from hotset.model.architectures import ARCHITECTURES
from hotset.model.keys import SCORINGS


class HFMoE:
    """Sizes of experts.

    n: their number; n_used: per token; n_ff: neurons of one; n_ff_shared: neurons of the shared expert, which
    every token passes too; 0 without one.
    """

    def __init__(self, raw: dict[str, Any], hf_class: HFClass, entries: HFExperts, n_layer: int) -> None:
        self.raw, self.entries, self.n_layer = raw, entries, n_layer
        self.row = ARCHITECTURES[hf_class.architecture]
        self.n = integer(raw, entries.n)
        self.n_used = integer(raw, entries.n_used, high=self.n)
        self.n_ff = integer(raw, entries.ff, high=1 << 22)
        self.n_ff_shared = 0
        if entries.ff_shared is not None and raw.get(entries.ff_shared) != 0:
            self.n_ff_shared = integer(raw, entries.ff_shared, high=1 << 22)
        elif entries.n_shared is not None and raw.get(entries.n_shared):
            self.n_ff_shared = integer(raw, entries.n_shared, high=1 << 10) * self.n_ff

    def keys(self) -> dict[str, Any]:
        """Return the keys of the GGUF file."""
        experts = self.entries
        keys: dict[str, Any] = {"expert_count": self.n, "expert_used_count": self.n_used}
        if experts.says_ff:
            keys["expert_feed_forward_length"] = self.n_ff
        if experts.ff_shared is not None:
            keys["expert_shared_feed_forward_length"] = self.n_ff_shared
        if experts.n_shared is not None:
            keys["expert_shared_count"] = self.n_ff_shared // self.n_ff
            if experts.says_shared_ff:
                keys["expert_shared_feed_forward_length"] = self.n_ff_shared
        if (n_dense := self._n_dense()) or experts.first_dense:
            keys["leading_dense_block_count"] = n_dense
        if experts.groups is not None and self._heeds_groups():
            for key, entry in zip(
                ("expert_group_count", "expert_group_used_count"), experts.groups, strict=True
            ):
                keys[key] = integer(self.raw, entry, 1, self.n)
        return keys | self._routing_keys()

    def _n_dense(self) -> int:
        """Return the number of leading layers without experts.

        mlp_layer_types decides, as in transformers, which writes the other entry too. Raises
        UnsupportedModelError if a layer without experts follows a layer with experts.
        """
        experts, kinds = self.entries, self.raw.get("mlp_layer_types")
        if isinstance(kinds, list):
            n_dense = kinds.count("dense")
            if kinds == ["dense"] * n_dense + ["sparse"] * (self.n_layer - n_dense):
                return n_dense
        if kinds is not None:
            raise UnsupportedModelError(
                "mlp_layer_types in config.json must name dense layers first and sparse layers after them, "
                f"{self.n_layer} in all, not {str(kinds)[:60]}"
            )
        if experts.n_dense is None:
            return 1 if experts.first_dense else 0
        return integer(self.raw, experts.n_dense, high=self.n_layer) if self.raw.get(experts.n_dense) else 0

    def _routing_keys(self) -> dict[str, Any]:
        experts, keys = self.entries, dict[str, Any]()
        scoring = self.row.experts
        if experts.normalised is not None:
            keys["expert_weights_norm"] = flag(self.raw, experts.normalised)
        elif scoring is not None and scoring.scoring == "sigmoid":  # llama.cpp takes False without the key
            keys["expert_weights_norm"] = scoring.normalised
        if experts.softmax is not None:
            keys["expert_gating_func"] = 1 if flag(self.raw, experts.softmax) else 2
        elif experts.scoring is not None:
            keys["expert_gating_func"] = next(n for n, name in SCORINGS.items() if name == experts.scoring)
        elif scoring is not None and scoring.scoring == "sigmoid":
            keys["expert_gating_func"] = 2
        return keys

    def _heeds_groups(self) -> bool:
        experts = self.entries
        if experts.methods is None:
            return True
        method = self.raw.get("topk_method") or next(iter(experts.methods))
        if not isinstance(method, str) or method not in experts.methods:
            raise UnsupportedModelError(
                f"topk_method set to {str(method)[:60]!r} in config.json is not supported"
            )
        return experts.methods[method]
