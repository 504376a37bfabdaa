"""Numbers as people read them."""

from __future__ import annotations


def human_size(size: float) -> str:
    """Decimal, as disks and the hub count: 98.4 MB, 4.3 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def size_of(part: float, whole: float) -> str:
    """1.3 of 4.1 GB; the unit once where both have it."""
    first, second = human_size(part), human_size(whole)
    if first == second:
        return second
    number, unit = first.split(" ")
    return f"{number if second.endswith(f' {unit}') else first} of {second}"


def human_count(count: float) -> str:
    """134.52 M, 7.24 B: numbers of parameters."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return str(int(count))
