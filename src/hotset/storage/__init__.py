"""Storage of models: the local store, their names, and their download."""

from hotset.storage.names import find_created, on_this_machine, resolve

__all__ = ["find_created", "on_this_machine", "resolve"]
