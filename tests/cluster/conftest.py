"""A cluster of three Ray nodes on this machine, which the checks of this folder share: a, b and c.

`make test-scale` runs them. They take minutes and start too many processes for the suite.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Processes of the cluster import the same modules as the driver.
_TESTS = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_TESTS), str(_TESTS / "support"), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


class Nodes:
    """The cluster. `kill` ends a node as a power cut does; `add` brings one."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self._nodes: dict[str, Any] = {}
        for name in "abc":
            self.add(name)
        self.address = self.cluster.address

    def add(self, name: str) -> None:
        import ray

        while ray.is_initialized() and any(
            node["Alive"] and node["NodeName"] == name for node in ray.nodes()
        ):
            time.sleep(0.1)  # Ray has not noticed yet that the killed node is gone
        head = {"include_dashboard": False} if not self._nodes else {}
        self._nodes[name] = self.cluster.add_node(
            num_cpus=4, node_name=name, object_store_memory=100 << 20, **head
        )

    def kill(self, name: str) -> None:
        self.cluster.remove_node(self._nodes.pop(name), allow_graceful=False)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    import ray

    from hotset.scale.cluster import connect

    found = Nodes()
    connect(found.address)
    yield found
    ray.shutdown()
    found.cluster.shutdown()
