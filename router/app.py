"""The router put together: settings in, a serving router out. Everything that starts and ends is in `running_router`.

start   registry dials the workers -> gRPC server (answers at once, UNAVAILABLE while no worker serves)
end     NOT_SERVING, no new requests -> running ones finish within the grace -> leave the workers
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

import grpc.aio
import structlog
from starlette.routing import BaseRoute

from radixfleet.access import Access
from radixfleet.address import local_address, publish
from radixfleet.certificates import expiry_told
from radixfleet.channel import Health, listen, make_server
from radixfleet.clock import Clock, MonotonicClock
from radixfleet.limits import ClientLimits
from radixfleet.metrics_server import Page, serve_metrics
from radixfleet.telemetry import setup_logging
from radixfleet.tracing import setup_tracing
from radixfleet.v1 import fleet_pb2_grpc, inference_pb2_grpc
from radixfleet.watched_file import UnusableFile
from router.api.fleet import FleetServicer
from router.api.inference import InferenceServicer
from router.api.prompts import Prompts
from router.api.report import Reporter
from router.api.scrape_targets import PATH, scrape_targets
from router.config import RouterSettings
from router.console.beginnings import Beginnings
from router.console.feed import Feeder
from router.console.routes import Console
from router.dispatch.chooser import Chooser
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.gate import Gate
from router.dispatch.link_stream import Links
from router.dispatch.lookaside import LookAside
from router.dispatch.record import RequestLog
from router.http.app import HttpApp
from router.http.guard import HttpGuard
from router.http.openai.routes import openai_routes
from router.http.operations import operations_routes
from router.http.server import HttpServer
from router.index import HotPrefixes, Sketch
from router.metrics import FleetSample, RouterMetrics, WorkerSample, ask_loop
from router.policies import make_policy
from router.workers.activity import FleetActivity
from router.workers.engine_settings import engine_key, named_tokenizers
from router.workers.registry import WorkerRegistry
from router.workers.state import WorkerState
from router.workers.surroundings import Surroundings
from router.workers.tokenizers import TokenizerStore

SERVICES = ("radixfleet.v1.Inference", "radixfleet.v1.Fleet")
_FLUSH_S = 0.5
"""For the last messages of requests that have just ended to reach their clients."""
_HEALTH_PERIOD_S = 1.0
"""Eligibility changes with events, of which `_Health` is told, and with time, when a breaker's pause is over."""

_log = structlog.get_logger("radixfleet.router")


@dataclass(frozen=True, slots=True)
class Router:
    """A router that listens."""

    address: str
    """host:port of the gRPC server, as one on this machine reaches it."""
    metrics_port: int
    registry: WorkerRegistry
    gate: Gate
    sketch: Sketch
    look_aside: LookAside
    log: RequestLog
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
    settings: RouterSettings, clock: Clock | None = None, random: Random | None = None
) -> AsyncIterator[Router]:
    """A router from listening to stopped. Raises OSError when a port is taken, or a certificate cannot be used.

    Leaving the block cuts what still runs: `drain` first.
    """
    clock = clock or MonotonicClock()
    random = random or Random()  # noqa: S311  ties and jitter, no secrets
    loop = asyncio.get_running_loop()
    metrics = RouterMetrics()
    access = await asyncio.to_thread(_access, settings, metrics, clock)
    async with AsyncExitStack() as stack:
        threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        sketch = Sketch()
        look_aside = LookAside(settings.lease_s, metrics)
        stack.callback(look_aside.close)
        tokenizers = TokenizerStore(threads, await asyncio.to_thread(named_tokenizers, settings.tokenizers))
        changed = asyncio.Event()
        surroundings = Surroundings(
            settings,
            sketch,
            tokenizers,
            metrics,
            look_aside,
            access,
            clock,
            random,
            engine_key(settings.engine_api_key, clock),
        )
        registry = WorkerRegistry(surroundings, changed.set, lambda: gate.stir())
        stack.push_async_callback(registry.close)
        activity = FleetActivity(lambda: registry.workers, clock)
        hot_prefixes = HotPrefixes(clock, samples=settings.console_prompts)
        chooser = Chooser(registry, sketch, make_policy(settings.policy), metrics, random, hot_prefixes)
        gate = Gate(chooser, max_waiting=settings.max_queued_requests, metrics=metrics, clock=clock)
        links = Links(registry.channel, registry.generator, streams=settings.link)
        stack.push_async_callback(links.close)
        log = RequestLog(metrics, clock)
        prompts = Prompts(
            registry,
            tokenizers,
            threads,
            metrics,
            max_tokens=settings.max_prompt_tokens,
            isolate_clients=settings.isolate_clients,
        )
        dispatcher = Dispatcher(
            gate,
            links.to,
            max_retries=settings.max_retries,
            retry_ratio=settings.retry_ratio,
            log=log,
            metrics=metrics,
            clock=clock,
        )
        server, health = await make_server(SERVICES, guard=access.guard, max_message_bytes=settings.max_message_bytes)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(prompts, dispatcher, log), server)
        reporter = Reporter(registry, activity, gate, log, sketch, settings.policy)
        fleet_pb2_grpc.add_FleetServicer_to_server(
            FleetServicer(registry, prompts, chooser, gate, look_aside, reporter), server
        )
        port = listen(server, settings.host, settings.port, access.tls)
        metrics.watch_fleet(lambda: _sample(registry, sketch, clock), loop)
        pages = {PATH: _scrape_targets(registry, access, loop)}
        metrics_server = serve_metrics(metrics.registry, settings.host, settings.metrics_port, pages, access)
        # In a thread: a scrape that is under way waits for this loop.
        stack.push_async_callback(asyncio.to_thread, metrics_server.close)
        await stack.enter_async_context(_truthful_health(health, registry, changed))
        await stack.enter_async_context(_running(activity.run(), "activity"))
        await stack.enter_async_context(expiry_told(access.tls, metrics.watch_certificate))
        stack.push_async_callback(server.stop, None)
        registry.start()
        await server.start()
        console = Console(
            registry,
            prompts,
            chooser,
            Feeder(registry, reporter, activity, sketch, hot_prefixes, Beginnings(prompts), clock),
            max_body_bytes=settings.max_message_bytes,
        )
        http = _http_server(
            settings,
            access,
            [
                *operations_routes(registry, metrics.registry),
                *console.routes(),
                *openai_routes(prompts, dispatcher, log, max_body_bytes=settings.max_message_bytes),
            ],
        )
        if http is not None:
            stack.push_async_callback(http.close)
            http.start()
        router = Router(
            address=local_address(settings.host, port),
            metrics_port=metrics_server.port,
            registry=registry,
            gate=gate,
            sketch=sketch,
            look_aside=look_aside,
            log=log,
            metrics=metrics,
            server=server,
            health=health,
            http=http,
        )
        await _announce(router, settings)
        yield router
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


def _scrape_targets(registry: WorkerRegistry, access: Access, loop: asyncio.AbstractEventLoop) -> Page:
    def page(asked: str) -> bytes | None:
        router_tls, worker_tls = access.tls is not None, access.peer_tls is not None
        return ask_loop(
            lambda: scrape_targets(registry.workers, asked, router_tls=router_tls, worker_tls=worker_tls), loop
        )

    return page


def _http_server(settings: RouterSettings, access: Access, routes: Sequence[BaseRoute]) -> HttpServer | None:
    """Not started. None where HTTP is switched off."""
    if settings.http_port < 0:
        return None
    app = HttpGuard(HttpApp(routes), access.guard)
    return HttpServer(app, settings.host, settings.http_port, tls=access.ssl_context())


async def drain(router: Router, grace_s: float) -> None:
    """Take no new calls; return when the running requests have ended. After the grace they are cut, and told so.

    Open calls that are no requests (someone watches the health) do not hold it up.
    """
    stopping = asyncio.create_task(router.server.stop(grace_s + _FLUSH_S))
    if router.http is not None:
        router.http.stop_accepting()
    if not await router.log.wait_until_idle(grace_s):
        router.log.cut()
    await router.server.stop(_FLUSH_S)
    await stopping


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or Ctrl-C, then drain; a second signal cuts the drain short. Returns the exit code.

    For the main thread of a process.
    """
    setup_logging(settings.log_level, json=settings.log_json)
    try:
        setup_tracing("radixfleet-router")
        asyncio.run(_serve(settings))
    except OSError as error:
        print(f"radixfleet router: {error}", file=sys.stderr)  # noqa: T201  for the operator, whatever the log level
        return 2 if isinstance(error, UnusableFile) else 1
    return 0


async def _serve(settings: RouterSettings) -> None:
    loop = asyncio.get_running_loop()
    asked, insisted = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (insisted if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with running_router(settings) as router:
        await asked.wait()
        _log.info("draining", running_requests=router.log.in_flight, grace_s=settings.drain_grace_s)
        drained = asyncio.create_task(drain(router, settings.drain_grace_s))
        hurried = asyncio.create_task(insisted.wait())
        await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not drained.done():
            router.log.cut()
        await drained


async def _announce(router: Router, settings: RouterSettings) -> None:
    """Tell scripts and the log where it listens."""
    if settings.address_file is not None:
        if router.http is not None:  # first, as the other file is the one that scripts wait for
            file = settings.address_file.with_name(f"{settings.address_file.name}.http")
            await asyncio.to_thread(publish, file, local_address(settings.host, router.http.port))
        await asyncio.to_thread(publish, settings.address_file, router.address)
    ports = {"http_port": router.http_port, "metrics_port": router.metrics_port}
    _log.info("router listens", address=router.address, **ports, policy=settings.policy)


@asynccontextmanager
async def _running(work: Coroutine[None, None, None], name: str) -> AsyncIterator[None]:
    """While the block lasts, `work` goes on beside it."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _truthful_health(health: Health, registry: WorkerRegistry, changed: asyncio.Event) -> AsyncIterator[None]:
    """While the block lasts, grpc.health.v1 says SERVING exactly while a worker gets requests."""

    async def follow() -> None:
        was_serving = None
        while True:
            changed.clear()
            serving = any(not worker.ineligible_reason for worker in registry.workers)
            if serving is not was_serving:
                await health.set(serving=serving)
                was_serving = serving
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEALTH_PERIOD_S):
                    await changed.wait()

    task = asyncio.create_task(follow(), name="health")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _sample(registry: WorkerRegistry, sketch: Sketch, clock: Clock) -> FleetSample:
    samples: dict[str, WorkerSample] = {}
    for worker in registry.workers:
        # Two addresses of one worker must not export one name twice.
        name = worker.address if worker.name in samples else worker.name
        samples[name] = _worker_sample(worker, name, clock)
    return FleetSample(tuple(samples.values()), sketch.num_blocks)


def _worker_sample(worker: WorkerState, name: str, clock: Clock) -> WorkerSample:
    status = worker.effective_status.value if worker.connected else "disconnected"
    view = worker.view
    return WorkerSample(
        worker=name,
        status=status if worker.facts else "unknown",
        eligible=not worker.ineligible_reason,
        approximate=worker.approximate,
        breaker=worker.breaker.state.value,
        breaker_opened=worker.breaker.num_opened,
        running_requests=view.running_requests,
        waiting_requests=view.waiting_requests,
        outstanding_prompt_tokens=view.outstanding_prompt_tokens,
        booked_requests=worker.books.own_requests,
        booked_prompt_tokens=worker.books.own_tokens,
        kv_protected_tokens=worker.books.reported.kv_protected_tokens,
        sketch_blocks=view.sketch_blocks,
        update_age_s=clock.now() - worker.updated_at_s if worker.updated_at_s is not None else float("inf"),
    )
