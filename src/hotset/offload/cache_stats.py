"""What a cache of weights did: rows of neurons or experts in memory, experts on a device."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class CacheStats:
    """Counts since the model was loaded, of rows or, where its name says so, of the experts of tokens.

    hits: were in the cache when they were needed. misses: had to be read from the disk. streamed: experts
    that a device without them fetched and computed; on_cpu: that the CPU computed for it. fetched: copies of
    experts that were made in a device's memory, for its cache or for a step, whose tokens share them.
    bytes_read, n_reads: for misses. seconds_waited: for whatever was read. bytes_streamed, stream_reads: of
    weights that stay in the file.
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
        """What was done after `before`."""
        return CacheStats(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))

    @property
    def needed(self) -> int:
        """Hits and all others."""
        return self.hits + self.misses + self.streamed + self.on_cpu

    @property
    def hit_rate(self) -> float | None:
        """Share of what was needed that was in the cache; None where nothing was."""
        return self.hits / self.needed if self.needed else None
