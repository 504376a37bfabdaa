"""Where models are kept, what they are called, and how they get here."""

from hotset.storage.names import on_this_machine, resolve

__all__ = ["on_this_machine", "resolve"]
