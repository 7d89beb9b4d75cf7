"""The choice: which worker, booked in the same turn of the event loop, so the next choice already sees it.

Nothing here waits. First the workers that can take the request at all (its model, its tokenizer, a context long
enough, for look-aside our own dialect), then the policy among them, then the lease.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter
from typing import Protocol

from radixfleet.errors import Unavailable
from router.dispatch.lease import Decision, Lease
from router.dispatch.request import PreparedRequest
from router.index import HotPrefixes, Sketch
from router.metrics import RouterMetrics
from router.policies import Policy
from router.view import Ranking, RequestView, ineligible_reason
from router.workers.group import ModelGroup
from router.workers.state import WorkerState

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """One worker in an explanation."""

    worker: WorkerState
    ineligible_reason: str
    """Empty when it could get the request."""
    matched_blocks: int
    matched_tokens: int
    cost: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a request would go, and what every worker of its model would cost."""

    policy: str
    reason: str
    worker: WorkerState | None
    candidates: Sequence[CandidateReport]


class Workers(Protocol):
    """Where the workers of a model are found: the registry."""

    def group(self, model: str) -> ModelGroup:
        """The workers of this model."""
        ...


class Chooser:
    """Owns the numbering of bookings; everything else is the registry's and the sketch's."""

    def __init__(
        self,
        registry: Workers,
        sketch: Sketch,
        policy: Policy,
        metrics: RouterMetrics,
        random: Random,
        hot_prefixes: HotPrefixes | None = None,
    ) -> None:
        self._registry = registry
        self._sketch = sketch
        self._policy = policy
        self._metrics = metrics
        self._random = random
        self._hot_prefixes = hot_prefixes
        self._bookings = 0

    def choose(self, request: PreparedRequest, *, excluded: Collection[WorkerState] = ()) -> Lease:
        """Choose a worker not in `excluded` and book the request there. Raises Unavailable when there is none."""
        began_s = perf_counter()
        workers = self._suitable(request)
        if excluded:
            workers = [worker for worker in workers if worker not in excluded]
        view = self._view(request)
        ranking = self._policy.rank(view, [worker.view for worker in workers], self._random)
        chosen = next((worker for worker in workers if worker.slot == ranking.slot), None)
        if chosen is None:
            raise self._nobody(request, workers)
        self._bookings += 1
        decision = Decision(
            policy=self._policy.name,
            reason=ranking.reason,
            predicted_cached_tokens=view.matched_tokens(chosen.slot),
            reachable_cached_tokens=_most_matched_tokens(view, ranking),
        )
        lease = Lease(
            request,
            chosen,
            decision,
            number=self._bookings,
            sketch=self._sketch,
            metrics=self._metrics,
            hot_prefixes=self._hot_prefixes,
        )
        self._metrics.decisions.labels(ranking.reason).inc()
        self._metrics.decision_s.observe(perf_counter() - began_s)
        return lease

    def is_saturated(self, request: PreparedRequest) -> bool:
        """Whether the request would wait on every worker that could get it. False when there is none at all."""
        is_served = False
        for worker in self._suitable(request):
            view = worker.view
            if not view.unavailable:
                if view.has_place(request.prompt_tokens):
                    return False
                is_served = True
        return is_served

    def explain(self, request: PreparedRequest) -> Explanation:
        """What `choose` would do now. Books nothing and changes nothing."""
        group = self._registry.group(request.model)
        suitable = group.suitable(request.prompt_tokens, request.fingerprint)
        view = self._view(request)
        # A copy: an explanation must not change what the next choice draws.
        random = Random()  # noqa: S311
        random.setstate(self._random.getstate())
        ranking = self._policy.rank(view, [worker.view for worker in suitable], random)
        return Explanation(
            policy=self._policy.name,
            reason=ranking.reason,
            worker=next((worker for worker in suitable if worker.slot == ranking.slot), None),
            candidates=[
                _report(worker, request, view, ranking, suitable=worker in suitable) for worker in group.workers
            ],
        )

    def _suitable(self, request: PreparedRequest) -> Sequence[WorkerState]:
        group = self._registry.group(request.model)
        return group.suitable(request.prompt_tokens, request.fingerprint, look_aside=request.look_aside)

    def _view(self, request: PreparedRequest) -> RequestView:
        matched = self._sketch.match(request.block_hashes)
        users = self._sketch.users(request.block_hashes, matched)
        return RequestView(request.prompt_tokens, request.block_hashes, matched, users)

    def _nobody(self, request: PreparedRequest, workers: Sequence[WorkerState]) -> Unavailable:
        reasons = sorted(f"{worker.name}: {worker.ineligible_reason or 'no room'}" for worker in workers)
        known = f" ({', '.join(reasons[:5])})" if reasons else ""
        problem = f"no worker can take a request for {request.model} now{known}"
        if request.look_aside and not workers and self._suitable(replace(request, look_aside=False)):
            problem = (
                f"{request.model} is served only by engines of other dialects, which clients cannot call directly: "
                "send the request to the router (Inference.Generate), which translates"
            )
        return Unavailable(problem, retry_after_s=RETRY_AFTER_S)


def _most_matched_tokens(view: RequestView, ranking: Ranking) -> int:
    matched = view.matched_blocks
    return view.matched_tokens(max(ranking.costs, key=matched.__getitem__))


def _report(
    worker: WorkerState, request: PreparedRequest, view: RequestView, ranking: Ranking, *, suitable: bool
) -> CandidateReport:
    cost = ranking.costs.get(worker.slot) if suitable else None
    reason = ""
    if not worker.speaks(request.fingerprint):
        reason = "another tokenizer"
    elif not suitable:
        reason = "context too short"
    elif cost is None:
        reason = worker.ineligible_reason or ineligible_reason(worker.view, view)
    return CandidateReport(
        worker=worker,
        ineligible_reason=reason,
        matched_blocks=view.matched_blocks[worker.slot],
        matched_tokens=view.matched_tokens(worker.slot),
        cost=cost,
    )
