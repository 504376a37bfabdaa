"""Decides who computes experts that a device's cache lacks: the CPU, or the device, which fetches them.

Both work at the same time and from the same memory: the CPU reads an expert's rows in place, the device over
its link. Each expert that the device takes relieves the CPU, and the best split is where both finish
together. The decision depends only on measured rates (placement/machine.py), so each run splits the same step
the same way. The split does not change results (triton/exact.py).

With few tokens an expert costs the CPU one read, whatever their number. With many it costs the arithmetic for
each token, while the transfer over the link stays the same: prompts stream most of their experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

STREAM_BYTES = 16 << 20  # of experts that are computed while as many arrive, so that launches are few


@dataclass(frozen=True)
class MissRates:
    """Rates of experts, in bytes of experts per second.

    cpu: read and computed by the CPU for few tokens; cpu_beside: while the device reads the same memory.
    many: bytes times tokens, computed by the CPU for many tokens. link: copied to the device by its fetch
    kernel; 0: impossible; link_beside: while the CPU also reads.
    """

    cpu: float
    cpu_beside: float
    many: float
    link: float
    link_beside: float

    def cpu_seconds(self, n_tokens: np.ndarray, n_bytes: int) -> np.ndarray:
        """Return the CPU's seconds for experts of n_bytes, each needed by n_tokens tokens."""
        return np.asarray(np.maximum(n_bytes / self.cpu, n_tokens * (n_bytes / self.many)))

    def together(self, cpu: float, link: float) -> float:
        """Return the seconds until both finish, given the time of each by itself."""
        slowed_cpu, slowed_link = cpu * self.cpu / self.cpu_beside, link * self.link / self.link_beside
        if slowed_cpu <= slowed_link:  # then only the link works
            return slowed_cpu + (link * (1 - slowed_cpu / slowed_link) if slowed_link else 0.0)
        return slowed_link + cpu * (1 - slowed_link / slowed_cpu)


@dataclass(frozen=True)
class Fetching:
    """A stage's configuration for fetching experts.

    n_spare: slots for it, per layout of experts. ahead: layer → seconds of computation between a router that
    runs before attention and the layer's experts.
    """

    rates: MissRates
    n_spare: int
    ahead: Mapping[int, float] = field(default_factory=dict)


def n_fetched(
    rates: MissRates, n_tokens: np.ndarray, n_bytes: int, most: int | None = None, ahead: float = 0.0
) -> tuple[int, float]:
    """Return how many of the missing experts the device fetches, and the seconds until all are computed.

    n_tokens: [n], how many tokens need each expert, in the device's order. most: how
    many fit there. ahead: seconds that the link can use before the CPU can begin.
    """
    n = len(n_tokens)
    of_cpu = rates.cpu_seconds(n_tokens, n_bytes)
    left = np.append(np.cumsum(of_cpu[::-1])[::-1], 0.0)  # the CPU's seconds by the number of fetched experts
    if rates.link <= 0:
        return 0, float(left[0])
    one = n_bytes / rates.link
    most = n if most is None else min(most, n)
    seconds = [rates.together(left[k], max(k * one - ahead, 0.0)) for k in range(most + 1)]
    best = int(np.argmin(seconds))
    return best, seconds[best]


def fetched_of(
    rates: MissRates, n_missing: int, n_bytes: int, most: int | None = None, ahead: float = 0.0
) -> list[int]:
    """Return how many of 0, 1, ... n_missing experts are fetched if few tokens need them."""
    return [n_fetched(rates, np.ones(n), n_bytes, most, ahead)[0] for n in range(n_missing + 1)]


def expected_seconds(rates: MissRates, n_missing: float, n_bytes: int) -> tuple[float, float]:
    """Return the expected seconds and fetched experts of a token that misses n_missing experts on average."""
    low = int(n_missing)
    ends = [n_fetched(rates, np.ones(n), n_bytes) for n in (low, low + 1)]
    share = n_missing - low
    seconds, fetched = (float((1 - share) * ends[0][i] + share * ends[1][i]) for i in (1, 0))
    return seconds, fetched


def tokens_to_stream(rates: MissRates) -> int | None:
    """Return the number of tokens per expert from which the link is faster than the CPU; None: never."""
    if rates.link <= 0:
        return None
    return max(int(np.ceil(rates.many / rates.link)), 1) if rates.cpu >= rates.link else 1


def n_spare(rates: MissRates | None, n_bytes: int, n_used: int) -> int:
    """Return the number of extra slots into which experts of n_bytes are fetched for the running step.

    They hold one token's experts and twice STREAM_BYTES; 0 if nothing is fetched.
    """
    if rates is None or rates.link <= 0:
        return 0
    few = max(fetched_of(rates, n_used, n_bytes))
    return max(few, 2 * max(STREAM_BYTES // n_bytes, 1))
