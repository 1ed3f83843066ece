"""Replicas of the server on Ray Serve, on one machine or a cluster.

Each replica is the application that one process serves (`create_app`), in an actor; a front
(`create_gateway`) hands requests to them. `hybridspec serve --replicas N` runs the front itself. On
a cluster `app` is the whole application:

    serve run hybridspec.serve.ray:app model=MODEL
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import ray
from prometheus_client.core import Metric
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Scope

from hybridspec.engine import LLM
from hybridspec.errors import UnsupportedError
from hybridspec.serve.api import Api
from hybridspec.serve.app import Server, create_app
from hybridspec.serve.gateway import ReplicaLost, create_gateway
from hybridspec.serve.lease import Leased, Leases, ReplicaClient
from hybridspec.serve.options import ServeOptions
from hybridspec.serve.ray_router import PrefixRouter

__all__ = ["ClusterOptions", "RayReplicas", "app", "replicas", "start_here"]

_APPLICATION = "hybridspec"
_CLOSING_S = 5.0  # for answers to leave once --drain is over
_SPARE = 16  # requests that a replica takes over its limit, to turn them away itself
_OBJECTS_BYTES = 256 << 20  # Ray's memory for what travels: bodies and pieces of answers


class Replica:
    """One engine and its server in an actor.

    Requests come over HTTP, since what Serve's own calls cost for each piece of a stream is
    several times what serving costs. Serve hands out leases: a call that is open as long as the
    request runs, by which it counts requests, drains a replica and scales.

    Args:
        load_model: returns the engine.
        options: how the server behaves.
        host: address to listen on, for the fronts; None takes the node's.
        version: any text; replicas of another one are restarted when it is deployed.
    """

    async def __init__(  # type: ignore[misc]  # Serve waits for it
        self,
        load_model: Callable[[], LLM],
        options: Mapping[str, Any],
        host: str | None,
        version: str,
    ) -> None:
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        labels = {"engine": str(context.rank.rank), "replica": self._name}
        behaviour = ServeOptions.of(options, labels=labels)
        app = create_app(load_model, behaviour)
        self._api: Api = app.state.served
        self._leases = Leases()
        app.add_middleware(Leased, leases=self._leases)
        host = host or ray.util.get_node_ip_address()
        self._server = Server(app, host=host, port=0, drain_s=behaviour.drain_s)
        self._serving = asyncio.ensure_future(self._server.serve())
        await self._server.loaded()  # Serve sends requests from here on
        assert self._server.address is not None
        self._url = "http://{}:{}".format(*self._server.address)

    async def lease(self, key: str | None) -> AsyncGenerator[tuple[str, str, str], None]:
        """Yield name, address and password for one request, and end when that is over.

        Args:
            key: name of its prefix; the router has read it.
        """
        password, is_over = self._leases.make()
        yield self._name, self._url, password
        await self._leases.wait(password, is_over)

    async def metrics(self) -> list[Metric]:
        return self._api.collect()

    async def load(self) -> int:
        return self._api.stepper.num_requests

    def check_health(self) -> None:
        """Raise if this replica is to be replaced."""
        if not self._api.stepper.is_alive:
            raise RuntimeError("the engine's thread has ended")

    async def __del__(self) -> None:
        """Let go of the engine; Serve calls it once nothing runs."""
        if hasattr(self, "_serving"):
            self._server.end()
            await self._serving


def replicas(
    load_model: Callable[[], LLM],
    options: Mapping[str, Any],
    deployment: Mapping[str, Any],
    *,
    host: str | None = None,
    version: str = "",
) -> serve.Application:
    """Return the replicas as an application of Serve.

    Args:
        load_model: returns a replica's engine; called in its actor.
        options: fields of `ServeOptions`, or of `ServeOptions.of`.
        deployment: options of the deployment, such as num_replicas, autoscaling_config,
            ray_actor_options or placement_group_bundles; they go to Serve as they are.
        host, version: see `Replica`.
    """
    behaviour = ServeOptions.of(options)
    defaults = {
        "name": "Replica",
        "max_ongoing_requests": behaviour.max_requests + _SPARE,
        "graceful_shutdown_timeout_s": behaviour.drain_s + _CLOSING_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": 1,
        "request_router_config": RequestRouterConfig(request_router_class=PrefixRouter),
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
    }
    made = serve.deployment(Replica).options(**{**defaults, **deployment})
    return made.bind(load_model, dict(options), host, version)


class RayReplicas:
    """Reaches replicas through a handle of Serve; see `gateway.Replicas`.

    Args:
        handle: of the deployment.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)
        self._client: ReplicaClient | None = None

    async def answer(
        self, key: str | None, scope: Scope, body: bytes
    ) -> AsyncGenerator[str | Message, None]:
        if self._client is None:
            self._client = ReplicaClient()  # on the event loop that it belongs to
        lease, is_taken = self._streaming.lease.remote(key), False
        try:
            name, url, password = await anext(lease)
            yield name
            async with contextlib.aclosing(
                self._client.answer(url, password, scope, body)
            ) as messages:
                async for message in messages:
                    is_taken = True  # the lease ends with the request
                    yield message
        except (RayActorError, TaskCancelledError) as error:
            raise ReplicaLost(str(error)) from error
        finally:
            if not is_taken:
                lease.cancel()

    async def metrics(self) -> Sequence[Sequence[Metric]]:
        return await self._everywhere("metrics")

    async def loads(self) -> Sequence[int]:
        return await self._everywhere("load")

    async def _everywhere(self, method: str) -> list[Any]:
        """What a method returns in each replica; one that has just ended is left out."""
        found = await self._handle.broadcast(method).results_async(return_exceptions=True)
        return [one for one in found if not isinstance(one, BaseException)]

    def restart(self) -> None:
        raise UnsupportedError("restart: on a cluster, deploy another version")

    async def close(self) -> None:
        """Leave the replicas to the cluster."""
        if self._client is not None:
            await self._client.close()


class _OwnReplicas(RayReplicas):
    """Replicas in a Ray of their own, which ends with them."""

    def __init__(self, make: Callable[[str], serve.Application]) -> None:
        self._make = make
        self._version = 0
        super().__init__(self._run())

    def _run(self) -> DeploymentHandle[Any]:
        application = self._make(str(self._version))
        return serve.run(application, name=_APPLICATION, route_prefix=None)

    def restart(self) -> None:
        self._version += 1
        self._run()

    async def close(self) -> None:
        await super().close()
        await run_in_threadpool(_end_all)


def _end_all() -> None:
    serve.delete(_APPLICATION)  # waits until the replicas have let go of everything
    ray.shutdown()


def start_here(
    load_model: Callable[[], LLM],
    options: Mapping[str, Any],
    *,
    num_replicas: int,
    uses_gpus: bool,
) -> RayReplicas:
    """Start Ray on this machine and the replicas in it; waits until all have loaded.

    Args:
        load_model, options: as in `replicas`.
        num_replicas: how many.
        uses_gpus: whether each takes a GPU, or its share of the processor's cores.

    Raises:
        UnsupportedError: if they do not start; the message says why.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    share = {"num_cpus": _cores_of_each(num_replicas), "num_gpus": int(uses_gpus)}
    deployment = {"num_replicas": num_replicas, "ray_actor_options": share}
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=_OBJECTS_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        return _OwnReplicas(
            lambda version: replicas(
                load_model, options, deployment, host="127.0.0.1", version=version
            )
        )
    except (RuntimeError, RayServeException) as error:
        ray.shutdown()
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else type(error).__name__
        raise UnsupportedError(f"--replicas: they do not start: {reason}") from error


def _cores_of_each(num_replicas: int) -> float:
    """Cores that a replica takes, whole ones where there are enough."""
    cores = (os.cpu_count() or 1) / num_replicas
    return int(cores) if cores >= 1 else int(100 * cores) / 100


class ClusterOptions(BaseModel):
    """What `app` takes, from the command line or a config file of Serve.

    Attributes:
        model: folder or id; each node needs it, or a way to the hub.
        engine: options of `LLM`.
        server: fields of `ServeOptions`, with `api_key_file` in place of the keys.
        replicas: options of their deployment: num_replicas, autoscaling_config, ray_actor_options,
            placement_group_bundles, max_replicas_per_node, ...
        fronts: options of the deployment that takes the requests.
        version: any text; another one restarts the replicas one after the other.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "bundled"
    engine: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    replicas: dict[str, Any] = Field(default_factory=dict)
    fronts: dict[str, Any] = Field(default_factory=dict)
    version: str = ""


class Front:
    """The gateway in an actor, for a cluster."""

    def __init__(self, handle: DeploymentHandle[Any], most_bytes: int) -> None:
        self._handle = handle
        self._most_bytes = most_bytes

    def __serve_build_asgi_app__(self) -> Any:
        return create_gateway(lambda: RayReplicas(self._handle), most_bytes=self._most_bytes)


def app(args: dict[str, Any]) -> serve.Application:
    """Return the whole application, for `serve run`, `serve deploy` and `serve.run`.

    Args:
        args: fields of `ClusterOptions`.
    """
    given = ClusterOptions.model_validate(args)
    options = {"model_name": given.model, **given.server}
    behaviour = ServeOptions.of(options)
    model, engine = given.model, given.engine
    behind = replicas(lambda: LLM(model, **engine), options, given.replicas, version=given.version)
    defaults = {
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 10_000,
        "graceful_shutdown_timeout_s": behaviour.drain_s + _CLOSING_S,
        "max_surge_percent": 100,  # the next one is there before the last one goes
    }
    front = serve.deployment(serve.ingress()(Front)).options(**{**defaults, **given.fronts})
    return front.bind(behind, behaviour.limits.body_bytes)
