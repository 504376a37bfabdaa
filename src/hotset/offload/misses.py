"""Who computes the experts that a device's cache lacks: the CPU, or the device, which fetches them.

Both do at the same time, from the same memory: the CPU reads an expert's rows where they lie, the device over
its link. So each expert that the device takes spares the CPU one, and the best share is where both end
together. What decides are measured rates (placement/machine.py) and nothing else, so that the same step is
divided alike on every run; no bit depends on it (triton/exact.py).

Of few tokens an expert costs the CPU a reading, whatever their number. Of many it costs the arithmetic for
each token that wants it, while its way over the link stays what it was: prompts stream most of their experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

STREAM_BYTES = 16 << 20  # of experts that are computed while as many more come: launches should be few


@dataclass(frozen=True)
class MissRates:
    """How fast experts are had, in their bytes per second.

    cpu: read and computed by the CPU for few tokens, while the device works; cpu_beside: while the device
    reads the same memory too. many: bytes times tokens, where the CPU computes for many. link: copied to the
    device by the kernel that fetches, 0: it cannot; link_beside: while the CPU reads too.
    """

    cpu: float
    cpu_beside: float
    many: float
    link: float
    link_beside: float

    def cpu_seconds(self, n_tokens: np.ndarray, n_bytes: int) -> np.ndarray:
        """Of experts of n_bytes, each wanted by so many tokens."""
        return np.asarray(np.maximum(n_bytes / self.cpu, n_tokens * (n_bytes / self.many)))

    def together(self, cpu: float, link: float) -> float:
        """Seconds until both are done, of which each would take so many alone."""
        slowed_cpu, slowed_link = cpu * self.cpu / self.cpu_beside, link * self.link / self.link_beside
        if slowed_cpu <= slowed_link:  # what is left of the link's work is done alone
            return slowed_cpu + (link * (1 - slowed_cpu / slowed_link) if slowed_link else 0.0)
        return slowed_link + cpu * (1 - slowed_link / slowed_cpu)


@dataclass(frozen=True)
class Fetching:
    """How a stage fetches.

    n_spare: slots for it, of each layout of experts. ahead: layer → seconds of what is computed between a
    router that reads what is there before attention and the layer's experts.
    """

    rates: MissRates
    n_spare: int
    ahead: Mapping[int, float] = field(default_factory=dict)


def n_fetched(
    rates: MissRates, n_tokens: np.ndarray, n_bytes: int, most: int | None = None, ahead: float = 0.0
) -> tuple[int, float]:
    """How many of the experts that are missing the device fetches, and the seconds until all are computed.

    n_tokens: [n], how many want each, those first that the device takes first. most: that have room there.
    ahead: seconds that the link has before the CPU can begin.
    """
    n = len(n_tokens)
    of_cpu = rates.cpu_seconds(n_tokens, n_bytes)
    left = np.append(np.cumsum(of_cpu[::-1])[::-1], 0.0)  # of the CPU, by the number that are fetched
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
    """Of 0, 1, ... n_missing experts, how many are fetched where few tokens want them."""
    return [n_fetched(rates, np.ones(n), n_bytes, most, ahead)[0] for n in range(n_missing + 1)]


def expected_seconds(rates: MissRates, n_missing: float, n_bytes: int) -> tuple[float, float]:
    """Of a token that misses so many experts on average: the seconds until they are computed, and how many
    are fetched."""
    low = int(n_missing)
    ends = [n_fetched(rates, np.ones(n), n_bytes) for n in (low, low + 1)]
    share = n_missing - low
    seconds, fetched = (float((1 - share) * ends[0][i] + share * ends[1][i]) for i in (1, 0))
    return seconds, fetched


def tokens_to_stream(rates: MissRates) -> int | None:
    """From how many tokens on that want an expert its way over the link is shorter than the CPU's work; None:
    never."""
    if rates.link <= 0:
        return None
    return max(int(np.ceil(rates.many / rates.link)), 1) if rates.cpu >= rates.link else 1


def n_spare(rates: MissRates | None, n_bytes: int, n_used: int) -> int:
    """Slots beside those of the cache, into which experts of n_bytes are fetched for the step that runs: as
    many as a token's share, and twice what streams at a time; 0 where nothing is fetched."""
    if rates is None or rates.link <= 0:
        return 0
    few = max(fetched_of(rates, n_used, n_bytes))
    return max(few, 2 * max(STREAM_BYTES // n_bytes, 1))
