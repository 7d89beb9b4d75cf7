"""`radixfleet.v1.Fleet`: what operators, workers, and clients that stream from workers directly ask of the router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from radixfleet.accepted import ACCEPTED
from radixfleet.grpc_guard import Visitor
from radixfleet.guard import Guard
from radixfleet.status import Context
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2
from router.api import orders
from router.api.explanation import explain
from router.api.fleet_watch import FleetWatch
from router.api.prompts import Prompts
from router.api.report import Reporter
from router.api.route_stream import RouteStream
from router.api.routing import Routing
from router.dispatch.chooser import Chooser
from router.workers.registry import WorkerRegistry


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """See the .proto."""

    def __init__(
        self,
        registry: WorkerRegistry,
        prompts: Prompts,
        chooser: Chooser,
        routing: Routing,
        reporter: Reporter,
        watch: FleetWatch,
        guard: Guard,
    ) -> None:
        """`guard`: the one that the server asks whom it lets in."""
        self._registry = registry
        self._prompts = prompts
        self._chooser = chooser
        self._routing = routing
        self._reporter = reporter
        self._watch = watch
        self._guard = guard

    async def Route(self, request: fleet_pb2.RouteRequest, context: Context) -> fleet_pb2.RouteResponse:
        """Choose a worker and book the request there; the client does the rest."""
        return await self._routing.route(request.request, context.time_remaining)

    async def RouteStream(  # type: ignore[override]  # writes to the context, at once
        self, request_iterator: AsyncIterator[fleet_pb2.RouteStreamRequest], context: Context
    ) -> None:
        """`Route`, many times. Each request counts against its client's limits, whose key is looked at again."""
        visitor = Visitor(self._guard, context)
        await context.send_initial_metadata(ACCEPTED)
        stream = RouteStream(self._routing, context.write, visitor.visit if self._guard.has_limits else None)
        await stream.serve(request_iterator if self._guard.is_open else visitor.admitted(request_iterator))

    async def Explain(self, request: fleet_pb2.ExplainRequest, context: Context) -> fleet_pb2.ExplainResponse:
        """Where a prompt would go, and what each worker would cost."""
        return await explain(self._prompts, self._chooser, request.request)

    async def ListWorkers(
        self, request: fleet_pb2.ListWorkersRequest, context: Context
    ) -> fleet_pb2.ListWorkersResponse:
        """The fleet and all workers, in the order in which they were added."""
        return self._reporter.report()

    async def WatchFleet(
        self, request: fleet_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.FleetUpdate]:
        """What `ListWorkers` answers, and then what changes, for as long as the client's key is known here."""
        visitor = Visitor(self._guard, context)
        async with aclosing(self._watch.updates()) as updates:
            async for update in updates if self._guard.is_open else visitor.admitted(updates):
                yield update

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Context) -> fleet_pb2.RegisterResponse:
        """Add a worker by its address."""
        added = self._registry.add(request.address, repeats=request.repeats)
        await self._registry.other_processes.tell("Register", request)
        return fleet_pb2.RegisterResponse(added=added)

    async def Drain(self, request: fleet_pb2.DrainWorkerRequest, context: Context) -> worker_pb2.DrainResponse:
        """Empty a worker; it stays in the list, draining, until it restarts or is removed."""
        grace_s = request.grace_s if request.HasField("grace_s") else None
        orders.check_grace(grace_s)
        return await orders.drain(self._registry, self._registry.get(request.worker_id), grace_s)

    async def Resume(self, request: fleet_pb2.ResumeWorkerRequest, context: Context) -> worker_pb2.ResumeResponse:
        """Put a drained, or draining, worker back to work."""
        await orders.resume(self._registry, self._registry.get(request.worker_id))
        return worker_pb2.ResumeResponse()

    async def Remove(self, request: fleet_pb2.RemoveRequest, context: Context) -> fleet_pb2.RemoveResponse:
        """Forget a worker."""
        self._registry.remove(self._registry.get(request.worker_id))
        await self._registry.other_processes.tell("Remove", request)
        return fleet_pb2.RemoveResponse()
