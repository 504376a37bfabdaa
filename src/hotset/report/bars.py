"""Bars of a table: a share as a row of block characters, in eighths of a character."""

from __future__ import annotations

_EIGHTHS = "▏▎▍▌▋▊▉█"


def bar(share: float, width: int = 16, *, full: float = 1.0) -> str:
    """Return `share` of `full` as a bar of at most `width` characters; any share above 0 is visible."""
    if not share > 0 or not full > 0:  # also for NaN: nothing was counted
        return ""
    eighths = min(max(round(8 * width * share / full), 1), 8 * width)
    whole, rest = divmod(eighths, 8)
    return _EIGHTHS[-1] * whole + (_EIGHTHS[rest - 1] if rest else "")


def percent(share: float | None) -> str:
    """Return a share as 11% or 0.4%; "-" if nothing was counted."""
    if share is None or share != share:
        return "-"
    return f"{100 * share:.0f}%" if share >= 0.0995 or share == 0 else f"{100 * share:.1f}%"
