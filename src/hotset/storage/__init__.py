"""Where models are kept, what they are called, and how they get here."""

from hotset.storage.names import resolve

__all__ = ["resolve"]
