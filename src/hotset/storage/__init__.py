"""Where models are kept, what they are called, and how they get here."""

from hotset.storage.store import resolve

__all__ = ["resolve"]
