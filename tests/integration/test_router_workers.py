"""Workers that come, load, restart, drain, move and leave, and what a router knows of them, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
import numpy as np
import pytest

from radixfleet.answers import Delta
from radixfleet.client import Client
from radixfleet.errors import Unavailable, UnknownWorker
from radixfleet.types import Load, TokenArray, WorkerStatus
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc
from router.workers.connection import FORGOTTEN_S
from tests.support.fake_worker import FakeWorker, Script
from tests.support.leaping_clock import LeapingClock
from tests.support.router_fixture import Fleet, fake_worker, running_fleet, scrape
from tests.support.waiting import until

PROMPT: TokenArray = (np.arange(8 * 64) % 250).astype(np.uint32)


def depth(fleet: Fleet, worker: FakeWorker) -> int:
    """How many blocks of PROMPT the router thinks the worker holds."""
    hashes = np.array(worker.hashes(PROMPT), dtype=np.uint64)
    return fleet.router.sketch.match(hashes)[fleet.state(worker).slot]


async def test_workers_may_start_after_the_router_in_any_order_and_one_may_never_come() -> None:
    """Behaviour 55: starting order does not matter."""
    late = await fake_worker("late").start()
    await late.kill()
    never = "127.0.0.1:1"
    async with running_fleet([], workers=(never, late.address)) as fleet:
        with pytest.raises(Unavailable):
            await fleet.client.complete("hello")
        await late.start(late.port)
        await fleet.until_eligible("late")
        await fleet.client.complete("hello")
        entries = {entry.address: entry for entry in await fleet.client.list_workers()}
        assert entries[never].ineligible_reason == "never answered"
        await late.kill()


async def test_a_worker_that_loads_for_long_gets_requests_when_it_is_ready() -> None:
    """Behaviour 55: workers slow to load."""
    slow = fake_worker("slow", status=WorkerStatus.LOADING)
    async with running_fleet([fake_worker("w0")]) as fleet:
        await slow.start()
        await fleet.client.register(slow.address)
        await until(lambda: fleet.state(slow).connected)
        entries = {entry.worker_id: entry for entry in await fleet.client.list_workers()}
        assert entries["slow"].ineligible_reason == "loading"
        slow.status = WorkerStatus.SERVING
        await fleet.until_eligible("slow", "w0")
        assert fleet.state(slow).capacity == slow.capacity
        # Behaviour 48: a cold worker receives traffic.
        done = [await fleet.client.complete(f"{n}" * 200) for n in range(8)]
        assert {item.started.worker_id for item in done} == {"slow", "w0"}
        await slow.kill()


async def test_a_worker_that_comes_back_at_its_address_is_found_again() -> None:
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet:
        await worker.kill()
        await fleet.until_eligible()
        worker.incarnation += 1
        await worker.start(worker.port)
        await fleet.until_eligible("w0")
        await fleet.client.complete("hello")
        assert worker.tokenizer_fetches == 1


async def test_a_worker_that_comes_back_at_another_address_replaces_its_old_self() -> None:
    old, new = fake_worker("w0"), fake_worker("w0", incarnation=2)
    async with running_fleet([]) as fleet:
        await old.start()
        await fleet.client.register(old.address)
        await fleet.until_eligible("w0")
        await old.kill()
        await new.start()
        await fleet.client.register(new.address)
        await until(lambda: [state.address for state in fleet.router.registry.workers] == [new.address])
        await fleet.until_eligible("w0")
        await new.kill()


async def test_one_worker_reached_by_two_addresses_is_one_worker() -> None:
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet:
        await fleet.client.register(f"localhost:{worker.port}")
        await until(lambda: len([state for state in fleet.router.registry.workers if state.connected]) == 2)
        assert fleet.eligible() == ["w0"]
        entries = await fleet.client.list_workers()
        assert sorted(entry.ineligible_reason for entry in entries) == ["", f"the same worker as {worker.address}"]
        samples = await asyncio.to_thread(scrape, fleet.router)
        assert samples["radixfleet_router_worker_eligible{worker=w0}"] == 1
        assert samples[f"radixfleet_router_worker_eligible{{worker=localhost:{worker.port}}}"] == 0


async def test_a_router_that_joins_late_gets_all_that_is_cached() -> None:
    """Behaviour 50: the digest brings the roots, not only what is added afterwards."""
    worker = fake_worker("w0")
    worker.cached.update(worker.hashes(PROMPT)[:5])
    worker.sequence = 1234
    async with running_fleet([worker]) as fleet:
        assert depth(fleet, worker) == 5
        worker.publish_delta(worker.hashes(PROMPT)[5:7])
        await until(lambda: depth(fleet, worker) == 7)
        worker.publish_delta([], worker.hashes(PROMPT)[3:])
        await until(lambda: depth(fleet, worker) == 3)
        assert worker.watches == 1


async def test_a_gap_in_the_reports_is_healed_by_a_new_digest() -> None:
    """Behaviour 50: without the worker leaving the choice meanwhile."""
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet:
        hashes = worker.hashes(PROMPT)
        worker.publish_delta(hashes[:4])
        await until(lambda: depth(fleet, worker) == 4)
        worker.lose_delta(hashes[4:6])
        worker.publish_delta(hashes[6:8])
        assert fleet.eligible() == ["w0"]
        await until(lambda: depth(fleet, worker) == 8)
        assert worker.watches == 2
        assert fleet.metric("resyncs_total") == 1
        assert fleet.eligible() == ["w0"]
        await until(lambda: not fleet.state(worker).approximate)


async def test_a_restarted_engine_loses_its_entries_at_once() -> None:
    """Behaviour 50: with the first update of the new incarnation, before any digest."""
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet:
        worker.publish_delta(worker.hashes(PROMPT))
        await until(lambda: depth(fleet, worker) == 8)
        worker.status = WorkerStatus.LOADING
        worker.restart_engine()
        await until(lambda: fleet.state(worker).incarnation == 2)
        assert depth(fleet, worker) == 0
        assert fleet.eligible() == []
        worker.status = WorkerStatus.SERVING
        await fleet.until_eligible("w0")
        await until(lambda: not fleet.state(worker).approximate)
        assert (await fleet.client.complete(PROMPT)).started.cached_tokens == 0
        done = await fleet.client.complete(PROMPT)
        assert done.started.route is not None
        assert done.started.route.predicted_cached_tokens == done.started.cached_tokens == 8 * 64 - 1


async def test_blocks_of_another_scheme_leave_the_routers_own_record_and_a_visible_sign() -> None:
    """No truth from that worker, approximate: it is still used, and the router says so."""
    worker = fake_worker("w0", block_scheme=99)
    worker.cached.update(worker.hashes(PROMPT))
    async with running_fleet([worker]) as fleet:
        assert depth(fleet, worker) == 0
        await fleet.client.complete(PROMPT)
        assert depth(fleet, worker) == 8
        assert (await fleet.client.list_workers())[0].approximate
        assert (await fleet.client.explain("x")).candidates[0].approximate


async def test_the_load_of_others_is_seen() -> None:
    """A worker that other routers keep busy is dearer than an idle one."""
    busy, idle = fake_worker("busy"), fake_worker("idle")
    async with running_fleet([busy, idle]) as fleet:
        busy.extra_load = Load(running_requests=3, waiting_requests=2, outstanding_prompt_tokens=50_000)
        await until(lambda: fleet.state(busy).view.outstanding_prompt_tokens == 50_000)
        assert fleet.state(busy).view.waiting_requests == 2
        for n in range(5):
            assert (await fleet.client.complete(f"{n}" * 100)).started.worker_id == "idle"


async def test_a_burst_is_spread_although_no_report_came_in_between() -> None:
    """Behaviour 45: 64 equal prompts at one instant, over real gRPC, with all first tokens held back."""
    gate = asyncio.Event()
    workers = [fake_worker(f"w{n}", script=lambda _: Script(before_first_token=gate)) for n in range(4)]
    async with running_fleet(workers) as fleet:
        tasks = [asyncio.create_task(fleet.client.complete("same prompt " * 40)) for _ in range(64)]
        await until(lambda: sum(worker.running for worker in workers) == 64)
        shares = sorted(worker.running for worker in workers)
        assert shares[-1] < 64
        assert sum(state.books.own_requests for state in fleet.router.registry.workers) == 64
        gate.set()
        await asyncio.gather(*tasks)


async def test_a_drained_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    """Behaviour 54: no new requests, running ones finish, then the worker leaves."""
    finish, drained = asyncio.Event(), asyncio.Event()
    worker = fake_worker("w0", script=lambda _: Script(before_finish=finish), drain_gate=drained)
    other = fake_worker("w1")
    async with running_fleet([worker, other]) as fleet:
        running = asyncio.create_task(fleet.client.complete("hello"))
        await until(lambda: worker.count("computed") + other.count("finished") == 1)
        if other.calls:
            await running
            running = asyncio.create_task(fleet.client.complete("another prompt " * 20))
            await until(lambda: worker.count("computed") == 1)
        drain = asyncio.create_task(fleet.client.drain("w0", grace_s=12.0))
        await fleet.until_eligible("w1")
        entries = {entry.worker_id: entry for entry in await fleet.client.list_workers()}
        assert entries["w0"].status is WorkerStatus.DRAINING
        assert entries["w0"].ineligible_reason == "draining"
        for n in range(4):
            assert (await fleet.client.complete(f"{n}" * 90)).started.worker_id == "w1"
        assert not running.done()
        finish.set()
        assert (await running).token_ids
        drained.set()
        outcome = await drain
        assert outcome.finished_requests == 1
        assert worker.drains == [12.0]
        await fleet.client.remove("w0")
        assert [entry.worker_id for entry in await fleet.client.list_workers()] == ["w1"]


@pytest.mark.parametrize("order", [Client.drain, Client.resume])
async def test_an_order_ends_with_an_error_when_its_worker_is_removed(order: Callable[[Client, str], Any]) -> None:
    worker = fake_worker("w0", drain_gate=asyncio.Event(), resume_gate=asyncio.Event())
    async with running_fleet([worker]) as fleet:
        ordered = asyncio.create_task(order(fleet.client, "w0"))
        await until(lambda: worker.drains or worker.resumes)
        await fleet.client.remove("w0")
        with pytest.raises(Unavailable, match="worker w0 was removed meanwhile"):
            await ordered


async def test_a_worker_restarted_after_its_drain_serves_again() -> None:
    worker = fake_worker("w0")
    async with running_fleet([worker]) as fleet:
        await fleet.client.drain("w0")
        await fleet.until_eligible()
        worker.status = WorkerStatus.SERVING
        worker.restart_engine()
        await fleet.until_eligible("w0")


async def test_a_removed_worker_is_forgotten_at_once_and_its_streams_go_on() -> None:
    finish = asyncio.Event()
    worker = fake_worker("w0", script=lambda _: Script(before_finish=finish))
    async with running_fleet([worker]) as fleet:
        received: list[int] = []

        async def read() -> None:
            async for event in fleet.client.generate("hello"):
                if isinstance(event, Delta):
                    received.extend(event.token_ids)

        stream = asyncio.create_task(read())
        await until(lambda: received)
        await fleet.client.remove("w0")
        assert await fleet.client.list_workers() == []
        assert fleet.router.sketch.num_blocks == 0
        with pytest.raises(Unavailable):
            await fleet.client.complete("hello")
        finish.set()
        await stream
        assert len(received) == 4
        with pytest.raises(UnknownWorker):
            await fleet.client.remove("w0")
        # And it can come again.
        assert await fleet.client.register(worker.address)
        await fleet.until_eligible("w0")


async def test_a_worker_that_used_to_register_and_is_gone_is_forgotten() -> None:
    """Each rollout left its dead in the list, and a dial every two seconds, for as long as the router ran."""
    clock = LeapingClock()
    configured, by_hand, by_itself = fake_worker("w0"), fake_worker("hand"), fake_worker("self")
    async with running_fleet([configured], clock=clock) as fleet:
        for worker in (by_hand, by_itself):
            await worker.start()
        for _ in range(2):
            await fleet.client.register(by_hand.address)
        async with grpc.aio.insecure_channel(fleet.router.address) as channel:
            for worker in (configured, by_itself):
                request = fleet_pb2.RegisterRequest(address=worker.address, repeats=True)
                await fleet_pb2_grpc.FleetStub(channel).Register(request)
        await fleet.until_eligible("w0", "hand", "self")
        clock.leapt_s += 2 * FORGOTTEN_S
        await fleet.client.complete("hello")
        assert len(fleet.router.registry.workers) == 3, "it is there, however long ago it registered"
        for worker in (configured, by_hand, by_itself):
            await worker.kill()
        await fleet.until_eligible()
        clock.leapt_s += 2 * FORGOTTEN_S
        await until(lambda: len(fleet.router.registry.workers) == 2)
        assert [state.worker_id for state in fleet.router.registry.workers] == ["w0", "hand"]
        await by_itself.start(by_itself.port)
        assert await fleet.client.register(by_itself.address)
        await fleet.until_eligible("self")
        await by_itself.kill()


async def test_a_worker_that_never_answered_is_removed_by_its_address() -> None:
    async with running_fleet([]) as fleet:
        await fleet.client.register("127.0.0.1:1")
        await fleet.client.remove("127.0.0.1:1")
        assert await fleet.client.list_workers() == []
