"""What the processor counts of the energy that it takes: RAPL of Intel and AMD, as Linux shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class _Zone:
    """A counter of microjoules, which begins again at 0 behind `largest`."""

    counter: Path
    largest: int

    def read(self) -> int:
        return int(self.counter.read_text())


class EnergyCounters:
    """The counters of this machine's processors, and of their memory where it has some.

    They count what all programs take. Fewer than two turns of a counter may lie between two reads: at 200 W
    one takes 20 minutes.

    Raises OSError, with what to do in its text, where there are none or they may not be read.
    """

    def __init__(self) -> None:
        zones = [zone for zone in sorted(POWERCAP.glob("intel-rapl:*")) if _counts(zone)]
        if not zones:
            raise OSError(
                "this machine shows no counters of energy (RAPL in /sys/class/powercap, on Linux); "
                "virtual machines have none"
            )
        try:
            self._zones = [_zone(zone) for zone in zones]
            self._last = [zone.read() for zone in self._zones]
        except PermissionError:
            raise OSError(
                f"the counters of energy may not be read: sudo chmod a+r {POWERCAP}/intel-rapl:*/energy_uj"
            ) from None

    def joules(self) -> float:
        """Since the last call, or since this was made."""
        now = [zone.read() for zone in self._zones]
        counted = zip(self._zones, now, self._last, strict=True)
        total = sum(n - last if n >= last else n - last + zone.largest for zone, n, last in counted)
        self._last = now
        return total / 1e6


def _counts(zone: Path) -> bool:
    """Whether it is a processor's or the memory's: cores are within the one, psys is around both."""
    try:
        name = (zone / "name").read_text().strip()
    except OSError:
        return False
    return name.startswith("package") or name == "dram"


def _zone(folder: Path) -> _Zone:
    return _Zone(folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()))
