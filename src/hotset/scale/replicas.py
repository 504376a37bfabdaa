"""`hotset serve --replicas`: a deployment of Ray Serve, and the front."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hotset.errors import HotsetError, InvalidRequestError
from hotset.scale.cluster import check_installed, connect, machines
from hotset.scale.front import Front
from hotset.server.listen import SWITCH_SECONDS, Server, listening
from hotset.server.settings import ServerSettings
from hotset.settings import LoadSettings

_APP, _DEPLOYMENT = "hotset", "replica"
_HEALTH_SECONDS = 1.0  # between two checks of a replica
_SICK_SECONDS = 10.0  # after which a silent replica is replaced
_ASK_SECONDS = 3.0
_MOST = 1 << 20  # requests at a replica: its own queue rejects excess requests


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The number of replicas.

    most: the maximum, as requests need them; None: always `least`. by_prefix: False sends a request to any of
    them.
    """

    least: int
    most: int | None = None
    by_prefix: bool = True

    def __post_init__(self) -> None:
        if self.least < 1 or (self.most is not None and self.most < self.least):
            raise InvalidRequestError("there is at least one replica, and at most no fewer than at least")


def serve_replicas(
    model: str,
    loading: LoadSettings,
    settings: ServerSettings,
    names: tuple[str, ...],
    replicas: Replicas,
    address: str | None,
    report: Callable[[str], None],
) -> None:
    """Serve a model like `listen`, with replicas on the Ray cluster at `address`.

    model: a name or path that each machine has.
    """
    check_installed("aiohttp")
    sys.setswitchinterval(SWITCH_SECONDS)
    with listening(settings) as bound:
        connect(address)
        places = _Serve(replicas, loading.max_sequences)
        secret = secrets.token_urlsafe(32)
        try:
            front = asyncio.run(_listen(places, model, loading, settings, names, secret, bound, report))
        finally:
            places.close(settings.grace_seconds)
    if front.error is not None:
        raise front.error


async def _listen(
    places: _Serve,
    model: str,
    loading: LoadSettings,
    settings: ServerSettings,
    names: tuple[str, ...],
    secret: str,
    bound: Any,
    report: Callable[[str], None],
) -> Front:
    front = Front(places, settings, secret)

    async def deploy() -> None:
        try:
            arguments = (model, replace(loading, progress=None), settings, names, secret)
            await asyncio.get_running_loop().run_in_executor(None, places.deploy, arguments, settings)
            front.ready.set()
            report(f"{names[0]} is loaded by {len(await places.all())} replicas")
        except Exception as error:
            front.error = (
                error
                if isinstance(error, HotsetError)
                else HotsetError(
                    f"the replicas could not begin ({str(error).strip().rpartition(chr(10))[2]})"
                )
            )

    task = asyncio.create_task(deploy())
    await Server(front, bound, lambda where: report(f"listening on {where}"), front.app()).serve(
        sockets=[bound]
    )
    task.cancel()
    return front


class _Serve:
    """The replicas of Ray Serve; the ReplicaLookup of the front."""

    def __init__(self, replicas: Replicas, n_answers: int) -> None:
        self._replicas, self._n_answers = replicas, n_answers
        self._handle: Any = None

    def deploy(self, arguments: tuple[Any, ...], settings: ServerSettings) -> None:
        """Start the replicas, and wait until they have loaded the model. Raises an error that prevents it."""
        from ray import serve

        from hotset.scale.replica import Replica
        from hotset.scale.router import PrefixRouter

        replicas = self._replicas
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")  # clients connect to the front
        how: dict[str, Any] = {"num_replicas": replicas.least}
        if replicas.most is not None:
            how = {
                "autoscaling_config": {
                    "min_replicas": replicas.least,
                    "max_replicas": replicas.most,
                    "target_ongoing_requests": self._n_answers,
                }
            }
        deployment: Any = serve.deployment(
            Replica,
            name=_DEPLOYMENT,
            max_ongoing_requests=_MOST,
            max_replicas_per_node=math.ceil((replicas.most or replicas.least) / len(machines())),
            ray_actor_options={"num_cpus": 0},  # a replica uses the cores that its options name
            health_check_period_s=_HEALTH_SECONDS,
            health_check_timeout_s=_SICK_SECONDS,
            graceful_shutdown_timeout_s=settings.grace_seconds,
            request_router_config={
                "request_router_class": PrefixRouter,
                "request_router_kwargs": {"by_prefix": replicas.by_prefix},
            },
            **how,
        )
        self._handle = serve.run(deployment.bind(*arguments), name=_APP, route_prefix=None)

    def hold(self, keys: list[str]) -> Any:
        return self._handle.options(method_name="hold", stream=True).remote(keys)

    async def all(self) -> list[tuple[str, str]]:
        try:
            found = self._handle.broadcast("about").results_async(
                timeout_s=_ASK_SECONDS, return_exceptions=True
            )
            return sorted(one for one in await found if isinstance(one, tuple))
        except Exception:  # Ray raises many kinds while replicas start and end
            return []

    def close(self, seconds: float) -> None:
        """End the replicas, within about `seconds`."""

        def delete() -> None:
            from ray import serve

            with suppress(Exception):  # the cluster may be gone
                serve.delete(_APP)

        if self._handle is not None:
            ending = threading.Thread(target=delete, daemon=True)
            ending.start()
            ending.join(seconds + _ASK_SECONDS)
