"""Counts of a cache of weights: rows of neurons or experts in memory, or experts on a device."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class CacheStats:
    """Counts since the model was loaded, of rows or, if the field says so, of experts of tokens.

    hits: entries that were in the cache when needed. misses: entries that had to be read from disk. streamed:
    experts that a device lacked, copied for one step and computed; on_cpu: experts that the CPU computed
    instead. fetched: copies of experts made in a device's memory, for its cache or for a step, whose tokens
    share them. bytes_read, n_reads: for misses. seconds_waited: for any reads. bytes_streamed, stream_reads:
    of weights that stay in the file.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    n_reads: int = 0
    seconds_waited: float = 0.0
    bytes_streamed: int = 0
    stream_reads: int = 0
    streamed: int = 0
    on_cpu: int = 0
    fetched: int = 0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, before: CacheStats) -> CacheStats:
        """Return the counts since `before`."""
        return CacheStats(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))

    @property
    def needed(self) -> int:
        """Return how many entries were needed: hits and all others."""
        return self.hits + self.misses + self.streamed + self.on_cpu

    @property
    def hit_rate(self) -> float | None:
        """Return the share of needed entries that were in the cache; None if none was needed."""
        return self.hits / self.needed if self.needed else None
