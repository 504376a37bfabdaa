"""The energy use of the processor: the RAPL counters of Intel and AMD, on Linux."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Zone:
    """A counter of microjoules, which wraps around to 0 after `largest`."""

    counter: Path
    largest: int

    def read(self) -> int:
        return int(self.counter.read_text())


class EnergyCounters:
    """The energy counters of this machine's processors, and of their memory if it has any.

    They include all programs. A counter must be read at least once per wrap: at 200 W, every 20 minutes.

    Raises OSError, with a remedy in its text, if they do not exist or are not readable.
    """

    def __init__(self) -> None:
        zones = [zone for zone in sorted(POWERCAP.glob("intel-rapl:*")) if _counts(zone)]
        if not zones:
            raise OSError(
                "this machine has no energy counters (RAPL in /sys/class/powercap, on Linux); "
                "virtual machines have none"
            )
        try:
            self._zones = [_zone(zone) for zone in zones]
            self._last = [zone.read() for zone in self._zones]
        except PermissionError:
            raise OSError(
                f"the energy counters are not readable: sudo chmod a+r {POWERCAP}/intel-rapl:*/energy_uj"
            ) from None

    def joules(self) -> float:
        """Return the joules since the last call, or since the counters were created."""
        now = [zone.read() for zone in self._zones]
        counted = zip(self._zones, now, self._last, strict=True)
        total = sum(n - last if n >= last else n - last + zone.largest for zone, n, last in counted)
        self._last = now
        return total / 1e6


def _counts(zone: Path) -> bool:
    """Return whether a zone is a processor or memory; core zones are inside these, psys includes both."""
    try:
        name = (zone / "name").read_text().strip()
    except OSError:
        return False
    return name.startswith("package") or name == "dram"


def _zone(folder: Path) -> Zone:
    return Zone(folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()))
