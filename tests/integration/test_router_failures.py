"""Workers that die, hang, refuse and come back, behind a router over real gRPC."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from radixfleet.answers import Completion, Delta
from radixfleet.counts import counted
from radixfleet.errors import DeadlineExceeded, InvalidRequest, Unavailable
from radixfleet.types import Load, WorkerStatus
from router.workers.breaker import BreakerState
from tests.support.cuttable_wire import CuttableWire
from tests.support.fake_worker import Call, FakeWorker, Script
from tests.support.leaping_clock import LeapingClock
from tests.support.router_fixture import Fleet, fake_worker, running_fleet
from tests.support.waiting import until


def endless(_: Call) -> Script:
    """Three tokens, and no end."""
    return Script(tokens=3, before_finish=asyncio.Event())


async def tokens_until_lost(fleet: Fleet) -> tuple[int, Unavailable]:
    """Tokens received before the stream broke, and the error that it broke with."""
    received = 0

    async def read() -> None:
        nonlocal received
        async for event in fleet.client.generate("hello"):
            if isinstance(event, Delta):
                received += len(event.token_ids)

    with pytest.raises(Unavailable) as caught:
        await read()
    return received, caught.value


@asynccontextmanager
async def wired_worker(worker: FakeWorker, **values: Any) -> AsyncIterator[tuple[CuttableWire, Fleet]]:
    """A router that reaches its one worker through a wire that can be cut. `values`: settings."""
    await worker.start()
    try:
        async with CuttableWire(worker.address) as wire, running_fleet([], **values) as fleet:
            await fleet.client.register(wire.address)
            await fleet.until_eligible(worker.worker_id)
            yield wire, fleet
    finally:
        await worker.kill()


async def test_a_connection_that_breaks_mid_stream_is_an_error_that_says_how_much_was_delivered() -> None:
    """Behaviour 53: never a silent stop."""
    worker = fake_worker(script=endless)
    async with wired_worker(worker) as (wire, fleet):
        stream = asyncio.create_task(tokens_until_lost(fleet))
        await until(lambda: worker.count("computed") == 1 and worker.calls[0].tokens_sent == 3)
        await until(lambda: fleet.metric("ttft_seconds_count") == 1)
        wire.cut()
        received, error = await stream
        assert str(error) == f"worker w0 was lost after {counted(received, 'token')}: the answer is not complete"
        assert error.metadata["delivered_tokens"] == str(received)
        assert received >= 1
        assert fleet.metric("requests_total", outcome="unavailable") == 1
        assert fleet.metric("retries_total", result="retried") == 0
        await until(lambda: worker.count("cancelled") == 1)


async def test_a_worker_whose_process_is_killed_mid_stream() -> None:
    """Behaviour 53: the same with a real process and SIGKILL; the other worker takes what comes next."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.fake_worker", "doomed", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        async with running_fleet([]) as fleet:
            await fleet.client.register(address)
            await fleet.until_eligible("doomed")
            stream = asyncio.create_task(tokens_until_lost(fleet))
            await until(lambda: fleet.metric("ttft_seconds_count") == 1)
            process.send_signal(signal.SIGKILL)
            received, error = await stream
            assert f"worker doomed was lost after {counted(received, 'token')}" in str(error)
            await fleet.until_eligible()
            survivor = await fake_worker("survivor").start()
            await fleet.client.register(survivor.address)
            await fleet.until_eligible("survivor")
            assert (await fleet.client.complete("hello")).started.worker_id == "survivor"
            await survivor.kill()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_request_to_a_dead_worker_is_tried_elsewhere_before_its_first_token() -> None:
    """Behaviour 53: on another worker, without the client noticing."""
    workers = [fake_worker("w0"), fake_worker("w1")]
    async with running_fleet(workers, heartbeat_timeout_s=60.0) as fleet:
        first = await fleet.client.complete("p" * 640)
        dead = next(worker for worker in workers if worker.worker_id == first.started.worker_id)
        # The request is on its way when the worker goes: its state stream cannot have told the router yet.
        dead.script = lambda _: Script(before_start=asyncio.Event())
        again = asyncio.create_task(fleet.client.complete("p" * 640))
        await until(lambda: dead.count("waiting") == 1)
        await dead.kill()
        done = await again
        assert done.started.worker_id != dead.worker_id
        assert done.started.route is not None
        assert done.started.route.retries == 1
        assert fleet.metric("retries_total", result="retried") == 1
        assert fleet.metric("requests_total", outcome="ok") == 2


async def test_a_worker_that_stops_in_order_is_not_taken_for_the_clients_cancellation() -> None:
    """A server that stops cancels its calls: the client must hear that the worker is gone, not that it cancelled."""
    worker = fake_worker(script=endless)
    async with running_fleet([worker]) as fleet:
        stream = asyncio.create_task(tokens_until_lost(fleet))
        await until(lambda: fleet.metric("ttft_seconds_count") == 1)
        await worker.kill()
        received, error = await stream
        assert f"lost after {counted(received, 'token')}" in str(error)
        assert fleet.metric("requests_total", outcome="cancelled") == 0


async def test_a_stream_that_ends_without_finished_is_an_error() -> None:
    """Behaviour 53: an end without a reason is no end."""
    async with running_fleet([fake_worker(script=lambda _: Script(tokens=2, finish=False))]) as fleet:
        received, error = await tokens_until_lost(fleet)
        assert received == 2
        assert "lost after 2 tokens" in str(error)


async def test_no_worker_at_all_is_unavailable_with_a_time_to_come_back() -> None:
    """Behaviour 55: a router without workers answers, and says when to try again."""
    async with running_fleet([]) as fleet:
        with pytest.raises(Unavailable, match="no worker has registered at this router") as caught:
            await fleet.client.complete("hello")
        assert caught.value.retry_after_s is not None


async def test_client_errors_do_not_open_the_breaker() -> None:
    """Behaviour 52: bad requests, however many, take no worker out."""
    worker = fake_worker(script=lambda _: Script(error=InvalidRequest("too long", field="prompt")))
    async with running_fleet([worker], breaker_failures=3) as fleet:
        for _ in range(10):
            with pytest.raises(InvalidRequest):
                await fleet.client.complete("hello")
        assert fleet.state(0).breaker.state is BreakerState.CLOSED
        worker.script = lambda _: Script()
        await fleet.client.complete("hello")


async def test_short_deadlines_of_clients_do_not_open_the_breaker() -> None:
    """Behaviour 52: a deadline is a sign of a sick worker only when it was silent for long."""
    worker = fake_worker(script=lambda _: Script(before_start=asyncio.Event()))
    async with running_fleet([worker], breaker_failures=2) as fleet:
        for _ in range(4):
            with pytest.raises(DeadlineExceeded):
                await fleet.client.complete("hello", timeout_s=0.05)
        await fleet.until_settled()
        assert fleet.state(0).breaker.state is BreakerState.CLOSED


async def test_the_breaker_opens_on_broken_connections_and_a_probe_closes_it() -> None:
    """Behaviour 52: streams that break take the worker out; after the pause one request tries it."""
    worker = fake_worker(script=lambda _: Script(tokens=1, finish=False))
    clock = LeapingClock()
    async with running_fleet([worker], clock=clock, breaker_failures=3, breaker_open_s=300.0) as fleet:
        for _ in range(3):
            with pytest.raises(Unavailable, match="lost after 1 token:"):
                await fleet.client.complete("hello")
        assert fleet.state(0).breaker.state is BreakerState.OPEN
        with pytest.raises(Unavailable, match="breaker"):
            await fleet.client.complete("hello")
        assert len(worker.calls) == 3
        worker.script = lambda _: Script()
        clock.leapt_s = 300.0
        assert fleet.state(0).breaker.state is BreakerState.HALF_OPEN
        await fleet.client.complete("hello")
        assert fleet.state(0).breaker.state is BreakerState.CLOSED


async def test_a_hung_worker_gets_nothing_until_it_speaks_again() -> None:
    """A process that keeps its connections and says nothing is not connected; nobody restarts the router for it."""
    worker = fake_worker()
    async with running_fleet([worker, fake_worker("w1")], heartbeat_timeout_s=2.0) as fleet:
        worker.speaks.clear()
        await fleet.until_eligible("w1")
        entries = {entry.worker_id: entry for entry in await fleet.client.list_workers()}
        assert not entries["w0"].connected
        assert entries["w0"].ineligible_reason == "disconnected"
        for _ in range(4):
            assert (await fleet.client.complete("x" * 100)).started.worker_id == "w1"
        worker.speaks.set()
        await fleet.until_eligible("w0", "w1")


@asynccontextmanager
async def asked_in_vain(**values: Any) -> AsyncIterator[tuple[FakeWorker, Fleet, asyncio.Task[Completion]]]:
    """A worker in the middle of an answer, that has begun to drain and says no more what it is."""
    end = asyncio.Event()
    worker = fake_worker(script=lambda _: Script(before_finish=end))
    async with running_fleet([worker], connect_timeout_s=0.3, max_retries=0, **values) as fleet:
        answering = asyncio.create_task(fleet.client.complete("hello", max_new_tokens=4))
        await until(lambda: worker.calls and worker.calls[0].tokens_sent == 4)
        worker.info_gate, asked = asyncio.Event(), worker.infos_asked
        worker.status = WorkerStatus.DRAINING
        worker.publish()
        await until(lambda: worker.infos_asked > asked, "it is asked, for it drains")
        yield worker, fleet, answering
        worker.info_gate.set()
        worker.speaks.set()
        end.set()
        await asyncio.wait([answering])


@pytest.mark.parametrize("link", [True, False], ids=["link", "calls"])
async def test_a_worker_that_is_late_with_an_answer_about_itself_keeps_its_requests(link: bool) -> None:
    """It is asked when its status changes, as in a drain, and may be busy: what it computes was given up."""
    async with asked_in_vain(heartbeat_timeout_s=2.0, link=link) as (worker, fleet, answering):
        asked = worker.infos_asked
        await until(lambda: worker.infos_asked > asked + 8, "it is asked for longer than workers may be silent")
        assert fleet.state(0).connected, "it tells its state"
        assert not answering.done()
    assert len(answering.result().token_ids) == 4
    assert len(worker.calls) == 1


async def test_its_state_is_followed_until_it_answers() -> None:
    async with asked_in_vain(heartbeat_timeout_s=60.0) as (worker, fleet, _):
        asked = worker.infos_asked
        await until(lambda: worker.infos_asked > asked, "it is asked again")
        worker.extra_load = Load(waiting_requests=77)
        await until(lambda: fleet.state(0).books.reported.waiting_requests == 77)
        worker.max_context_tokens = 12_345
        assert worker.info_gate is not None
        worker.info_gate.set()
        await until(lambda: fleet.state(0).max_context_tokens == 12_345, "and then it is known")


async def test_it_keeps_them_though_the_router_stood_still_meanwhile() -> None:
    async with asked_in_vain(heartbeat_timeout_s=2.0) as (worker, fleet, answering):
        time.sleep(3)  # noqa: ASYNC251 - nothing runs here meanwhile, which is what is tested
        asked = worker.infos_asked
        await until(lambda: worker.infos_asked > asked + 1, "it is asked again")
        assert fleet.state(0).connected
        assert not answering.done()
    assert len(answering.result().token_ids) == 4


async def test_a_worker_that_neither_answers_nor_tells_loses_its_requests() -> None:
    async with asked_in_vain(heartbeat_timeout_s=2.0) as (worker, fleet, answering):
        cuts: list[Callable[[], None]] = []
        cut = fleet.state(0).on_silence

        def counted_cut() -> None:
            cuts.append(cut)
            cut()

        fleet.state(0).on_silence = counted_cut
        worker.speaks.clear()
        with pytest.raises(Unavailable, match="lost after 4 tokens"):
            await answering
        asked = worker.infos_asked
        await until(lambda: worker.infos_asked > asked + 1, "it is asked again")
        assert len(cuts) == 1


async def test_a_worker_that_does_not_answer_cannot_be_put_back_to_work() -> None:
    async with wired_worker(fake_worker(), connect_timeout_s=1.0) as (wire, fleet):
        wire.freeze()
        with pytest.raises(Unavailable, match="worker w0 does not answer"):
            await fleet.client.resume("w0")


async def test_a_frozen_wire_is_noticed_by_the_missing_heartbeat() -> None:
    worker = fake_worker()
    async with wired_worker(worker) as (wire, fleet):
        wire.freeze()
        await until(lambda: not fleet.eligible())
        wire.mend()
        await fleet.until_eligible("w0")
        await fleet.client.complete("hello")
