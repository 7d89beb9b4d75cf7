"""The gate over workers without a network: who waits, who is let in when, and that no lease is lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixfleet.errors import DeadlineExceeded, Overloaded, Unavailable
from radixfleet.types import Load
from router.dispatch.claims import Claims
from router.dispatch.lease import Lease, Verdict
from router.dispatch.request import PreparedRequest
from tests.support.entrance import Entrance, turns
from tests.support.router_parts import CAPACITY, prepared
from tests.support.waiting import until


async def test_a_request_waits_while_every_worker_is_full_and_goes_to_the_first_that_has_a_place() -> None:
    entrance = Entrance(workers=2, places=1)
    first, second = await entrance.enter(first=1), await entrance.enter(first=500)
    assert first.worker is not second.worker
    third = entrance.enter(first=250)
    await turns()
    assert not third.done()
    assert entrance.value("queued_requests") == 1
    second.settle(Verdict.ANSWERED)
    assert (await third).worker is second.worker
    assert entrance.value("queued_requests") == 0
    assert entrance.value("queue_seconds_count") == 1
    for lease in (first, await third):
        lease.settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_the_choice_is_made_at_the_end_of_the_wait_by_what_is_cached_then() -> None:
    """The prompt became cached on a worker while the request waited: that is where it goes."""
    entrance = Entrance(workers=2, places=1)
    busy = [await entrance.enter(first=1), await entrance.enter(first=400)]
    waiting = entrance.enter(640, first=1)
    await turns()
    holder = busy[1].worker
    entrance.parts.sketch.end(entrance.parts.sketch.book(holder.slot, prepared(640).block_hashes, 640))
    for lease in busy:
        lease.settle(Verdict.ANSWERED)
    lease = await waiting
    assert lease.worker is holder
    assert lease.decision.predicted_cached_tokens >= 576
    lease.settle(Verdict.UNKNOWN)


async def test_no_newcomer_passes_those_who_wait_but_higher_priorities_do() -> None:
    entrance = Entrance(workers=1, places=1)
    running = await entrance.enter()
    waiting = [entrance.enter(), entrance.enter(priority=3)]
    await turns()
    running.settle(Verdict.ANSWERED)
    newcomer = entrance.enter()
    order = []
    for task in (waiting[1], waiting[0], newcomer):
        lease = await task
        order.append(task)
        assert sum(other.done() for other in (*waiting, newcomer)) == len(order), "one place, one at a time"
        lease.settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    entrance = Entrance(workers=1, places=1, max_waiting=2)
    running = await entrance.enter()
    waiting = [entrance.enter(), entrance.enter()]
    await turns()
    with pytest.raises(Overloaded, match="2 requests wait") as caught:
        await entrance.enter()
    assert caught.value.retry_after_s == 1.0
    urgent = entrance.enter(priority=1)
    with pytest.raises(Overloaded):
        await waiting[1]
    assert entrance.value("queue_refusals_total", cause="full") == 2
    running.settle(Verdict.ANSWERED)
    (await urgent).settle(Verdict.ANSWERED)
    (await waiting[0]).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_without_a_queue_requests_wait_in_the_engines() -> None:
    entrance = Entrance(workers=1, places=1, max_waiting=0)
    leases = [await entrance.enter() for _ in range(5)]
    assert leases[0].worker.view.places_short == 5
    for lease in leases:
        lease.settle(Verdict.ANSWERED)


async def test_a_choice_that_fails_by_a_fault_of_ours_ends_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entrance = Entrance(workers=1, places=1)
    running = await entrance.enter()
    bad, good = entrance.enter(first=10), entrance.enter(first=20)
    await until(lambda: entrance.gate.num_waiting == 2)
    choose = entrance.parts.chooser.choose_unless_saturated
    faults = [ValueError("a fault")]

    def choose_badly_once(request: PreparedRequest, claims: Claims | None = None) -> Lease | None:
        if faults:
            raise faults.pop()
        return choose(request, claims)

    monkeypatch.setattr(entrance.parts.chooser, "choose_unless_saturated", choose_badly_once)
    running.settle(Verdict.ANSWERED)
    with pytest.raises(ValueError, match="a fault"):
        await bad
    (await good).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


@pytest.mark.parametrize(("left_s", "counted"), [(0.0, 1), (30.0, 0), (None, 0)])
async def test_a_deadline_counts_whoever_minds_it_first(left_s: float | None, counted: int) -> None:
    """gRPC and `RouteStream` mind it as well, and cancel the wait."""
    entrance = Entrance(workers=1, places=1)
    running = await entrance.enter()
    left = iter([60.0, left_s])
    waiting = asyncio.create_task(entrance.gate.enter(prepared(300), lambda: next(left)))
    await until(lambda: entrance.gate.num_waiting == 1)
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert entrance.value("queue_refusals_total", cause="deadline") == counted
    running.settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_a_deadline_that_passes_in_the_queue_ends_the_wait() -> None:
    entrance = Entrance(workers=1, places=1)
    running = await entrance.enter()
    with pytest.raises(DeadlineExceeded):
        await entrance.enter(deadline_s=0.01)
    assert entrance.gate.num_waiting == 0
    assert entrance.value("queue_refusals_total", cause="deadline") == 1
    running.settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_a_client_that_leaves_in_the_turn_of_its_choice_leaves_no_booking() -> None:
    """Behaviour 44: the lease was given, and nobody was there to take it."""
    entrance = Entrance(workers=1, places=1)
    running = await entrance.enter()
    leaver, other = entrance.enter(), entrance.enter()
    await turns()
    running.settle(Verdict.ANSWERED)
    entrance.gate._serve_all()
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    (await other).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_those_who_wait_hear_when_nobody_serves_any_more() -> None:
    entrance = Entrance(workers=1, places=1)
    await entrance.enter()
    waiting = entrance.enter()
    await turns()
    worker = entrance.parts.workers[0]
    worker.connected = False
    worker.changed()
    with pytest.raises(Unavailable, match="disconnected"):
        await waiting


async def test_a_worker_that_joins_takes_from_the_queue() -> None:
    """Behaviour 48: nobody has to end first."""
    entrance = Entrance(workers=1, places=1)
    await entrance.enter(first=1)
    waiting = entrance.enter(first=500)
    await turns()
    joined = entrance.add("new", places=1)
    assert (await waiting).worker is joined


async def test_memory_that_is_short_lets_one_request_wait_in_the_engine_and_no_more() -> None:
    """Its pages are freed inside a step; the router hears of it in the next report."""
    entrance = Entrance(workers=1, places=100)
    worker = entrance.parts.workers[0]
    worker.report(Load(running_requests=4, kv_protected_tokens=CAPACITY.kv_tokens - 100))
    lease = await entrance.enter(300)
    worker.report(Load(running_requests=4, waiting_requests=1, kv_protected_tokens=CAPACITY.kv_tokens - 100))
    waiting = entrance.enter(300)
    await turns()
    assert not waiting.done()
    worker.report(Load(running_requests=4, kv_protected_tokens=CAPACITY.kv_tokens - 4000))
    (await waiting).settle(Verdict.ANSWERED)
    lease.settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["run", "cancel", "deadline"])), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_every_request_has_one_outcome_and_no_booking_is_left(
    arrivals: list[tuple[int, str]], places: int, max_waiting: int
) -> None:
    """Behaviour 44: any mix of priorities, cancellations, deadlines and refusals."""

    async def one(entrance: Entrance, priority: int, fate: str) -> str:
        task = entrance.enter(priority=priority, deadline_s=0.003 if fate == "deadline" else None)
        if fate == "cancel":
            await turns(2)
            task.cancel()
        try:
            lease = await task
        except asyncio.CancelledError:
            return "cancelled"
        except Overloaded:
            return "refused"
        except DeadlineExceeded:
            return "deadline"
        assert lease.worker.books.own_requests <= places, "no more than there are places"
        await turns(3)
        lease.settle(Verdict.ANSWERED)
        return "served"

    async def play() -> None:
        entrance = Entrance(workers=1, places=places, max_waiting=max_waiting)
        outcomes = await asyncio.gather(*(one(entrance, *arrival) for arrival in arrivals))
        assert len(outcomes) == len(arrivals)
        assert outcomes.count("served") >= 1 or "cancelled" in outcomes
        await until(lambda: entrance.gate.num_waiting == 0)
        entrance.parts.check_settled()

    asyncio.run(play())
