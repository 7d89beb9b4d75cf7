"""The gate over workers without a network: who waits, who is let in when, and that no lease is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixfleet.errors import DeadlineExceeded, Overloaded, Unavailable
from radixfleet.types import Load
from radixfleet.v1 import inference_pb2
from router.dispatch.claims import Claims
from router.dispatch.gate import Gate
from router.dispatch.lease import Lease, Verdict
from router.dispatch.request import PreparedRequest
from router.workers.state import WorkerState
from tests.support.router_parts import CAPACITY, MODEL, Parts, prepared, tokens
from tests.support.waiting import until

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


SHORT, LONG = 1000, 5000
"""Prompts; workers of the same contexts hold the one alone, or both."""


def mixed_entrance(max_waiting: int = 8) -> tuple[Entrance, WorkerState, WorkerState]:
    """A worker for short prompts and one for all, with one place each."""
    entrance = Entrance(workers=0, max_waiting=max_waiting)
    return entrance, entrance.add("small", 1, context=SHORT + 1), entrance.add("large", 1, context=LONG + 1)


async def test_who_fits_a_free_worker_passes_those_who_do_not() -> None:
    entrance, small, large = mixed_entrance()
    first = await entrance.enter(LONG)
    assert first.worker is large
    long = entrance.enter(LONG)
    await until(lambda: entrance.gate.num_waiting == 1)
    short = await entrance.enter(SHORT)
    assert short.worker is small
    behind = entrance.enter(SHORT)
    await turns()
    assert not behind.done()
    short.settle(Verdict.ANSWERED)
    (await behind).settle(Verdict.ANSWERED)
    assert not long.done()
    first.settle(Verdict.ANSWERED)
    (await long).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_a_queue_full_of_those_who_wait_for_other_workers_refuses_nobody_who_fits_a_free_one() -> None:
    entrance, small, _ = mixed_entrance(max_waiting=2)
    running = await entrance.enter(LONG)
    waiting = [entrance.enter(LONG), entrance.enter(LONG)]
    await until(lambda: entrance.gate.num_waiting == 2)
    short = await entrance.enter(SHORT)
    assert short.worker is small
    with pytest.raises(Overloaded):
        await entrance.enter(SHORT)
    with pytest.raises(Overloaded):
        await entrance.enter(LONG)
    for lease in (short, running):
        lease.settle(Verdict.ANSWERED)
    for task in waiting:
        (await task).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_memory_that_becomes_free_is_left_to_who_waits_for_it() -> None:
    """What fits little by little, for ever, would keep out what needs much at once."""
    entrance, small, large = mixed_entrance()
    held = await entrance.enter(SHORT, first=1)
    assert held.worker is small
    large.report(Load(running_requests=4, waiting_requests=1, kv_protected_tokens=CAPACITY.kv_tokens - SHORT - 1))
    large.capacity = replace(CAPACITY, max_running_requests=100)
    large.changed()
    long = entrance.enter(LONG)
    await until(lambda: entrance.gate.num_waiting == 1)
    short = entrance.enter(SHORT, first=400)
    await turns()
    assert not short.done(), "it would take the memory for which the other waits"
    held.settle(Verdict.ANSWERED)
    (await short).settle(Verdict.ANSWERED)
    large.report(Load())
    (await long).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_a_newcomer_that_can_go_on_at_once_displaces_nobody() -> None:
    entrance, small, large = mixed_entrance(max_waiting=2)
    running = await entrance.enter(LONG)
    waiting = [entrance.enter(LONG), entrance.enter(LONG)]
    await until(lambda: entrance.gate.num_waiting == 2)
    short = await entrance.enter(SHORT, priority=1)
    assert short.worker is small
    await turns()
    assert not any(task.done() for task in waiting)
    urgent = entrance.enter(LONG, priority=1)
    with pytest.raises(Overloaded, match="2 requests wait"):
        await waiting.pop()
    for lease in (short, running):
        lease.settle(Verdict.ANSWERED)
    for task in (urgent, *waiting):
        lease = await task
        assert lease.worker is large
        lease.settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_a_place_that_came_free_a_moment_ago_is_seen_before_anybody_is_refused() -> None:
    """Said: all workers are busy, and 0 requests wait."""
    entrance, _, large = mixed_entrance(max_waiting=1)
    running, short = await entrance.enter(LONG), await entrance.enter(SHORT)
    waiting = entrance.enter(LONG)
    await until(lambda: entrance.gate.num_waiting == 1)
    newcomer = entrance.enter(SHORT, first=400)
    running.settle(Verdict.ANSWERED)
    lease = await waiting
    assert lease.worker is large
    assert not newcomer.done(), "it waits in the place that became free"
    for each in (short, lease):
        each.settle(Verdict.ANSWERED)
    (await newcomer).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_on_a_full_queue_too_a_newcomer_gets_no_worker_that_another_waits_for() -> None:
    entrance, _, large = mixed_entrance(max_waiting=1)
    held = await entrance.enter(SHORT, first=1)
    large.report(Load(running_requests=4, waiting_requests=1, kv_protected_tokens=CAPACITY.kv_tokens - SHORT - 1))
    large.capacity = replace(CAPACITY, max_running_requests=100)
    large.changed()
    long = entrance.enter(LONG)
    await until(lambda: entrance.gate.num_waiting == 1)
    with pytest.raises(Overloaded):
        await entrance.enter(SHORT, first=400)
    large.report(Load())
    for lease in (held, await long):
        lease.settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_who_can_take_whom_follows_the_workers() -> None:
    """A short prompt waited in the lane of the long ones, because only the large worker was there."""
    entrance = Entrance(workers=0)
    large = entrance.add("large", 1, context=LONG + 1)
    running = await entrance.enter(LONG)
    long = entrance.enter(LONG)
    await until(lambda: entrance.gate.num_waiting == 1)
    short = entrance.enter(SHORT)
    await until(lambda: entrance.gate.num_waiting == 2)
    small = entrance.add("small", 1, context=SHORT + 1)
    lease = await short
    assert lease.worker is small
    newcomer = entrance.enter(SHORT)
    await turns()
    assert not newcomer.done()
    for each in (lease, running):
        each.settle(Verdict.ANSWERED)
    assert (await long).worker is large
    for task in (long, newcomer):
        (await task).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


async def test_of_many_lanes_each_is_seen() -> None:
    """Requests beyond the eighth lane were passed by newcomers."""
    lanes = 24
    entrance = Entrance(workers=0, max_waiting=lanes - 1)
    for index in range(lanes):
        entrance.add(f"w{index}", 1, context=100 * index + 200)
    busy = [await entrance.enter(100 * index + 150, first=40 * index) for index in reversed(range(lanes))]
    assert [lease.worker.name for lease in busy] == [f"w{index}" for index in reversed(range(lanes))]
    waiting = [entrance.enter(100 * index + 150) for index in reversed(range(1, lanes))]
    await until(lambda: entrance.gate.num_waiting == lanes - 1)
    busy.pop(-2).settle(Verdict.ANSWERED)
    lease = await waiting.pop()
    assert lease.worker.name == "w1"
    newcomer = entrance.enter(150)
    await turns()
    assert not newcomer.done()
    for each in (*busy, lease):
        each.settle(Verdict.ANSWERED)
    for served in asyncio.as_completed([*waiting, newcomer]):
        (await served).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


def served_by(*names: str) -> Entrance:
    """A worker with one place of each name: ours, ours with another tokenizer, an engine that takes no seed."""
    entrance = Entrance(workers=0)
    made: dict[str, dict[str, Any]] = {
        "ours": {},
        "other": {"model": replace(MODEL, tokenizer_fingerprint=99)},
        "engine": {"dialect": "vllm", "lacks": frozenset({"sampling.seed"})},
    }
    for name in names:
        entrance.settle(entrance.parts.add(name, **made[name]), 1)
    return entrance


SEEDED = inference_pb2.GenerateRequest()
SEEDED.sampling.seed = 1


@pytest.mark.parametrize(
    ("names", "held", "free"),
    [
        (("other", "ours"), prepared(300, fingerprint=99), prepared(300)),
        (("ours", "engine"), prepared(300, look_aside=True), prepared(tokens(300, 500))),
        (("ours", "engine"), prepared(300, message=SEEDED), prepared(tokens(300, 500))),
    ],
    ids=["tokenizer", "look-aside", "needs"],
)
async def test_requests_wait_apart_that_not_the_same_workers_can_take(
    names: tuple[str, ...], held: PreparedRequest, free: PreparedRequest
) -> None:
    entrance = served_by(*names)
    first, second = await entrance.let_in(held), await entrance.let_in(free)
    assert [lease.worker.name for lease in (first, second)] == list(names)
    ahead = entrance.let_in(held)
    await until(lambda: entrance.gate.num_waiting == 1)
    behind = entrance.let_in(free)
    await until(lambda: entrance.gate.num_waiting == 2)
    second.settle(Verdict.ANSWERED)
    assert (await behind).worker is second.worker
    assert not ahead.done()
    first.settle(Verdict.ANSWERED)
    for task in (ahead, behind):
        (await task).settle(Verdict.ANSWERED)
    entrance.parts.check_settled()


@dataclass(slots=True, eq=False)
class Arrival:
    """A request of the play below."""

    prompt: int
    priority: int
    task: asyncio.Task[Lease]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([SHORT, LONG]), st.integers(1, 2)), min_size=1, max_size=4),
    st.lists(
        st.one_of(
            st.tuples(st.just("come"), st.sampled_from([SHORT, LONG]), st.integers(0, 1)),
            st.tuples(st.sampled_from(["end", "leave"]), st.integers(0, 20), st.just(0)),
        ),
        max_size=24,
    ),
)
def test_nobody_waits_while_a_worker_could_take_him_and_nobody_is_passed_on_his_own(
    fleet: list[tuple[int, int]], events: list[tuple[str, int, int]]
) -> None:
    async def play() -> None:
        entrance = Entrance(workers=0, max_waiting=100)
        for number, (longest, places) in enumerate(fleet):
            entrance.add(f"w{number}", places, context=longest + 1)
        fleet_longest = max(longest for longest, _ in fleet)
        waiting: list[Arrival] = []
        running: list[Lease] = []
        for kind, number, priority in events:
            if kind == "come" and number <= fleet_longest:
                waiting.append(Arrival(number, priority, entrance.enter(number, priority=priority)))
            elif kind == "end" and running:
                running.pop(number % len(running)).settle(Verdict.ANSWERED)
            elif kind == "leave" and waiting:
                waiting.pop(number % len(waiting)).task.cancel()
            await turns(6)
            in_order = sorted(waiting, key=lambda arrival: -arrival.priority)
            served = [arrival for arrival in in_order if arrival.task.done()]
            for arrival in served:
                before = in_order[: in_order.index(arrival)]
                equals = [other for other in before if other.prompt == arrival.prompt]
                assert all(other.task.done() for other in equals), "he was passed by his equal"
            running += [await arrival.task for arrival in served]
            waiting = [arrival for arrival in waiting if arrival not in served]
            for arrival in waiting:
                could = [worker for worker in entrance.parts.workers if worker.longest_request > arrival.prompt]
                assert all(worker.view.places_short for worker in could), "he could have gone on"
        while running:  # whoever waits still gets his turn, one end after the other
            running.pop().settle(Verdict.ANSWERED)
            await turns(6)
            running += [await arrival.task for arrival in waiting if arrival.task.done()]
            waiting = [arrival for arrival in waiting if not arrival.task.done()]
        assert not waiting
        entrance.parts.check_settled()

    asyncio.run(play())


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
