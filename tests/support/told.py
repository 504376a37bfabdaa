"""A reporter that keeps all reports, and can interrupt a run at one of them."""

from __future__ import annotations

from hotset.reporter import Reporter


class Told(Reporter):
    """said: the lines. steps: (label, done, total). stop_at: beginning of a label, and how much is done."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[str, int, int]] = []
        self.stop_at = stop_at

    def say(self, text: str) -> None:
        self.said.append(text)

    def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:
        self.steps.append((label, done, total))
        if self.stop_at is not None and label.startswith(self.stop_at[0]) and done >= self.stop_at[1]:
            raise KeyboardInterrupt
