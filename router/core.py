"""What a router is made of behind its ports: one object of each kind, put together once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random

import grpc.aio

from radixfleet.access import Access
from radixfleet.clock import Clock
from radixfleet.guard import Guard
from radixfleet.v1 import fleet_pb2_grpc, inference_pb2_grpc
from router.api.fleet import FleetServicer
from router.api.fleet_watch import FleetWatch
from router.api.inference import InferenceServicer
from router.api.prompts import Prompts
from router.api.report import Reporter
from router.api.routing import Routing
from router.config import RouterSettings
from router.dispatch.chooser import Chooser
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.gate import Gate
from router.dispatch.links import Links
from router.dispatch.lookaside import LookAside
from router.dispatch.record import RequestLog
from router.index import HotPrefixes, Sketch
from router.metrics import RouterMetrics
from router.other_processes import OtherProcesses
from router.policies import make_policy
from router.workers.activity import FleetActivity
from router.workers.engine_settings import engine_key, named_tokenizers
from router.workers.gathering import DIAL_S, GATHER_S, Gathering
from router.workers.registry import WorkerRegistry
from router.workers.surroundings import Surroundings
from router.workers.tokenizers import TokenizerStore


@dataclass(frozen=True, slots=True)
class Core:
    """The parts that the ports serve."""

    registry: WorkerRegistry
    sketch: Sketch
    prompts: Prompts
    chooser: Chooser
    gathering: Gathering
    gate: Gate
    dispatcher: Dispatcher
    look_aside: LookAside
    routing: Routing
    guard: Guard
    log: RequestLog
    activity: FleetActivity
    hot_prefixes: HotPrefixes
    reporter: Reporter
    watch: FleetWatch
    changed: asyncio.Event
    """Set whenever a worker came, went or has another status."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve `Inference` and `Fleet` there."""
        inference = InferenceServicer(self.prompts, self.dispatcher, self.log)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
        fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(*self.fleet_parts, self.guard), server)

    @property
    def fleet_parts(self) -> tuple[WorkerRegistry, Prompts, Chooser, Routing, Reporter, FleetWatch]:
        """What a servicer of `Fleet` is made of, but for the guard of its server."""
        return self.registry, self.prompts, self.chooser, self.routing, self.reporter, self.watch


@asynccontextmanager
async def running_core(
    settings: RouterSettings,
    access: Access,
    metrics: RouterMetrics,
    other_processes: OtherProcesses,
    clock: Clock,
    random: Random,
) -> AsyncIterator[Core]:
    """Put a router's parts together. It dials nobody until `registry.start`; leaving the block leaves the workers."""
    async with AsyncExitStack() as stack:
        threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        sketch = Sketch(clock)
        look_aside = LookAside(settings.lease_s, metrics)
        stack.callback(look_aside.close)
        tokenizers = TokenizerStore(threads, await asyncio.to_thread(named_tokenizers, settings.tokenizers))
        changed = asyncio.Event()
        key = engine_key(settings.engine_api_key, clock)
        around = Surroundings(settings, sketch, tokenizers, metrics, look_aside, access, clock, random, key)

        # The registry calls both when a worker has changed; by then `gathering` and `gate`, which read it, are there.
        def on_change() -> None:
            changed.set()
            gathering.stir()

        registry = WorkerRegistry(around, on_change, lambda: gate.stir(), other_processes)
        gathering = Gathering(
            registry,
            metrics,
            clock,
            is_configured=bool(settings.workers),
            max_waiting=settings.max_queued_requests,
            gather_s=GATHER_S,
            dial_s=DIAL_S,
        )
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
            gathering=gathering,
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
        reporter = Reporter(registry, activity, gate, log, sketch, settings.policy)
        yield Core(
            registry=registry,
            sketch=sketch,
            prompts=prompts,
            chooser=chooser,
            gathering=gathering,
            gate=gate,
            dispatcher=dispatcher,
            look_aside=look_aside,
            routing=Routing(prompts, gate, look_aside),
            guard=access.guard,
            log=log,
            activity=activity,
            hot_prefixes=hot_prefixes,
            reporter=reporter,
            watch=FleetWatch(registry, reporter, clock),
            changed=changed,
        )
