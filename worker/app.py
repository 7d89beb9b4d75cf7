"""The worker put together: settings in, a serving worker out. Everything that starts and ends is in `running_worker`.

start   tokenizer -> gRPC server (answers GetInfo, refuses requests) -> engine -> registration
end     leave the routers -> end the state streams and links -> stop the server -> stop the engine
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from radixfleet.access import Access
from radixfleet.address import is_wildcard, local_address, publish, withdraw
from radixfleet.background import beside
from radixfleet.certificates import expiry_told
from radixfleet.channel import Health, listen, make_server
from radixfleet.clock import Clock, MonotonicClock
from radixfleet.metrics_server import MetricsServer
from radixfleet.text import Tokenizer, TokenizerSpec
from radixfleet.types import WorkerId, WorkerStatus
from radixfleet.v1 import inference_pb2_grpc, worker_pb2_grpc
from worker.config import WorkerSettings
from worker.dialects import services as dialects
from worker.engine.config import EngineConfig
from worker.engine.handle import EngineHandle
from worker.engine.inline import InlineEngine
from worker.engine.process import ProcessEngine
from worker.metrics import BuildInfo, WorkerMetrics
from worker.runner.sim import SimRunnerConfig
from worker.runner.torch_config import TorchRunnerConfig
from worker.servicer.description import Description, package_version
from worker.servicer.generation import Observer
from worker.servicer.grammar_checker import GrammarChecker
from worker.servicer.grammars import Grammars
from worker.servicer.inference import InferenceServicer
from worker.servicer.intake import Intake
from worker.servicer.link import Links
from worker.servicer.registration import Registration
from worker.servicer.requests import RunningRequests
from worker.servicer.state import StateFeed
from worker.servicer.worker import WorkerServicer

SERVICES = ("radixfleet.v1.Inference", "radixfleet.v1.Worker")
_TOKENIZER_THREADS = 2
_log = structlog.get_logger(__name__)
_STOP_S = 2.0
"""How long open calls may take to end when the server stops."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that listens, whether or not its engine has loaded."""

    description: Description
    address: str
    """host:port of the gRPC server, as one on this machine reaches it."""
    metrics_port: int
    engine: EngineHandle
    feed: StateFeed
    requests: RunningRequests
    metrics: WorkerMetrics
    registration: Registration
    """At the routers of the settings; `follow` changes them."""


@asynccontextmanager
async def running_worker(
    settings: WorkerSettings, spec: TokenizerSpec, engine: EngineHandle, clock: Clock | None = None
) -> AsyncIterator[Worker]:
    """A worker from listening to stopped. Raises OSError when a port is taken, or a certificate cannot be used.

    `clock` must be the engine's. Leaving the block cuts what still runs: drain first.
    """
    clock = clock or MonotonicClock()
    access = await asyncio.to_thread(_access, settings, clock)
    async with AsyncExitStack() as stack:
        tokenizer = await asyncio.to_thread(Tokenizer, spec)
        threads = stack.enter_context(ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer"))
        server, health = await make_server(
            (*SERVICES, *dialects.service_names()), guard=access.guard, max_message_bytes=settings.max_message_bytes
        )
        port = listen(server, settings.host, settings.port, access.tls)
        worker_id = WorkerId(settings.worker_id or f"{socket.gethostname()}-{port}")
        metrics = WorkerMetrics(BuildInfo(package_version(), worker_id, settings.model_name, settings.runner))
        metrics_server = MetricsServer(metrics.registry, settings.host, settings.metrics_port, access=access)
        stack.push_async_callback(asyncio.to_thread, metrics_server.close)
        await stack.enter_async_context(expiry_told(access.tls, metrics.watch_certificate))
        description = await asyncio.to_thread(Description, worker_id, settings.model_name, spec, metrics_server.port)

        stack.push_async_callback(engine.stop)
        feed = StateFeed(engine, metrics)
        requests = RunningRequests(worker_id, engine, Observer(clock, metrics, feed))
        grammars = Grammars(engine, GrammarChecker(spec, clock) if settings.runner == "torch" else None)
        stack.push_async_callback(grammars.close)
        intake = Intake(
            settings.model_name,
            tokenizer,
            threads,
            grammars,
            default_max_new_tokens=settings.default_max_new_tokens,
            isolate_clients=settings.isolate_clients,
        )
        inference = InferenceServicer(description, intake, requests, metrics, clock)
        links = Links(inference.running, clock)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(
            WorkerServicer(description, engine, feed, requests, links, drain_grace_s=settings.drain_grace_s), server
        )
        stack.push_async_callback(server.stop, _STOP_S)
        stack.push_async_callback(links.close)
        await stack.enter_async_context(feed)
        await stack.enter_async_context(dialects.answered(server, description, engine, feed, requests, inference))
        await stack.enter_async_context(_truthful_health(health, feed))
        await server.start()
        address = local_address(settings.host, port)
        if settings.address_file is not None:
            await asyncio.to_thread(publish, settings.address_file, address)
            stack.push_async_callback(asyncio.to_thread, withdraw, settings.address_file, address)
        await engine.start()
        registration = Registration(settings.routers, worker_id, port, _advertised(settings, address), access.endpoint)
        await stack.enter_async_context(registration)
        yield Worker(description, address, metrics_server.port, engine, feed, requests, metrics, registration)


def _access(settings: WorkerSettings, clock: Clock) -> Access:
    """Reads files. Raises UnusableFile."""
    access = Access.from_settings(settings, token_closes_client_doors=True, clock=clock)
    for warning in access.warnings(settings.host):
        _log.warning(warning)
    return access


def make_engine(settings: WorkerSettings, model_path: Path, spec: TokenizerSpec) -> EngineHandle:
    """The engine that the settings ask for, not started."""
    config = EngineConfig(
        runner=_sim_runner(settings, spec) if settings.runner == "sim" else _torch_runner(settings, model_path),
        overlap=settings.overlap,
        schedule_order=settings.schedule_policy,
        preempt=settings.preempt,
        log_level=settings.log_level,
        log_json=settings.log_json,
    )
    return InlineEngine.from_config(config) if settings.inline else ProcessEngine(config)


def _torch_runner(settings: WorkerSettings, model_path: Path) -> TorchRunnerConfig:
    return TorchRunnerConfig(
        model_path=str(model_path),
        device=settings.device,
        dtype=settings.dtype,
        device_memory_bytes=settings.device_memory,
        mem_fraction_static=settings.mem_fraction_static,
        max_total_tokens=settings.max_total_tokens,
        page_size=settings.page_size,
        chunked_prefill_size=settings.chunked_prefill_size,
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.context_length,
        num_threads=settings.threads or len(os.sched_getaffinity(0)),
        attention=settings.attention,
        deterministic=settings.enable_deterministic_inference,
        cuda_graphs=settings.cuda_graphs,
    )


def _sim_runner(settings: WorkerSettings, spec: TokenizerSpec) -> SimRunnerConfig:
    """What the operator set, and for the rest a large GPU."""
    default = SimRunnerConfig()
    kv_tokens = settings.max_total_tokens or default.kv_tokens
    return SimRunnerConfig(
        vocab_size=spec.vocab_size,
        kv_tokens=kv_tokens // settings.page_size * settings.page_size,
        page_size=settings.page_size,
        max_running_requests=settings.max_running_requests or default.max_running_requests,
        chunked_prefill_size=settings.chunked_prefill_size or default.chunked_prefill_size,
        max_context_tokens=settings.context_length or default.max_context_tokens,
    )


@asynccontextmanager
async def _truthful_health(health: Health, feed: StateFeed) -> AsyncIterator[None]:
    """While the block lasts, grpc.health.v1 says SERVING exactly while the worker takes requests."""

    async def follow() -> None:
        status = feed.status
        while True:
            await health.set(serving=status is WorkerStatus.SERVING)
            status = await feed.status_after(status)

    try:
        async with beside(follow(), "health"):
            yield
    finally:
        await health.set(serving=False)


def _advertised(settings: WorkerSettings, address: str) -> str | None:
    """Where routers reach the worker; None when only the route to each of them tells."""
    if settings.advertise_address is not None or is_wildcard(settings.host):
        return settings.advertise_address
    return address
