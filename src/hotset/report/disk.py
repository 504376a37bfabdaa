"""Disk reads under a memory budget: their bytes and their cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotset.report.bars import percent
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.offload.cache_stats import CacheStats
    from hotset.placement.ram import RamPlan


def disk_dict(counts: CacheStats, n_tokens: int, seconds: float, ram: RamPlan) -> dict[str, Any]:
    """Return the disk reads of n_tokens for JSON. seconds: the time that the tokens took.

    disk_ceiling_ts: tokens per second if reading the missing and the streamed bytes took all the time, at
    this disk's rate for reads of their sizes; None if nothing was read.
    """
    n_tokens = max(n_tokens, 1)
    read = [(counts.bytes_read, counts.n_reads), (counts.bytes_streamed, counts.stream_reads)]
    reading = sum(n / ram.disk.rate(n / reads) for n, reads in read if reads)
    return {
        "disk_bytes_per_token": (counts.bytes_read + counts.bytes_streamed) / n_tokens,
        "disk_reads_per_token": (counts.n_reads + counts.stream_reads) / n_tokens,
        "streamed_bytes_per_token": counts.bytes_streamed / n_tokens,
        "cache_hit_rate": counts.hit_rate,
        "disk_wait_share": counts.seconds_waited / seconds if seconds > 0 else None,
        "disk_ceiling_ts": n_tokens / reading if reading else None,
        "ram_budget": ram.limit,
    }


def disk_line(facts: dict[str, Any]) -> str:
    """Return the same as text."""
    hit, waited, ceiling = facts["cache_hit_rate"], facts["disk_wait_share"], facts["disk_ceiling_ts"]
    parts = [f"{percent(hit)} of the needed rows were in memory"] if hit is not None else []
    parts.append(f"{human_size(facts['disk_bytes_per_token'])} read from the disk per token")
    if waited is not None:
        parts.append(f"waiting for it {percent(waited)} of the time")
    if ceiling is not None:
        parts.append(f"the disk alone would allow {ceiling:.2f} t/s")
    return ", ".join(parts)


def ram_table(ram: RamPlan) -> tuple[list[str], list[list[str]]]:
    """Return the parts of the memory budget as a table."""
    share = f"{human_size(ram.neurons)} of {human_size(ram.all_rows)}"
    rest = (ram.ring, ram.kv, ram.workspace, ram.total, ram.limit, ram.least)
    row = [human_size(ram.context), human_size(ram.weights), share, *map(human_size, rest)]
    columns = [">program", ">weights that stay", ">rows of neurons", ">ring", ">cache", ">workspace"]
    return [*columns, ">together", ">budget", ">least"], [row]


def ram_lines(ram: RamPlan, n_ctx: int) -> list[str]:
    """Return sentences on the context, the reads of the disk, and the cost of streaming."""
    how = f"{'io_uring' if ram.disk.ring else 'threads'}, {ram.disk.depth} reads at a time"
    rates = ", ".join(f"{size >> 10} KiB {rate / 1e6:.0f} MB/s" for size, rate in ram.disk.rates)
    lines = [f"The context has {n_ctx} tokens.", f"The disk is read by {how}: {rates}."]
    if ram.streamed:
        lines.append(
            f"{human_size(ram.streamed)} of weights do not fit in this budget and are read again "
            f"in every step: at least {ram.seconds_streaming:.2f} s, at this disk's rate."
        )
    return lines
