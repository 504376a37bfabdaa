"""The memory of what is loaded beside a model: what drafts for it, and its adapters."""

from __future__ import annotations

from hotset.loader.adapters import adapter_bytes
from hotset.loader.decide import Opened, Reserved
from hotset.loader.speculate import drafting_bytes


def reserved_for(opened: Opened) -> Reserved:
    """Raises UnsupportedModelError where speculate mtp asks for a layer that the file does not have, and as
    `open_model` for a draft model."""
    return Reserved(drafting_bytes(opened), adapter_bytes(opened.settings))
