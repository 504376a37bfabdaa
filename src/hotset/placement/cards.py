"""A table of GPUs with facts from data sheets, to plan for a GPU that this machine does not have.

Sources: the product pages and data sheets of NVIDIA and AMD for memory, its bandwidth and the PCIe interface;
developer.nvidia.com/cuda-gpus for compute capabilities; for AMD the LLVM target.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hotset.errors import InvalidRequestError, did_you_mean

_PCIE_4, _PCIE_5 = 31.5, 63.0  # GB/s in one direction, 16 lanes
DEFAULT_LINK = _PCIE_4
DEFAULT = "RTX 4090"  # the card to plan for if the machine has no GPU and none is named


@dataclass(frozen=True)
class Card:
    """A GPU's facts from its data sheet.

    memory: GiB. bandwidth: of its memory, in GB/s. link: of its PCIe lanes in one direction, in GB/s.
    compute: the target of its kernels, such as sm_89.
    """

    name: str
    memory: float
    bandwidth: float
    link: float
    compute: str = ""

    def __str__(self) -> str:
        compute = f", {self.compute}" if self.compute else ""
        return f"{self.name} ({self.memory:g} GiB, {self.bandwidth:g} GB/s, PCIe {self.link:g} GB/s{compute})"


CARDS = (
    Card("RTX 3060", 12, 360, _PCIE_4, "sm_86"),
    Card("RTX 3080", 10, 760, _PCIE_4, "sm_86"),
    Card("RTX 3090", 24, 936, _PCIE_4, "sm_86"),
    Card("RTX 4060", 8, 272, _PCIE_4 / 2, "sm_89"),
    Card("RTX 4060 Ti", 16, 288, _PCIE_4 / 2, "sm_89"),
    Card("RTX 4070", 12, 504, _PCIE_4, "sm_89"),
    Card("RTX 4080", 16, 717, _PCIE_4, "sm_89"),
    Card("RTX 4090", 24, 1008, _PCIE_4, "sm_89"),
    Card("RTX 5060 Ti", 16, 448, _PCIE_5 / 2, "sm_120"),
    Card("RTX 5070", 12, 672, _PCIE_5, "sm_120"),
    Card("RTX 5070 Ti", 16, 896, _PCIE_5, "sm_120"),
    Card("RTX 5080", 16, 960, _PCIE_5, "sm_120"),
    Card("RTX 5090", 32, 1792, _PCIE_5, "sm_120"),
    Card("RTX A6000", 48, 768, _PCIE_4, "sm_86"),
    Card("L4", 24, 300, _PCIE_4, "sm_89"),
    Card("L40S", 48, 864, _PCIE_4, "sm_89"),
    Card("A100 40GB", 40, 1555, _PCIE_4, "sm_80"),
    Card("A100 80GB", 80, 1935, _PCIE_4, "sm_80"),
    Card("H100 PCIe", 80, 2000, _PCIE_5, "sm_90"),
    Card("H100 SXM", 80, 3350, _PCIE_5, "sm_90"),
    Card("H200", 141, 4800, _PCIE_5, "sm_90"),
    Card("RX 7900 XTX", 24, 960, _PCIE_4, "gfx1100"),
    Card("RX 9070 XT", 16, 640, _PCIE_5, "gfx1201"),
)


def find_card(name: str) -> Card:
    """Return the card of a name in any common form: "RTX 4090", "NVIDIA GeForce RTX 4090", "4090".

    Raises InvalidRequestError for a card that is not in the table.
    """
    wanted = _plain(name)
    found = [card for card in CARDS if _plain(card.name) == wanted]
    found = found or [card for card in CARDS if re.sub("^(rtx|rx)", "", _plain(card.name)) == wanted]
    if found:
        return found[0]
    names = {_plain(card.name): card.name for card in CARDS}
    meant = f"{meant} " if (meant := did_you_mean(wanted, names)) else ""
    raise InvalidRequestError(
        f"the GPU {name!r} is not in the table; {meant}it has {', '.join(names.values())}. For another one "
        "give gpu_bandwidth and vram_budget"
    )


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|amd|radeon|[\W_]", "", name.lower())
