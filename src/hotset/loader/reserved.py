"""The memory for a model's drafter, its adapters and its images."""

from __future__ import annotations

from hotset.loader.adapters import adapter_bytes
from hotset.loader.decide import Opened, Reserved
from hotset.loader.images import image_bytes
from hotset.loader.speculate import drafting_bytes


def reserved_for(opened: Opened) -> Reserved:
    """Return the memory to reserve.

    Raises UnsupportedModelError if `speculate` is "mtp" and the file lacks such a layer, and the errors of
    `open_model` for a draft model.
    """
    return Reserved(drafting_bytes(opened), adapter_bytes(opened.settings), image_bytes(opened))
