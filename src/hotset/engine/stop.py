"""Stop strings in streamed text: text that may still become a stop string is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """A search for the first stop string in a stream of text, across the borders of its pieces.

    The string whose last character comes first wins, so the result does not depend on how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self.matched: str | None = None  # the stop string that was found
        self._held = ""

    def push(self, text: str) -> str:
        """Add the next piece; return the text that may be shown. Sets `stopped` and `matched`."""
        if not self.stops:
            return text
        if self.stopped:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.stopped, self.matched = True, text[start:end]
            self._held = ""
            return text[:start]
        n_held = self._possible_start(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the beginning of a stop string."""
        longest = min(max(map(len, self.stops)) - 1, len(text))
        for n in range(longest, 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self.stops):
                return n
        return 0
