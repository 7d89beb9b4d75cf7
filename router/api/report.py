"""The fleet as its router sees it, in the form of `Fleet.ListWorkers`. Consoles show it; see `radixfleet.overview`."""

from __future__ import annotations

from importlib.metadata import version

from radixfleet import convert
from radixfleet.v1 import fleet_pb2, worker_pb2
from router.dispatch.gate import Gate
from router.dispatch.record import RequestLog
from router.index import Sketch
from router.workers.activity import FleetActivity
from router.workers.registry import WorkerRegistry
from router.workers.state import WorkerState


class Reporter:
    """Reads the router's books; changes nothing. On the event loop only."""

    def __init__(
        self,
        registry: WorkerRegistry,
        activity: FleetActivity,
        gate: Gate,
        log: RequestLog,
        sketch: Sketch,
        policy: str,
    ) -> None:
        self._registry = registry
        self._activity = activity
        self._gate = gate
        self._log = log
        self._sketch = sketch
        self._policy = policy
        self._version = version("radixfleet")

    def report(self) -> fleet_pb2.ListWorkersResponse:
        """The fleet and all workers now, in the order in which they were added."""
        workers = [worker_entry(worker) for worker in self._registry.workers]
        return fleet_pb2.ListWorkersResponse(workers=workers, fleet=self.fleet_state())

    def fleet_state(self) -> fleet_pb2.FleetState:
        """The fleet as a whole, now."""
        return fleet_pb2.FleetState(
            uptime_s=self._activity.uptime_s,
            policy=self._policy,
            requests_in_flight=self._log.in_flight,
            queued_requests=self._gate.num_waiting,
            sketch_blocks=self._sketch.num_blocks,
            recent=[convert.recent_to_pb(recent) for recent in self._activity.recent()],
            version=self._version,
        )


def worker_entry(worker: WorkerState) -> fleet_pb2.WorkerEntry:
    """One worker now."""
    return fleet_pb2.WorkerEntry(
        worker_id=worker.worker_id,
        address=worker.address,
        status=(
            convert.worker_status_to_pb(worker.effective_status)
            if worker.facts
            else worker_pb2.WORKER_STATUS_UNSPECIFIED
        ),
        connected=worker.connected,
        info=_info(worker),
        load=convert.load_to_pb(worker.books.reported),
        booked_requests=worker.books.own_requests,
        booked_prompt_tokens=worker.books.own_tokens,
        sketch_blocks=worker.view.sketch_blocks,
        approximate=worker.approximate,
        ineligible_reason=worker.ineligible_reason,
        recent=[convert.recent_to_pb(recent) for recent in worker.activity.recent()],
    )


def _info(worker: WorkerState) -> worker_pb2.WorkerInfo | None:
    """What the worker told of itself, with what it reported since; None: nothing yet."""
    facts = worker.facts
    if facts is None:
        return None
    return worker_pb2.WorkerInfo(
        worker_id=facts.worker_id,
        incarnation=worker.incarnation or facts.incarnation,
        status=convert.worker_status_to_pb(worker.status),
        model=convert.model_info_to_pb(facts.model),
        capacity=convert.capacity_to_pb(worker.capacity) if worker.capacity else None,
        memory=convert.memory_pools_to_pb(facts.memory) if facts.memory else None,
        version=facts.version,
        block_scheme=facts.block_scheme,
        block_tokens=facts.block_tokens,
        advice=worker.advice,
        metrics_port=facts.metrics_port,
    )
