"""Answers that outlive their worker: real schedulers and caches on simulated devices, and connections that are cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from radixfleet.answers import Delta, Finished, Started
from radixfleet.client import Client
from radixfleet.errors import InvalidRequest, Unavailable
from router.app import Router, running_router
from tests.support.cuttable_wire import CuttableWire
from tests.support.router_fixture import NO_RETRY, settings
from tests.support.waiting import until
from tests.support.worker_fixture import sim_runner, sim_worker
from worker.runner.sim import CostModel

SLOW = CostModel(step_s=0.004, prefill_token_s=0.0, decode_token_s=0.0, context_token_s=0.0)


@dataclass(frozen=True, slots=True)
class WiredFleet:
    router: Router
    client: Client
    wires: dict[str, CuttableWire]

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(f"radixfleet_router_{name}", labels) or 0.0


@asynccontextmanager
async def wired_fleet(num_workers: int) -> AsyncIterator[WiredFleet]:
    """Workers that take 4 ms a token, each behind a wire of its own."""
    async with AsyncExitStack() as stack:
        wires = {}
        for name in (f"w{index}" for index in range(num_workers)):
            worker = await stack.enter_async_context(sim_worker(sim_runner(cost=SLOW), worker_id=name))
            wires[name] = await stack.enter_async_context(CuttableWire(worker.address))
        addresses = tuple(wire.address for wire in wires.values())
        router = await stack.enter_async_context(running_router(settings(workers=addresses)))
        client = await stack.enter_async_context(Client(router.address, timeout_s=60.0, retry=NO_RETRY))
        await until(lambda: sum(not state.ineligible_reason for state in router.registry.workers) == num_workers)
        yield WiredFleet(router, client, wires)
        await until(lambda: not router.log.in_flight)
        assert all(not state.books.own_requests for state in router.registry.workers)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 1}, {"temperature": 1.0, "seed": 5}],
    ids=["greedy", "the likeliest", "seeded"],
)
async def test_an_answer_goes_on_twice_without_a_token_lost_or_repeated(options: dict[str, float]) -> None:
    """Behaviour 53, where the client asked for more: both times the worker is lost in the middle of the answer."""
    # Many, so that a machine that stalls does not let a worker end its answer before it is cut.
    fields = {"max_new_tokens": 400, "ignore_eos": True, **options}
    async with wired_fleet(3) as fleet:
        whole = await fleet.client.complete("once upon a time", **fields)
        token_ids: list[int] = []
        text = ""
        started: list[Started] = []
        finished: Finished | None = None
        cuts = 0
        async for event in fleet.client.generate("once upon a time", resume=True, **fields):
            if isinstance(event, Started):
                started.append(event)
            elif isinstance(event, Delta):
                token_ids += event.token_ids
                text += event.text
                if cuts < 2 and len(token_ids) >= 20 * (cuts + 1):
                    cuts += 1
                    busy = next(state for state in fleet.router.registry.workers if state.books.own_requests)
                    fleet.wires[busy.worker_id].cut()
            else:
                finished = event
                text += event.text
        assert len(started) == 1
        assert finished is not None
        assert token_ids == list(whole.token_ids)
        assert text == whole.text
        assert finished.usage is not None
        assert finished.usage.completion_tokens == 400
        assert finished.usage.prompt_tokens == whole.started.prompt_tokens
        assert fleet.metric("retries_total", result="resumed") == 2
        assert fleet.metric("requests_total", outcome="ok") == 2


async def test_without_resume_the_same_loss_is_an_error() -> None:
    async with wired_fleet(2) as fleet:

        async def read() -> None:
            async for event in fleet.client.generate("once", max_new_tokens=500, ignore_eos=True, temperature=0.0):
                if isinstance(event, Delta):
                    for wire in fleet.wires.values():
                        wire.cut()

        with pytest.raises(Unavailable, match="not complete"):
            await read()


async def test_resume_is_refused_where_another_worker_would_draw_other_tokens() -> None:
    async with wired_fleet(1) as fleet:
        with pytest.raises(InvalidRequest, match="seed") as caught:
            await fleet.client.complete("x", resume=True, temperature=1.0)
        assert caught.value.field == "resume"
        with pytest.raises(InvalidRequest, match=r"sampling\.n"):
            await fleet.client.complete("x", resume=True, temperature=0.0, n=2)


async def test_a_request_without_an_id_gets_one() -> None:
    async with wired_fleet(1) as fleet:
        first = await fleet.client.complete("x", max_new_tokens=2)
        second = await fleet.client.complete("x", max_new_tokens=2)
        named = await fleet.client.complete("x", max_new_tokens=2, request_id="mine")
        assert first.started.request_id
        assert first.started.request_id != second.started.request_id
        assert named.started.request_id == "mine"
