"""What takes long reports to a Reporter."""


class Reporter:
    """Receives what a download, a build or a calculation reports; this one is silent."""

    def say(self, text: str) -> None:
        """One line for a person: what is chosen and why, where it comes from."""

    def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:
        """`done` of `total` bytes, or other units, of `label` are done (total 0: not known).

        The first call comes before the work, with what an earlier run left done: the time left follows from
        how long the rest takes.
        """

    def planned(self, placement: object) -> None:
        """What goes on which device (placement.table.Placement), before it is loaded there."""
