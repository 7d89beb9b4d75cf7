"""Admission over real gRPC: a full fleet, and who waits where."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from radixfleet.errors import DeadlineExceeded, Overloaded
from tests.support.fake_worker import Call, FakeWorker, Script
from tests.support.look_aside import asking_by, both_forms
from tests.support.router_fixture import fake_worker, running_fleet
from tests.support.waiting import until


def small_worker(gate: asyncio.Event) -> FakeWorker:
    """Room for one request, which ends when the gate opens."""

    def script(_: Call) -> Script:
        return Script(before_finish=gate)

    worker = fake_worker(script=script)
    worker.capacity = replace(worker.capacity, max_running_requests=1)
    return worker


async def test_a_full_fleet_lets_requests_wait_in_the_router_and_refuses_what_is_too_much() -> None:
    gate = asyncio.Event()
    worker = small_worker(gate)
    async with running_fleet([worker], max_queued_requests=2) as fleet:
        tasks = [asyncio.create_task(fleet.client.complete(f"prompt {n}")) for n in range(3)]
        await until(lambda: fleet.metric("queued_requests") == 2 and worker.count("computed") == 1)
        assert len(worker.calls) == 1, "the worker was asked for no more than it has room for"
        with pytest.raises(Overloaded) as caught:
            await fleet.client.complete("one too many")
        assert caught.value.retry_after_s is not None
        gate.set()
        done = await asyncio.gather(*tasks)
        assert all(len(answer.token_ids) == 4 for answer in done)
        assert fleet.metric("queue_refusals_total", cause="full") == 1
        assert fleet.metric("requests_total", outcome="resource_exhausted") == 1


async def test_the_deadline_and_the_client_end_a_wait_in_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviours 44 and 58: also a request that never had a worker has its outcome, and only one."""
    monkeypatch.setattr("router.dispatch.record._TRAVEL_S", 5.0)  # on a busy machine, requests travel for long
    gate = asyncio.Event()
    worker = small_worker(gate)
    async with running_fleet([worker]) as fleet:
        running = asyncio.create_task(fleet.client.complete("first"))
        await until(lambda: worker.calls)
        with pytest.raises(DeadlineExceeded):
            await fleet.client.complete("in a hurry", timeout_s=1.0)
        await until(lambda: fleet.metric("queued_requests") == 0)  # else the next one is thought to wait before it came
        leaver = asyncio.create_task(fleet.client.complete("leaves"))
        await until(lambda: fleet.metric("queued_requests") == 1)
        leaver.cancel()
        await until(lambda: fleet.metric("queued_requests") == 0)
        await until(lambda: fleet.metric("requests_total", outcome="cancelled") == 1)
        await until(lambda: fleet.metric("requests_total", outcome="deadline_exceeded") == 1)
        gate.set()
        await running
        assert len(worker.calls) == 1


@both_forms
async def test_a_look_aside_client_waits_like_any_other(form: str) -> None:
    gate = asyncio.Event()
    worker = small_worker(gate)
    async with running_fleet([worker]) as fleet:
        running = asyncio.create_task(fleet.client.complete("first"))
        await until(lambda: worker.calls)
        asking = asyncio.create_task(asking_by(fleet.client, form).route("second"))
        await until(lambda: fleet.metric("queued_requests") == 1)
        gate.set()
        await running
        routed = await asking
        assert routed.worker_id == worker.worker_id
        fleet.router.look_aside.close()
