"""Data on each token of an answer for the live picture of the page: seconds, bytes and active shares.

A chat stream with `"stream_options": {"include_activity": true}` has an entry for each token, in the chunk
that brings the token's text or a later one:

    {"token": 338, "text": " plants", "seconds": 0.412, "bytes_kv": 1520640, "bytes_touched": 105500000,
     "bytes_total": 143000000, "step_tokens": 1, "active_share": 0.3113, "layers": {
      "active_share": [0.4212, ...], "bytes": [1800000, ...], "cpu_share": [0.0731, ...]}}

docs/guides/serve.md explains each field, and which fields exist with speculative decoding or a device. The
numbers belong to the step that produced the token (Model.summary), and cover all tokens of that step. A
thread of the service computes them: neither the event loop nor the engine waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hotset.api import Model
from hotset.generation import Generation

_DIGITS = 4  # of a share


class ActivityReport:
    """A source of the entries for tokens of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._weight_bytes = sum(model.cost.weight_bytes.values())

    def of_token(self, generation: Generation, i: int) -> dict[str, Any]:
        """Return the entry of the i-th generated token, which the generation has taken."""
        sequence, model = generation.sequence, self._model
        token = sequence.tokens[sequence.n_prompt + i]
        entry: dict[str, Any] = {
            "token": token,
            "text": model.tokenizer.token_text(token),
            "seconds": round(generation.token_times[i] - sequence.started, 6),
            "bytes_kv": round(model.cost.kv_bytes_read(sequence.n_prompt + i - 1, model.kv_type)),
        }
        if i and generation.token_times[i] == generation.token_times[i - 1]:
            entry["drafted"] = True  # the token before it came from the same step
        if i >= len(sequence.step_stats):  # every neuron counts in this model
            return entry | {"bytes_touched": self._weight_bytes, "bytes_total": self._weight_bytes}
        step = sequence.step_stats[i]
        found = model.summary([step])
        assert found is not None
        shares = np.array([layer.active_share for layer in found.layers])
        layers = {
            "active_share": shares.round(_DIGITS).tolist(),
            "bytes": [round(layer.bytes) for layer in found.layers],
        }
        if step.active_on_cpu is not None:
            share = shares * step.active_on_cpu / step.active.clip(1)
            layers["cpu_share"] = share.round(_DIGITS).tolist()
        return entry | {
            "bytes_touched": round(found.bytes_touched_per_token),
            "bytes_total": round(found.bytes_total_per_token),
            "step_tokens": step.n_tokens,
            "active_share": round(found.active_share, _DIGITS),
            "layers": layers,
        }


class ActivityWatch:
    """The tokens of an answer's generations, each sent once."""

    def __init__(self, report: ActivityReport, generations: Sequence[Generation]) -> None:
        self._report = report
        self._generations = generations
        self._n_sent = [0] * len(generations)

    def new(self, index: int) -> list[dict[str, Any]]:
        """Return entries of the tokens taken since the last call. Any thread may call it, one at a time."""
        generation, begin = self._generations[index], self._n_sent[index]
        end = self._n_sent[index] = len(generation.token_times)
        return [self._report.of_token(generation, i) for i in range(begin, end)]
