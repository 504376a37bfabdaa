"""A receiver of reports from long operations."""


class Reporter:
    """A receiver of the reports of a download, a build or a calculation. This one ignores them."""

    def say(self, text: str) -> None:
        """Report one line for the user, such as a choice and its reason, or a source."""

    def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:
        """Report that `done` of `total` bytes or other units of `label` are done (total 0: unknown).

        The first call comes before the work, with the progress of earlier runs. The remaining time is
        estimated from the progress after it.
        """

    def planned(self, placement: object) -> None:
        """Report the placement (placement.table.Placement), before anything is loaded on a device."""
