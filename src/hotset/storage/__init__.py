"""Where models are kept, what they are called, and how they get here."""

from hotset.storage.names import find_created, on_this_machine, resolve

__all__ = ["find_created", "on_this_machine", "resolve"]
