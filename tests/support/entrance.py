"""A router's gate over workers without a network, for tests of who waits and who is let in when."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from radixfleet.v1 import inference_pb2
from router.dispatch.gate import Gate
from router.dispatch.lease import Lease
from router.dispatch.request import PreparedRequest
from router.workers.state import WorkerState
from tests.support.router_parts import CAPACITY, MODEL, Parts, prepared, tokens

_IN_VAIN_S = 20.0


class Entrance:
    """Workers with `places` each, and a gate before them that hears of every change."""

    def __init__(self, workers: int = 2, places: int = 1, max_waiting: int = 8) -> None:
        self.parts = Parts(0)
        self.gate = Gate(
            self.parts.chooser, max_waiting=max_waiting, metrics=self.parts.metrics, clock=self.parts.clock
        )
        for index in range(workers):
            self.add(f"w{index}", places)

    def add(self, name: str, places: int, context: int = MODEL.max_context_tokens) -> WorkerState:
        return self.settle(self.parts.add(name, model=replace(MODEL, max_context_tokens=context)), places)

    def settle(self, worker: WorkerState, places: int) -> WorkerState:
        """Give it so many places, and have the gate hear of it."""
        worker.capacity = replace(CAPACITY, max_running_requests=places)
        worker._on_change = self.gate.stir  # the fixture makes workers before there is a gate
        worker.changed()
        return worker

    def enter(
        self, prompt: int = 300, *, priority: int = 0, first: int = 1, deadline_s: float | None = None
    ) -> asyncio.Task[Lease]:
        message = inference_pb2.GenerateRequest(priority=priority)
        return self.let_in(prepared(tokens(prompt, first), message=message), deadline_s)

    def let_in(self, request: PreparedRequest, deadline_s: float | None = None) -> asyncio.Task[Lease]:
        """Fails where nothing lets it in: a test that waits for it in vain says so."""

        async def entered() -> Lease:
            async with asyncio.timeout(_IN_VAIN_S):
                return await self.gate.enter(request, lambda: deadline_s)

        return asyncio.create_task(entered())

    def value(self, name: str, **labels: str) -> float | None:
        return self.parts.metrics.registry.get_sample_value(f"radixfleet_router_{name}", labels)


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
