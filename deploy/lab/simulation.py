"""A fleet in virtual time: arrivals, routers, workers and the delays between them, event by event.

    arrival --choose, book--> worker: submit ... admitted (receipt) ... first token ... end (lease settled)
    worker --every REPORT_S while it works--> report of load and cache --report_delay_s later--> every router
    front  --within PROMPT_S, where there are several routers--> what it has accepted --LINK_S later--> every router

A router learns of receipts, first tokens and ends from the streams that it relays, so these take no time here. Reports
arrive `report_delay_s` late. When a worker is lost, its requests without a token are sent to another worker once, as
the real router does; the others fail.

The agenda is a heap of (time, number, function, argument). `run` takes the earliest event, sets the clock to its time
and calls the function, which may schedule more. Events of one time run in the order in which they were scheduled, and
all randomness comes from the seed, so two runs of one setup give the same result to the last bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

import numpy as np

from deploy.lab.clock import VirtualClock
from deploy.lab.front import SimulatedFront
from deploy.lab.presets import Preset
from deploy.lab.router import NAMESPACE, SEED, AcceptedPrompts, SimulatedRouter, StateReport, prepared
from deploy.lab.worker import Gaps, Job, SimulatedWorker, Told
from loadtest.results import Outcome, RunResult
from loadtest.workloads import Arrival, reusable_tokens
from radixfleet.blocks import chain_hashes
from radixfleet.errors import Unavailable
from radixfleet.types import HashArray, Incarnation, Load, TokenArray
from router.dispatch.lease import Lease, Verdict
from router.index.sketch import NO_BLOCKS
from router.policies import Policy
from worker.core.messages import Submit
from worker.servicer.acceptance import PROMPT_S

REPORT_S = 0.1
"""Least time between two reports of a worker that works."""
HEARTBEAT_S = 1.0
"""Time between two reports of an idle worker."""
LINK_S = 0.001
"""Time that a message takes from a front to a router."""
MAX_TRIES = 2

Truth = Literal["deltas", "receipts"]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Outage:
    """A worker is lost at `from_s` and starts at `until_s` with an empty cache. From 0 s: it joins at `until_s`."""

    worker: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Setup:
    """A fleet, and what happens to it."""

    presets: Sequence[Preset]
    """One for each worker."""
    seed: int = 0
    truth: Truth = "deltas"
    """deltas: workers report every change of their caches. receipts: they report none, and a router learns only how
    many tokens each request found."""
    report_delay_s: float = 0.1
    num_routers: int = 1
    """Arrivals are dealt to them at random; each sees all reports, and its own requests."""
    outages: Sequence[Outage] = ()
    leaps: bool = True
    """False: simulate every step by itself, which is slow and gives the same result."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A workload, hashed once for all runs."""

    arrivals: Sequence[Arrival]
    block_hashes: Sequence[HashArray]
    reusable: Sequence[int]


def prepare(arrivals: Sequence[Arrival], on_progress: Progress = lambda _: None) -> Prepared:
    """Hash every prompt. `on_progress` is told how many are done."""
    hashes = []
    for index, arrival in enumerate(arrivals):
        hashes.append(chain_hashes(SEED, arrival.token_ids))
        on_progress(index + 1)
    return Prepared(arrivals, hashes, reusable_tokens(arrivals))


@dataclass(slots=True, eq=False)
class _Request:
    arrival: Arrival
    router: SimulatedRouter
    outcome: Outcome
    tokens: TokenArray
    answer: TokenArray
    lease: Lease | None = None


@dataclass(slots=True, eq=False)
class _Place:
    """A worker's place in the fleet, which outlives the worker: `worker` and `front` are None during an outage."""

    number: int
    preset: Preset
    incarnation: Incarnation
    worker: SimulatedWorker | None = None
    front: SimulatedFront | None = None
    """None too with one router, which has sent the worker all its prompts itself, and with receipts."""
    end_at_s: float | None = None
    """Time of the `_end_step` event that the agenda holds for it, so that none is scheduled twice."""
    sequence: int = 0
    """Sequence number of the last report; it grows with each report that tells a change of the cache."""
    known_load: Load = Load()  # noqa: RUF009  frozen
    """Load in the last report that has arrived at the routers."""
    accepted_at_s: float = 0.0
    """Time of the last `_send_accepted` event, past or still to come."""
    report_at_s: float = 0.0
    """Time of the next report. A `_report` event of another time was superseded and does nothing."""
    busy_s: float = 0.0
    gaps: list[Gaps] = field(default_factory=list)


class Simulation:
    """One run of one workload under one policy. Made for one `run`."""

    def __init__(self, policy: Policy, setup: Setup, workload: Prepared) -> None:
        self._policy_name = policy.name
        self._setup = setup
        self._workload = workload
        self._clock = VirtualClock()
        self._random = Random(setup.seed)  # noqa: S311
        self._routers = [
            SimulatedRouter(policy, self._clock, Random(setup.seed + number), deltas=setup.truth == "deltas")  # noqa: S311
            for number in range(setup.num_routers)
        ]
        self._places = [_Place(number, preset, Incarnation(0)) for number, preset in enumerate(setup.presets)]
        self._requests: dict[int, _Request] = {}
        """Requests that have not ended, by uid, which is their index in the workload."""
        self._outcomes: list[Outcome] = []
        self._agenda: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_scheduled = 0

    @property
    def routers(self) -> Sequence[SimulatedRouter]:
        """The routers, for tests to look into."""
        return self._routers

    def run(self, on_progress: Progress = lambda _: None) -> RunResult:
        """Serve the whole workload. `on_progress` is told how many requests have ended."""
        self._begin()
        total = len(self._workload.arrivals)
        while len(self._outcomes) < total or self._requests:
            at_s, _, act, subject = heapq.heappop(self._agenda)
            self._clock.set(at_s)
            act(subject)
            on_progress(len(self._outcomes) - len(self._requests))
        for router in self._routers:
            router.check()
        for place in self._places:
            self._empty(place)
        return self._result()

    def _begin(self) -> None:
        for place in self._places:
            for router in self._routers:
                router.add(place.number, place.preset)
        for outage in self._setup.outages:
            self._schedule(outage.from_s, self._lose, self._places[outage.worker])
            self._schedule(outage.until_s, self._start, self._places[outage.worker])
        late = {outage.worker for outage in self._setup.outages if outage.from_s == 0}
        for place in self._places:
            if place.number not in late:
                self._start(place)
        self._schedule(self._workload.arrivals[0].at_s, self._arrive, 0)

    def _schedule(self, at_s: float, act: Callable[[Any], None], subject: Any) -> None:
        """Call `act(subject)` at `at_s`."""
        self._num_scheduled += 1
        heapq.heappush(self._agenda, (at_s, self._num_scheduled, act, subject))

    def _arrive(self, index: int) -> None:
        arrivals = self._workload.arrivals
        arrival = arrivals[index]
        outcome = Outcome(
            arrival.at_s, arrival.prompt_tokens, arrival.max_new_tokens, ceiling_tokens=self._workload.reusable[index]
        )
        router = self._random.choice(self._routers)
        self._outcomes.append(outcome)
        self._requests[index] = _Request(arrival, router, outcome, arrival.token_ids, arrival.answer_ids)
        if index + 1 < len(arrivals):
            self._schedule(arrivals[index + 1].at_s, self._arrive, index + 1)
        self._dispatch(index)

    def _dispatch(self, uid: int, excluded: Sequence[int] = ()) -> None:
        request = self._requests[uid]
        outcome = request.outcome
        hashes = self._workload.block_hashes[uid]
        try:
            number, lease = request.router.choose(prepared(str(uid), request.tokens, hashes), excluded)
        except Unavailable as error:
            self._fail(uid, str(error))
            return
        request.lease = lease
        outcome.tries += 1
        outcome.worker, outcome.reason = number, lease.decision.reason
        outcome.reachable_tokens = lease.decision.reachable_cached_tokens
        outcome.predicted_tokens = lease.decision.predicted_cached_tokens
        place = self._places[number]
        assert place.worker is not None, "a router chose a worker that is out"
        if place.front is not None:
            place.front.accept(uid, hashes, len(request.tokens))
            self._schedule_accepted(place)
        place.worker.submit(Job(_submit(uid, request), request.answer.tolist()))
        self._follow(place)
        self._wake(place)

    def _end_step(self, place: _Place) -> None:
        worker = place.worker
        if worker is None or worker.ends_at_s != self._clock.now():
            return  # The stretch of steps was cut short since, or the worker was lost.
        worker.end()
        self._follow(place)

    def _follow(self, place: _Place) -> None:
        """After a worker did something: pass on what it told, and schedule the end of what it does now."""
        assert place.worker is not None
        self._pass_on(place, place.worker.told())
        ends_at_s = place.worker.ends_at_s
        if ends_at_s is not None and ends_at_s != place.end_at_s:
            self._schedule(ends_at_s, self._end_step, place)
        place.end_at_s = ends_at_s

    def _pass_on(self, place: _Place, told: Told) -> None:
        now_s = self._clock.now()
        for uid, cached_tokens in told.admitted:
            request = self._requests[uid]
            request.outcome.started_s, request.outcome.cached_tokens = now_s, cached_tokens
            _lease_of(request).started(cached_tokens)
            if place.front is not None:
                place.front.admitted(uid, cached_tokens)
        for uid in told.first_tokens:
            request = self._requests[uid]
            request.outcome.first_token_s = now_s
            _lease_of(request).first_token()
            if place.front is not None:
                place.front.first_token(uid)
        for uid in told.ended:
            request = self._requests.pop(uid)
            request.outcome.ended_s = now_s
            _lease_of(request).settle(Verdict.ANSWERED, request.answer)
            self._tell_front_end(place, uid)
        for uid, why in told.failed:
            _lease_of(self._requests[uid]).settle(Verdict.ANSWERED)
            self._tell_front_end(place, uid)
            self._fail(uid, why)

    def _tell_front_end(self, place: _Place, uid: int) -> None:
        """A request has ended. Its front learns it only once the engine's reports before the end have arrived there."""
        if place.front is not None:
            self._schedule(self._clock.now() + self._setup.report_delay_s, place.front.end, uid)

    def _fail(self, uid: int, why: str) -> None:
        outcome = self._requests.pop(uid).outcome
        outcome.ended_s, outcome.error = self._clock.now(), why

    def _wake(self, place: _Place) -> None:
        """The worker has got work: its next report comes within REPORT_S, and no longer at the next heartbeat."""
        now_s = self._clock.now()
        if place.report_at_s > now_s + REPORT_S:
            self._schedule_report(place, now_s + REPORT_S)

    def _schedule_report(self, place: _Place, at_s: float) -> None:
        place.report_at_s = at_s
        self._schedule(at_s, self._report, (place, place.incarnation, at_s))

    def _report(self, due: tuple[_Place, Incarnation, float]) -> None:
        place, incarnation, at_s = due
        worker = place.worker
        if worker is None or place.incarnation != incarnation or place.report_at_s != at_s:
            return
        load, evicted, added = worker.report()
        self._follow(place)
        place.sequence += len(evicted) > 0 or len(added) > 0
        report = StateReport(incarnation, place.sequence, load, evicted, added)
        self._schedule(at_s + self._setup.report_delay_s, self._take_report, (place, report))
        self._schedule_report(place, at_s + REPORT_S if worker.uids else self._next_heartbeat_s(at_s))

    def _next_heartbeat_s(self, at_s: float) -> float:
        """When an idle worker reports next.

        While the whole fleet is idle, reports say nothing new until the next arrival. Of them only the last that
        reaches the routers before it is simulated, so that a trace with long pauses costs no more than one without.
        """
        arrivals = self._workload.arrivals
        if self._requests or len(self._outcomes) == len(arrivals):
            return at_s + HEARTBEAT_S
        idle_s = arrivals[len(self._outcomes)].at_s - self._setup.report_delay_s - at_s
        return at_s + HEARTBEAT_S * max(1, int(idle_s / HEARTBEAT_S))

    def _take_report(self, sent: tuple[_Place, StateReport]) -> None:
        place, report = sent
        if place.front is not None and report.incarnation == place.incarnation:
            report = replace(report, accepted=place.front.report(report.evicted, report.added))
            place.known_load = report.load
        for router in self._routers:
            router.take(place.number, report)

    def _schedule_accepted(self, place: _Place) -> None:
        """Its front has accepted a request: it tells the routers at once, or PROMPT_S after it last did."""
        now_s = self._clock.now()
        if place.accepted_at_s <= now_s:
            place.accepted_at_s = max(now_s, place.accepted_at_s + PROMPT_S)
            self._schedule(place.accepted_at_s, self._send_accepted, (place, place.incarnation))

    def _send_accepted(self, due: tuple[_Place, Incarnation]) -> None:
        place, incarnation = due
        if place.front is None or place.incarnation != incarnation:
            return
        self._schedule(self._clock.now() + LINK_S, self._take_accepted, (place, incarnation, place.front.tell()))

    def _take_accepted(self, told: tuple[_Place, Incarnation, AcceptedPrompts]) -> None:
        place, incarnation, accepted = told
        load = place.known_load if place.incarnation == incarnation else Load()
        news = StateReport(incarnation, 0, load, NO_BLOCKS, NO_BLOCKS, accepted, is_between_reports=True)
        for router in self._routers:
            router.take(place.number, news)

    def _start(self, place: _Place) -> None:
        place.incarnation = Incarnation(place.incarnation + 1)
        place.worker = SimulatedWorker(place.preset, self._clock, leaps=self._setup.leaps)
        place.sequence, place.known_load, place.accepted_at_s = 0, Load(), 0.0
        if len(self._routers) > 1 and self._setup.truth == "deltas":
            place.front = SimulatedFront()
        for router in self._routers:
            router.connect(place.number, place.incarnation)
        # Spread over REPORT_S, as workers that started independently are.
        offset_s = REPORT_S * place.number / len(self._places)
        self._schedule_report(place, self._clock.now() + REPORT_S + offset_s)

    def _lose(self, place: _Place) -> None:
        """The worker dies: its cache is gone, and its requests are sent elsewhere or fail."""
        if place.worker is None:
            return
        uids = place.worker.uids
        self._empty(place)
        for router in self._routers:
            router.lose(place.number)
        for uid in uids:
            request = self._requests[uid]
            _lease_of(request).settle(Verdict.FAILED)
            if request.outcome.first_token_s is None and request.outcome.tries < MAX_TRIES:
                self._dispatch(uid, excluded=[place.number])
            else:
                self._fail(uid, "the worker was lost")

    def _empty(self, place: _Place) -> None:
        """Take the worker out of its place, and keep its figures for the result."""
        if place.worker is not None:
            place.worker.scheduler.check()
            place.busy_s += place.worker.busy_s
            place.gaps.append(place.worker.gaps)
            place.worker = place.front = None

    def _result(self) -> RunResult:
        gaps = [gaps for place in self._places for gaps in place.gaps]
        return RunResult(
            policy=self._policy_name,
            num_workers=len(self._places),
            duration_s=max(outcome.ended_s or 0.0 for outcome in self._outcomes),
            outcomes=self._outcomes,
            gaps_s=np.concatenate([np.frombuffer(each.seconds, dtype=np.float64) for each in gaps]),
            gap_tokens=np.concatenate([np.frombuffer(each.tokens, dtype=np.int64) for each in gaps]),
            busy_s=[place.busy_s for place in self._places],
        )


def _lease_of(request: _Request) -> Lease:
    assert request.lease is not None, "a worker told of a request that it was not sent"
    return request.lease


def _submit(uid: int, request: _Request) -> Submit:
    return Submit(
        uid=uid,
        token_ids=request.tokens.view(np.int32),
        namespace=NAMESPACE,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=uid,
        max_new_tokens=request.arrival.max_new_tokens,
        min_new_tokens=0,
        stop_token_ids=(),
        priority=0,
    )
