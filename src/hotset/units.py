"""Numbers in a readable form."""

from __future__ import annotations


def human_size(size: float) -> str:
    """Return a size in the units of options and settings, powers of 1024: 98.4 MiB, 4.3 GiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def size_of(part: float, whole: float) -> str:
    """Return "1.3 of 4.1 GiB", with the unit only once if both have the same."""
    first, second = human_size(part), human_size(whole)
    if first == second:
        return second
    number, unit = first.split(" ")
    return f"{number if second.endswith(f' {unit}') else first} of {second}"


def human_count(count: float) -> str:
    """Return a number of parameters, such as 134.52 M or 7.24 B."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return str(int(count))
