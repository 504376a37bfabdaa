"""A cluster that is none: the machines of `hotset.scale` without Ray, which die on request."""

from types import ModuleType

import pytest


class KilledError(Exception):
    pass


class FakeCluster:
    """Stands in for the cluster that a module of hotset.scale asks; a subclass does the work of its machines.

    asked: the shards of the latest run. dies_after: so many of a run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.asked: list[int] = []
        self.dies_after = 99
        monkeypatch.setattr(module, "connect", lambda address: None)
        monkeypatch.setattr(module, "machines", lambda: ["a"])
        monkeypatch.setattr(module, "check_installed", lambda *parts: None)
