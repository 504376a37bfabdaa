"""Statistics of drafted tokens, for JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotset.report.bars import percent


def speculation_dict(
    drafter: str, n_drafted: int, n_accepted: int, step_seconds: Mapping[int, float]
) -> dict[str, Any]:
    """Return the statistics for JSON.

    step_seconds: the time of a step by its number of tokens. acceptance: null if nothing was drafted.
    """
    return {
        "speculate": drafter,
        "drafted_tokens": n_drafted,
        "accepted_tokens": n_accepted,
        "acceptance": n_accepted / n_drafted if n_drafted else None,
        "step_ms": {str(n): 1e3 * seconds for n, seconds in step_seconds.items()},
    }


def speculation_line(facts: Mapping[str, Any], tokens_per_step: float) -> str:
    """Return the statistics as text. facts: from `speculation_dict`."""
    parts = [
        f"speculation {facts['speculate']}",
        f"{tokens_per_step:.2f} tokens per step",
        f"{facts['accepted_tokens']} of {facts['drafted_tokens']} drafted tokens accepted"
        + (f" ({percent(facts['acceptance'])})" if facts["drafted_tokens"] else ""),
    ]
    if facts["step_ms"]:
        times = ", ".join(f"{n}: {ms:.3g} ms" for n, ms in facts["step_ms"].items())
        parts.append(f"a step of n tokens takes {times}")
    return " | ".join(parts)
