"""The first moments of a router: what nobody serves yet waits for the workers that are about to be known.

A router that starts (again) knows its workers a moment later: those of its settings when they have answered, others
when they have registered, which they do as soon as they see it. Whoever asks in that moment for what is not served yet
waits: until `GATHER_S` after the start for workers to register, until `DIAL_S` for known ones to answer. Later nobody
waits here, and what nobody serves is refused at once. So it is where all workers of the settings have told how they
are: one that loads its model is not waited for, for that may take minutes, in which a client had better go elsewhere or
come again when it is told to (`chooser.RETRY_LOADING_S`).

Health says meanwhile what is true: that nobody serves. A process beside others on the same ports lets the question for
it over HTTP wait, too: the others serve, and who asks cannot tell them apart.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from radixfleet.clock import Clock
from radixfleet.errors import Unavailable
from router.metrics import RouterMetrics
from router.workers.registry import WorkerRegistry

GATHER_S = 3.0
"""Workers that are there have registered by then: they are told by the end of their connection to a predecessor."""
DIAL_S = 8.0
"""A known worker may take so long to answer for the first time, on a machine where all comes back at once."""
_RETRY_AFTER_S = 1.0
_LATE_S = 0.001
"""Timers may fire a little early."""


class Gathering:
    """One for the router, from its start. Call `stir` whenever a worker came, went or has another status."""

    def __init__(
        self,
        registry: WorkerRegistry,
        metrics: RouterMetrics,
        clock: Clock,
        *,
        is_configured: bool,
        max_waiting: int,
        gather_s: float,
        dial_s: float,
    ) -> None:
        """`is_configured`: the settings name workers. `max_waiting`: requests of all models; more are not let wait.

        `gather_s`, `dial_s`: mostly GATHER_S and DIAL_S.
        """
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        self._is_configured = is_configured
        self._max_waiting = max_waiting
        self._gathered_at_s = clock.now() + gather_s
        self._dialled_at_s = clock.now() + max(gather_s, dial_s)
        self._is_over = False
        self._is_closed = False
        self._served: dict[str, asyncio.Event] = {}
        """Set when the model is served; one for each model that requests wait for."""
        self._num_waiting = 0
        self._stirred = False

    def awaits(self, model: str) -> bool:
        """Whether a worker for the model (empty: for any) may be known soon, and none is now."""
        if self._is_over:
            return False
        now_s = self._clock.now()
        if now_s >= self._dialled_at_s:
            self._is_over = True
            return False
        known = self._registry.workers
        of_model = self._registry.group(model).workers if model else known
        if any(not worker.ineligible_reason for worker in of_model):
            return False
        may_come = not self._is_configured and now_s < self._gathered_at_s
        return may_come or any(worker.updated_at_s is None for worker in known)

    async def until_served(self, model: str) -> None:
        """Return when there is nothing to wait for any more: mostly at once. Raises Unavailable if the router stops."""
        if not self.awaits(model) or self._num_waiting >= self._max_waiting:
            return
        served = self._served.setdefault(model, asyncio.Event())
        self._num_waiting += 1
        self._metrics.queued.inc()
        began_s = self._clock.now()
        try:
            for ends_at_s in (self._gathered_at_s, self._dialled_at_s):
                left_s = ends_at_s - self._clock.now() + _LATE_S
                if left_s > 0 and self.awaits(model):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(left_s):
                            await served.wait()
        finally:
            self._num_waiting -= 1
            self._metrics.queued.dec()
            self._metrics.queue_s.observe(self._clock.now() - began_s)
        if self._is_closed:
            raise Unavailable("the router stops: nothing has begun, ask another one", retry_after_s=_RETRY_AFTER_S)

    async def until_known(self, at_most_s: float) -> None:
        """The same for a question that is no request: neither counted nor refused, and at most so long."""
        if self.awaits(""):
            with suppress(TimeoutError):
                async with asyncio.timeout(at_most_s):
                    await self._served.setdefault("", asyncio.Event()).wait()

    def close(self) -> None:
        """The router stops: nobody waits any longer."""
        self._is_over = self._is_closed = True
        self.stir()

    def stir(self) -> None:
        """Let those go on who can, soon: many workers may come in one turn of the event loop."""
        if self._served and not self._stirred:
            self._stirred = True
            asyncio.get_running_loop().call_soon(self._let_go)

    def _let_go(self) -> None:
        self._stirred = False
        for model in [model for model in self._served if not self.awaits(model)]:
            self._served.pop(model).set()
