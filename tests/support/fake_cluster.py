"""A fake cluster: the machines of `hotset.scale` without Ray, which die on request."""

from types import ModuleType

import pytest


class KilledError(Exception):
    pass


class FakeCluster:
    """Replaces the cluster used by a module of hotset.scale.

    A subclass does the work of its machines. asked: the shards of the latest run. dies_after: number of
    shards after which a run dies.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.asked: list[int] = []
        self.dies_after = 99
        monkeypatch.setattr(module, "connect", lambda address: None)
        monkeypatch.setattr(module, "machines", lambda: ["a"])
        monkeypatch.setattr(module, "check_installed", lambda *parts: None)
