"""The way to a worker: at once while one has a place, else through the queue of the model.

A request that waits here is chosen for when its turn comes, by what the fleet is like then; in an engine's queue it
would have had its worker before. The choice, its booking and the leaving of the queue are one turn of the event loop.

Where the first cannot go on, those behind it may that other workers can take: too long a prompt for most workers, say,
holds up no short one. They get none of the workers that it waits for, so it waits no longer for having been passed.
A walk looks at the first of each lane, in which are those that the same workers could take (`ModelGroup.lane`). There
are few, for workers differ in little; a look takes about 0.1 ms where one could be any of a thousand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

from radixfleet.clock import Clock
from radixfleet.errors import DeadlineExceeded, Overloaded
from router.admission import AdmissionQueue
from router.dispatch.chooser import Chooser
from router.dispatch.claims import Claims
from router.dispatch.lease import Lease, Verdict
from router.dispatch.request import PreparedRequest
from router.metrics import RouterMetrics
from router.workers.group import ModelGroup
from router.workers.state import WorkerState


@dataclass(slots=True, eq=False)
class _Waiting:
    request: PreparedRequest
    lease: asyncio.Future[Lease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Gate:
    """One for the router. Call `stir` whenever a worker may have got a place: a request ended, a report came."""

    def __init__(self, chooser: Chooser, *, max_waiting: int, metrics: RouterMetrics, clock: Clock) -> None:
        """`max_waiting`: requests of one model that may wait; 0: none does, all waiting is left to the engines."""
        self._chooser = chooser
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._clock = clock
        self._queues: dict[str, AdmissionQueue[_Waiting]] = {}
        """Only those in which someone waits, or waited."""
        self._sorted_for: dict[str, ModelGroup] = {}
        """The workers by which the lanes of each queue are found."""
        self._stirred = False

    @property
    def num_waiting(self) -> int:
        """Requests in all queues."""
        return sum(self.waiting.values())

    @property
    def waiting(self) -> dict[str, int]:
        """Requests in the queue of each model; those of which someone waits, or waited."""
        return {model: len(queue) for model, queue in self._queues.items()}

    async def enter(self, request: PreparedRequest, deadline: Callable[[], float | None]) -> Lease:
        """A worker for the request, booked; perhaps after a wait.

        Raises Unavailable when nobody serves, Overloaded when too many wait, DeadlineExceeded.
        """
        lease = self.enter_at_once(request)
        if lease is not None:
            return lease
        queue = self._queues.get(request.model)
        if queue is None:
            queue = AdmissionQueue(self._max_waiting, self._clock, self._lane_of)
            self._queues[request.model] = queue
        waiting = _Waiting(request)
        place = queue.add(waiting, request.message.priority)
        self._serve(request.model)
        displaced = queue.displace()
        if displaced is not None and not displaced.lease.done():
            displaced.lease.set_exception(self._full(queue))
        if waiting.lease.done():
            return waiting.lease.result()
        self._metrics.queued.inc()
        began_s = self._clock.now()
        try:
            async with asyncio.timeout(deadline()):
                lease = await waiting.lease
        except TimeoutError:
            self._leave(waiting)
            self._metrics.queue_refusals.labels("deadline").inc()
            raise DeadlineExceeded("the deadline passed while the request waited for a worker") from None
        except asyncio.CancelledError:
            self._leave(waiting)
            left_s = deadline()
            if left_s is not None and left_s <= 0:  # someone else minds it too, and was first
                self._metrics.queue_refusals.labels("deadline").inc()
            raise
        finally:
            queue.remove(place)
            self._metrics.queued.dec()
            self._metrics.queue_s.observe(self._clock.now() - began_s)
        lease.waited_s = self._clock.now() - began_s
        return lease

    def enter_at_once(self, request: PreparedRequest) -> Lease | None:
        """A worker for the request, booked; None when it has to wait. Raises Unavailable."""
        if self._queues.get(request.model):
            return None
        return self._chooser.choose_unless_saturated(request) if self._max_waiting else self._chooser.choose(request)

    def enter_again(self, request: PreparedRequest, excluded: Collection[WorkerState]) -> Lease:
        """Another worker, booked, for a request that was let in before: it has waited once. Raises Unavailable."""
        return self._chooser.choose(request, excluded=excluded)

    def stir(self) -> None:
        """Let those go on who can, soon: many workers may report in one turn of the event loop."""
        if not self._stirred and any(self._queues.values()):
            self._stirred = True
            asyncio.get_running_loop().call_soon(self._serve_all)

    def _lane_of(self, waiting: _Waiting) -> Hashable:
        return self._chooser.lane(waiting.request)

    def _serve_all(self) -> None:
        self._stirred = False
        for model in self._queues:
            self._serve(model)

    def _serve(self, model: str) -> None:
        """Give leases in order, until nobody waits or each lane has to."""
        queue = self._queues[model]
        group = self._chooser.group(model)
        if self._sorted_for.get(model) is not group:
            self._sorted_for[model] = group
            queue.sort()
        claims = Claims()
        passed: set[Hashable] = set()
        while (turn := queue.next(passed)) is not None:
            place, waiting, lane = turn
            if not waiting.lease.done():  # else its client left in this turn of the event loop
                try:
                    lease = self._chooser.choose_unless_saturated(waiting.request, claims)
                except Exception as error:  # noqa: BLE001  told to who waits; the others go on
                    waiting.lease.set_exception(error)
                else:
                    if lease is None:
                        passed.add(lane)
                        continue
                    waiting.lease.set_result(lease)
            queue.take(place)

    def _leave(self, waiting: _Waiting) -> None:
        """Nobody waits for this lease any more. It may have been given in this very turn of the event loop."""
        if waiting.lease.done() and not waiting.lease.cancelled() and waiting.lease.exception() is None:
            waiting.lease.result().settle(Verdict.UNKNOWN)

    def _full(self, queue: AdmissionQueue[_Waiting]) -> Overloaded:
        self._metrics.queue_refusals.labels("full").inc()
        return Overloaded(
            f"all workers are busy and {len(queue)} requests wait for them",
            retry_after_s=queue.retry_after_s,
            waiting_requests=str(len(queue)),
        )
