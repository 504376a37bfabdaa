"""How what takes long talks to whoever watches."""


class Reporter:
    """Receives what a download or a build has to say; this one is silent."""

    def say(self, text: str) -> None:
        """One line for a person: what is chosen and why, where it comes from."""

    def advance(self, label: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `label` are here (total 0: not known)."""

    def planned(self, placement: object) -> None:
        """What goes on which device (placement.table.Placement), before it is loaded there."""
