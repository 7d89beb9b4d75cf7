"""The gate where workers differ: who passes whom, and that nobody is passed for ever."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixfleet.errors import Overloaded
from radixfleet.types import Load
from radixfleet.v1 import inference_pb2
from router.dispatch.lease import Lease, Verdict
from router.dispatch.request import PreparedRequest
from router.workers.state import WorkerState
from tests.support.entrance import Entrance, turns
from tests.support.router_parts import CAPACITY, MODEL, prepared, tokens
from tests.support.waiting import until

SHORT, LONG = 1000, 5000
"""Prompts; workers of the same contexts hold the one alone, or both."""


def mixed_entrance(max_waiting: int = 8) -> tuple[Entrance, WorkerState, WorkerState]:
    """A worker for short prompts and one for all, with one place each."""
    entrance = Entrance(workers=0, max_waiting=max_waiting)
    return entrance, entrance.add("small", 1, context=SHORT + 1), entrance.add("large", 1, context=LONG + 1)


async def queue_of_long(entrance: Entrance, count: int) -> tuple[Lease, list[asyncio.Task[Lease]]]:
    """A long prompt that runs, and so many that wait for its worker."""
    running = await entrance.enter(LONG)
    waiting = [entrance.enter(LONG) for _ in range(count)]
    await until(lambda: entrance.gate.num_waiting == count)
    return running, waiting


def leave_memory_for_short(worker: WorkerState) -> None:
    """It has places, and memory for no more than a short prompt."""
    worker.report(Load(running_requests=4, waiting_requests=1, kv_protected_tokens=CAPACITY.kv_tokens - SHORT - 1))
    worker.capacity = replace(CAPACITY, max_running_requests=100)
    worker.changed()


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
    running, waiting = await queue_of_long(entrance, 2)
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
    leave_memory_for_short(large)
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
    running, waiting = await queue_of_long(entrance, 2)
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
    leave_memory_for_short(large)
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
