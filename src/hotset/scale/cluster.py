"""A Ray cluster: how to connect to it, and its machines."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hotset.errors import DeviceError, HotsetError, InvalidRequestError, install_command
from hotset.escaping import clause
from hotset.parameters import shown

LOCAL = "local"  # a cluster on this machine, which ends with the process


@dataclass(frozen=True)
class Machine:
    """A node of the cluster.

    names: the node's name first, then others; address: under which other machines reach it; n_bytes: of its
    memory.
    """

    id: str
    names: tuple[str, ...]
    address: str
    n_bytes: int

    @property
    def name(self) -> str:
        return self.names[0]


def check_installed(*parts: str) -> None:
    """Raise HotsetError if the extra is missing. parts: modules that are needed in addition to Ray."""
    if missing := [part for part in ("ray", *parts) if find_spec(part) is None]:
        raise HotsetError(
            f"several machines need {', '.join(missing)}; install it with: {install_command('serve,scale')}"
        )


def connect(address: str | None) -> None:
    """Join the cluster at `address`: "HOST:PORT", or "auto" for the cluster of this machine.

    LOCAL or None starts one here. If this process has already joined one, do nothing. Raises HotsetError if
    no cluster is reachable.
    """
    check_installed()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # report no usage
    # Processes of a cluster use the interpreter and the packages of their machine.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray

    if ray.is_initialized():
        return
    how: dict[str, Any] = {"include_dashboard": False} if address in (None, LOCAL) else {"address": address}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **how)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise HotsetError(
            f"there is no Ray cluster at {clause(shown(address))} ({_first_line(error)}); start one with "
            "'ray start --head', and name its address"
        ) from None


def library() -> Any:
    """Return Ray, untyped: its types do not describe the result of `remote` for a class."""
    import ray

    return ray


def machines() -> list[Machine]:
    """Return the machines of the cluster that are alive."""
    import ray

    found = []
    for node in ray.nodes():
        if node["Alive"]:
            given = (node.get("NodeName"), node["NodeManagerHostname"], node["NodeManagerAddress"])
            names = tuple(dict.fromkeys(name for name in given if name))
            n_bytes = int(node["Resources"].get("memory", 0))
            found.append(Machine(node["NodeID"], names, node["NodeManagerAddress"], n_bytes))
    return sorted(found, key=lambda machine: machine.names)


def machine_named(host: str, among: Sequence[Machine]) -> Machine:
    """Return the machine named `host`. Raises DeviceError for none, InvalidRequestError for several."""
    found = [machine for machine in among if host in machine.names]
    if len(found) == 1:
        return found[0]
    known = ", ".join(machine.name for machine in among)
    if found:
        raise InvalidRequestError(
            f"several machines are called {clause(shown(host))}; name one as 'ray start --node-name' did: "
            f"{known}"
        )
    raise DeviceError(f"no machine of the cluster is called {clause(shown(host))}; it has {known}")


def _first_line(error: BaseException) -> str:
    return clause(str(error).strip().partition("\n")[0] or type(error).__name__)
