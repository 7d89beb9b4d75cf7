"""The router put together: settings in, a serving router out. Everything that starts and ends is in `running_router`.

start   registry dials the workers -> gRPC server (answers at once, UNAVAILABLE while no worker serves)
end     NOT_SERVING, no new requests -> running ones finish within the grace -> leave the workers
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random

import grpc.aio
import structlog

from radixfleet.access import Access
from radixfleet.address import local_address
from radixfleet.background import beside
from radixfleet.certificates import expiry_told
from radixfleet.channel import Health, listen, make_server
from radixfleet.clock import Clock, MonotonicClock
from radixfleet.guard import Guard
from radixfleet.limits import ClientLimits
from radixfleet.metrics_server import MetricsServer
from radixfleet.v1 import fleet_pb2_grpc
from router.api.fleet_watch import FleetWatch
from router.api.passed_orders import PassedOrders
from router.api.scrape_targets import PATH, scrape_targets
from router.config import RouterSettings
from router.console.beginnings import Beginnings
from router.console.feed import Feeder
from router.console.routes import Console
from router.core import Core, running_core
from router.dispatch.gate import Gate
from router.dispatch.lookaside import LookAside
from router.dispatch.record import RequestLog
from router.fleet_sample import fleet_sample
from router.http.app import HttpApp
from router.http.guard import MAX_INCOMING_BYTES
from router.http.openai.routes import openai_routes
from router.http.operations import operations_routes
from router.http.server import HttpServer
from router.index import Sketch
from router.metrics import RouterMetrics, ask_loop
from router.other_processes import OtherProcesses, Place
from router.truthful_health import truthful_health
from router.workers.gathering import Gathering
from router.workers.registry import WorkerRegistry

SERVICES = ("radixfleet.v1.Inference", "radixfleet.v1.Fleet")
_FLUSH_S = 0.5
"""For the last messages of requests that have just ended to reach their clients."""

_log = structlog.get_logger("radixfleet.router")


@dataclass(frozen=True, slots=True)
class Router:
    """A router that listens."""

    address: str
    """host:port of the gRPC server, as one on this machine reaches it."""
    metrics_port: int
    registry: WorkerRegistry
    gathering: Gathering
    gate: Gate
    sketch: Sketch
    look_aside: LookAside
    log: RequestLog
    watch: FleetWatch
    metrics: RouterMetrics
    server: grpc.aio.Server
    health: Health
    http: HttpServer | None
    """None: HTTP is switched off."""

    @property
    def http_port(self) -> int:
        """Where HTTP is served; -1: nowhere."""
        return -1 if self.http is None else self.http.port


@asynccontextmanager
async def running_router(
    settings: RouterSettings, clock: Clock | None = None, random: Random | None = None, place: Place | None = None
) -> AsyncIterator[Router]:
    """A router from listening to stopped. Raises OSError when a port is taken, or a certificate cannot be used.

    `place`: among the processes that share its ports. Leaving the block cuts what still runs: `drain` first.
    """
    clock = clock or MonotonicClock()
    random = random or Random()  # noqa: S311  ties and jitter, no secrets
    metrics = RouterMetrics()
    access = await asyncio.to_thread(_access, settings, metrics, clock)
    other_processes = OtherProcesses(place)
    shared_port = place is not None
    async with AsyncExitStack() as stack:
        stack.push_async_callback(other_processes.close)
        core = await stack.enter_async_context(running_core(settings, access, metrics, other_processes, clock, random))
        server, health = await make_server(
            SERVICES, guard=access.guard, max_message_bytes=settings.max_message_bytes, shared_port=shared_port
        )
        core.add_to(server)
        port = listen(server, settings.host, settings.port, access.tls, shared_port=shared_port)
        metrics_server = _serve_metrics(settings, access, core, metrics, clock)
        # In a thread: a scrape that is under way waits for this loop.
        stack.push_async_callback(asyncio.to_thread, metrics_server.close)
        await stack.enter_async_context(truthful_health(health, core.registry, core.changed))
        await stack.enter_async_context(beside(core.activity.run(), "activity"))
        await stack.enter_async_context(expiry_told(access.tls, metrics.watch_certificate))
        if place is not None:
            await stack.enter_async_context(_heard_by_other_processes(core, place))
        stack.push_async_callback(server.stop, None)
        core.registry.start()
        await server.start()
        http = _http_server(settings, access, core, metrics, clock, shared_port=shared_port)
        if http is not None:
            stack.push_async_callback(http.close)
            http.start()
        yield Router(
            address=local_address(settings.host, port),
            metrics_port=metrics_server.port,
            registry=core.registry,
            gathering=core.gathering,
            gate=core.gate,
            sketch=core.sketch,
            look_aside=core.look_aside,
            log=core.log,
            watch=core.watch,
            metrics=metrics,
            server=server,
            health=health,
            http=http,
        )
    _log.info("router stopped")


def _access(settings: RouterSettings, metrics: RouterMetrics, clock: Clock) -> Access:
    """Reads files. Raises UnusableFile."""
    limits = None
    if settings.max_client_requests is not None or settings.max_client_requests_per_s is not None:
        limits = ClientLimits(
            clock,
            max_requests_per_s=settings.max_client_requests_per_s,
            max_open_requests=settings.max_client_requests,
        )
    access = Access.from_settings(
        settings,
        limits=limits,
        on_refusal=lambda error: metrics.door_refusals.labels(error.code.lower()).inc(),
        clock=clock,
    )
    for warning in access.warnings(settings.host):
        _log.warning(warning)
    return access


def _serve_metrics(
    settings: RouterSettings, access: Access, core: Core, metrics: RouterMetrics, clock: Clock
) -> MetricsServer:
    """Listening."""
    loop = asyncio.get_running_loop()
    metrics.watch_fleet(lambda: fleet_sample(core.registry, core.sketch, clock), loop)

    def targets(asked: str) -> bytes | None:
        ports = core.registry.other_processes.metrics_ports()
        tls = {"router_tls": access.tls is not None, "worker_tls": access.peer_tls is not None}
        return ask_loop(lambda: scrape_targets(core.registry.workers, asked, other_ports=ports, **tls), loop)

    return MetricsServer(metrics.registry, settings.host, settings.metrics_port, {PATH: targets}, access)


def _http_server(
    settings: RouterSettings, access: Access, core: Core, metrics: RouterMetrics, clock: Clock, *, shared_port: bool
) -> HttpServer | None:
    """Not started. None where HTTP is switched off."""
    if settings.http_port < 0:
        return None
    feeder = Feeder(
        core.registry, core.reporter, core.activity, core.sketch, core.hot_prefixes, Beginnings(core.prompts), clock
    )
    max_body_bytes = settings.max_message_bytes
    console = Console(core.registry, core.prompts, core.chooser, feeder, max_body_bytes=max_body_bytes)
    routes = [
        *operations_routes(core.registry, metrics.registry, core.gathering if shared_port else None),
        *console.routes(),
        *openai_routes(core.prompts, core.dispatcher, core.log, max_body_bytes=max_body_bytes),
    ]
    app = HttpApp(routes, access.guard, max(MAX_INCOMING_BYTES, 4 * max_body_bytes))
    return HttpServer(app, settings.host, settings.http_port, tls=access.ssl_context(), shared_port=shared_port)


@asynccontextmanager
async def _heard_by_other_processes(core: Core, place: Place) -> AsyncIterator[None]:
    """While the block lasts, the processes that share our ports can tell us; and we know the workers that they know."""
    server, _ = await make_server(("radixfleet.v1.Fleet",))
    servicer = PassedOrders(*core.fleet_parts, Guard())
    fleet_pb2_grpc.add_FleetServicer_to_server(servicer, server)
    await asyncio.to_thread(place.withdraw)
    server.add_insecure_port(place.socket)
    await server.start()
    core.registry.learn(await core.registry.other_processes.workers())
    try:
        yield
    finally:
        await server.stop(None)
        await asyncio.to_thread(place.withdraw)


async def drain(router: Router, grace_s: float) -> None:
    """Take no new calls; return when the running requests have ended. After the grace they are cut, and told so.

    Open calls that are no requests (someone watches the health) do not hold it up.
    """
    leaving = asyncio.create_task(router.health.leave())
    stopping = asyncio.create_task(router.server.stop(grace_s + _FLUSH_S))
    if router.http is not None:
        router.http.stop_accepting()
    router.gathering.close()
    router.watch.close()
    if not await router.log.wait_until_idle(grace_s):
        router.log.cut()
    await router.server.stop(_FLUSH_S)
    await asyncio.gather(stopping, leaving)
