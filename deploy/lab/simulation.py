"""A fleet in virtual time: arrivals, routers, workers and the delays between them, event by event.

    arrival --choose, book--> worker: submit ... admitted (receipt) ... first token ... end (lease settled)
    worker --every REPORT_S while it works--> report of load and cache --report_delay_s later--> every router
    front  --within PROMPT_S, where there are several routers--> what it has accepted --LINK_S later--> every router

A request, a receipt, a first token and an end take no time on their way: a router learns of them from the streams it
relays. Reports come late. A worker that stops takes its requests with it: those without a token are tried once more,
elsewhere, as the router does; the others fail.

Everything follows from the arrivals, the setup and its seed; two runs give the same result to the last bit.
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
"""As a worker's state stream: at most so often while something changes, ..."""
HEARTBEAT_S = 1.0
"""... and at least so often."""
LINK_S = 0.001
"""From one process to another."""
MAX_TRIES = 2

Truth = Literal["deltas", "receipts"]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Outage:
    """A worker is not there from `from_s` to `until_s`, and comes (back) with an empty cache."""

    worker: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Setup:
    """A fleet, and what happens to it."""

    presets: Sequence[Preset]
    """Of each worker."""
    seed: int = 0
    truth: Truth = "deltas"
    """receipts: workers tell nothing of their caches but what each request found."""
    report_delay_s: float = 0.1
    num_routers: int = 1
    """Arrivals are dealt to them at random; each sees all reports, and its own requests."""
    outages: Sequence[Outage] = ()
    """From 0 s: a worker that joins later."""
    leaps: bool = True
    """False: the slow way; it must make no difference."""


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
    """A place for a worker: empty while the worker is out."""

    number: int
    preset: Preset
    incarnation: Incarnation
    worker: SimulatedWorker | None = None
    front: SimulatedFront | None = None
    """None with a single router, which knows all prompts, and where workers tell nothing of their caches."""
    due_s: float | None = None
    """For when its next `end` stands in the agenda."""
    sequence: int = 0
    known_load: Load = Load()  # noqa: RUF009  frozen
    """As routers know it, by the last report that has come."""
    told_at_s: float = 0.0
    """When routers are told, or were told last, of what it has accepted since."""
    report_at_s: float = 0.0
    """When the next report is to be taken."""
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
        """Those that have not ended, by uid: their place in the workload."""
        self._outcomes: list[Outcome] = []
        self._agenda: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._noted = 0

    @property
    def routers(self) -> Sequence[SimulatedRouter]:
        """For tests."""
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
            self._note(outage.from_s, self._lose, self._places[outage.worker])
            self._note(outage.until_s, self._start, self._places[outage.worker])
        late = {outage.worker for outage in self._setup.outages if outage.from_s == 0}
        for place in self._places:
            if place.number not in late:
                self._start(place)
        self._note(self._workload.arrivals[0].at_s, self._arrive, 0)

    def _note(self, at_s: float, act: Callable[[Any], None], subject: Any) -> None:
        self._noted += 1
        heapq.heappush(self._agenda, (at_s, self._noted, act, subject))

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
            self._note(arrivals[index + 1].at_s, self._arrive, index + 1)
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
            self._note_telling(place)
        place.worker.submit(Job(_submit(uid, request), request.answer.tolist()))
        self._follow(place)
        self._wake(place)

    def _end_step(self, place: _Place) -> None:
        worker = place.worker
        if worker is None or worker.ends_at_s != self._clock.now():
            return  # A stretch that was cut short, or a worker that is gone.
        worker.end()
        self._follow(place)

    def _follow(self, place: _Place) -> None:
        """After a worker did something: pass on what it told, and note when it is going to do more."""
        assert place.worker is not None
        self._pass_on(place, place.worker.told())
        ends_at_s = place.worker.ends_at_s
        if ends_at_s is not None and ends_at_s != place.due_s:
            self._note(ends_at_s, self._end_step, place)
        place.due_s = ends_at_s

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
            self._over(place, uid)
        for uid, why in told.failed:
            _lease_of(self._requests[uid]).settle(Verdict.ANSWERED)
            self._over(place, uid)
            self._fail(uid, why)

    def _over(self, place: _Place, uid: int) -> None:
        """A request has ended. The front hears it after the reports that are on their way to it."""
        if place.front is not None:
            self._note(self._clock.now() + self._setup.report_delay_s, place.front.end, uid)

    def _fail(self, uid: int, why: str) -> None:
        outcome = self._requests.pop(uid).outcome
        outcome.ended_s, outcome.error = self._clock.now(), why

    def _wake(self, place: _Place) -> None:
        """The worker has work: its next report is due soon."""
        now_s = self._clock.now()
        if place.report_at_s > now_s + REPORT_S:
            self._note_report(place, now_s + REPORT_S)

    def _note_report(self, place: _Place, at_s: float) -> None:
        place.report_at_s = at_s
        self._note(at_s, self._report, (place, place.incarnation, at_s))

    def _report(self, due: tuple[_Place, Incarnation, float]) -> None:
        place, incarnation, at_s = due
        worker = place.worker
        if worker is None or place.incarnation != incarnation or place.report_at_s != at_s:
            return
        load, evicted, added = worker.report()
        self._follow(place)
        place.sequence += len(evicted) > 0 or len(added) > 0
        report = StateReport(incarnation, place.sequence, load, evicted, added)
        self._note(at_s + self._setup.report_delay_s, self._take_report, (place, report))
        self._note_report(place, at_s + REPORT_S if worker.uids else self._next_heartbeat_s(at_s))

    def _next_heartbeat_s(self, at_s: float) -> float:
        """Of an idle worker. While all are, nothing changes until the next request: only the heartbeat that routers
        have last heard of by then is worth its time, so that a fleet may wait for years."""
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

    def _note_telling(self, place: _Place) -> None:
        """Its front has something to tell of: at once, unless it has just done so."""
        now_s = self._clock.now()
        if place.told_at_s <= now_s:
            place.told_at_s = max(now_s, place.told_at_s + PROMPT_S)
            self._note(place.told_at_s, self._tell, (place, place.incarnation))

    def _tell(self, due: tuple[_Place, Incarnation]) -> None:
        place, incarnation = due
        if place.front is None or place.incarnation != incarnation:
            return
        self._note(self._clock.now() + LINK_S, self._hear, (place, incarnation, place.front.tell()))

    def _hear(self, told: tuple[_Place, Incarnation, AcceptedPrompts]) -> None:
        place, incarnation, accepted = told
        load = place.known_load if place.incarnation == incarnation else Load()
        news = StateReport(incarnation, 0, load, NO_BLOCKS, NO_BLOCKS, accepted, is_between_reports=True)
        for router in self._routers:
            router.take(place.number, news)

    def _start(self, place: _Place) -> None:
        place.incarnation = Incarnation(place.incarnation + 1)
        place.worker = SimulatedWorker(place.preset, self._clock, leaps=self._setup.leaps)
        place.sequence, place.known_load, place.told_at_s = 0, Load(), 0.0
        if len(self._routers) > 1 and self._setup.truth == "deltas":
            place.front = SimulatedFront()
        for router in self._routers:
            router.connect(place.number, place.incarnation)
        # Not all workers at the same moment.
        offset_s = REPORT_S * place.number / len(self._places)
        self._note_report(place, self._clock.now() + REPORT_S + offset_s)

    def _lose(self, place: _Place) -> None:
        """The worker is gone, with all that it had."""
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
        """Take the worker out, and keep its figures."""
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
