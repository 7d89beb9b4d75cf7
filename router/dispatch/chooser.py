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

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.errors import InvalidRequest, RadixfleetError, Unavailable
from router.dialects.needs import WORDS, needs
from router.dispatch.claims import Claims
from router.dispatch.lease import Decision, Lease
from router.dispatch.request import PreparedRequest
from router.fleet_view import FleetView
from router.index import HotPrefixes, Sketch
from router.metrics import RouterMetrics
from router.policies import Policy
from router.view import Ranking, RequestView
from router.workers.group import Lane, ModelGroup
from router.workers.state import WorkerState

RETRY_AFTER_S = 1.0
RETRY_LOADING_S = 5.0
"""When all that may serve soon load their model, which takes seconds to minutes."""
_NAMED = 5


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
        group = self._registry.group(request.model)
        return self._booked(request, group, _suitable(group, request, excluded), began_s)

    def choose_unless_saturated(self, request: PreparedRequest, claims: Claims | None = None) -> Lease | None:
        """`choose`, or None while the request would wait on every worker that could get it.

        `claims`: of requests that go before it, which leave it only other workers; where it must wait, its own are
        added.
        """
        began_s = perf_counter()
        group = self._registry.group(request.model)
        workers = _suitable(group, request)
        left = workers if claims is None else claims.left(workers)
        if workers.serving.count and (not left.serving.count or left.is_saturated(request.prompt_tokens)):
            if claims is not None:
                claims.add(workers)
            return None
        return self._booked(request, group, left if left.serving.count else workers, began_s)

    def group(self, model: str) -> ModelGroup:
        """The workers of this model; another object when what they are has changed, and with it the lanes."""
        return self._registry.group(model)

    def lane(self, request: PreparedRequest) -> Lane:
        """Of the request, among those of its model, by what its workers are now."""
        group = self._registry.group(request.model)
        return group.lane(
            request.prompt_tokens,
            request.fingerprint,
            answer_tokens=request.answer_tokens,
            look_aside=request.look_aside,
            needs=_needs(group, request),
        )

    def _booked(self, request: PreparedRequest, group: ModelGroup, workers: FleetView, began_s: float) -> Lease:
        view = self._view(request)
        ranking = self._policy.rank(view, workers, self._random)
        if ranking.slot is None:
            raise self._nobody(request, group, workers)
        chosen = group.at(ranking.slot)
        self._bookings += 1
        most = ranking.most_matched_blocks
        if most is None:
            most = max(int(view.matched_blocks[slot]) for slot in ranking.costs)
        known = int(view.matched_blocks[chosen.slot])
        blocks = self._sketch.book(chosen.slot, request.block_hashes, request.prompt_tokens, known)
        predicted = blocks.predicted_tokens
        decision = Decision(
            policy=self._policy.name,
            reason=ranking.reason,
            predicted_cached_tokens=predicted,
            # What goes before the worker begins is out of reach.
            reachable_cached_tokens=predicted if known == most else min(most * BLOCK_TOKENS, request.prompt_tokens - 1),
        )
        lease = Lease(
            request,
            chosen,
            decision,
            blocks,
            number=self._bookings,
            sketch=self._sketch,
            metrics=self._metrics,
            hot_prefixes=self._hot_prefixes,
        )
        self._metrics.decisions.count(ranking.reason, perf_counter() - began_s)
        return lease

    def explain(self, request: PreparedRequest) -> Explanation:
        """What `choose` would do now. Books nothing and changes nothing."""
        group = self._registry.group(request.model)
        suitable = _suitable(group, replace(request, look_aside=False))
        slots = {worker.slot for worker in suitable}
        view = self._view(request)
        # A copy: an explanation must not change what the next choice draws.
        random = Random()  # noqa: S311
        random.setstate(self._random.getstate())
        ranking = self._policy.rank(view, suitable, random)
        return Explanation(
            policy=self._policy.name,
            reason=ranking.reason,
            worker=None if ranking.slot is None else group.at(ranking.slot),
            candidates=[
                _report(worker, request, view, ranking, suitable=worker.slot in slots) for worker in group.workers
            ],
        )

    def _view(self, request: PreparedRequest) -> RequestView:
        matched = self._sketch.match(request.block_hashes)
        users = self._sketch.users(request.block_hashes, matched)
        used_for_s = self._sketch.used_for_s(request.block_hashes, matched)
        return RequestView(request.prompt_tokens, request.block_hashes, matched, users, used_for_s)

    def _nobody(self, request: PreparedRequest, group: ModelGroup, suitable: FleetView) -> RadixfleetError:
        problem, retry_after_s = _refusal(request.model, [group.at(view.slot) for view in suitable])
        if request.look_aside and not suitable and _suitable(group, replace(request, look_aside=False)):
            problem = (
                f"{request.model} is served only by engines of other dialects, which clients cannot call directly: "
                "send the request to the router (Inference.Generate), which translates"
            )
        elif not suitable and (missing := _missing(group, request)):
            return InvalidRequest(
                f"no engine that serves {request.model} can {WORDS[missing]}: leave {missing} out", field=missing
            )
        return Unavailable(problem, retry_after_s=retry_after_s)


def _refusal(model: str, workers: Sequence[WorkerState]) -> tuple[str, float]:
    """Why nobody takes a request for the model, in words, and when it is worth trying again, in seconds."""
    reasons = {worker.name: worker.ineligible_reason for worker in workers}
    told = [f"{name}: {reason or 'no room'}" for name, reason in sorted(reasons.items())]
    known = f" ({', '.join(told[:_NAMED])}{', ...' if len(told) > _NAMED else ''})" if told else ""
    problem = f"no worker can take a request for {model} now{known}"
    # A model takes longer to load than a connection takes to come back.
    if "loading" in reasons.values():
        is_long = set(reasons.values()) <= {"loading", "failed", "draining"}
        return f"{problem}; the model is being loaded, ask again soon", RETRY_LOADING_S if is_long else RETRY_AFTER_S
    if "failed" in reasons.values():
        return f"{problem}; an engine that died or hangs is started again, ask again soon", RETRY_AFTER_S
    return problem, RETRY_AFTER_S


def _suitable(group: ModelGroup, request: PreparedRequest, excluded: Collection[WorkerState] = ()) -> FleetView:
    """The workers of the group that can take the request at all."""
    wanted = _needs(group, request)
    return group.suitable(
        request.prompt_tokens,
        request.fingerprint,
        answer_tokens=request.answer_tokens,
        look_aside=request.look_aside,
        excluded=excluded,
        needs=wanted,
    )


def _needs(group: ModelGroup, request: PreparedRequest) -> frozenset[str]:
    return frozenset() if group.all_native else needs(request.message, resumable=request.resumable)


def _missing(group: ModelGroup, request: PreparedRequest) -> str:
    """What the request needs and no worker of the model can do; empty when that is not what stands in the way."""
    wanted = sorted(_needs(group, request))
    return next((name for name in wanted if all(name in worker.lacks for worker in group.workers)), "")


def _report(
    worker: WorkerState, request: PreparedRequest, view: RequestView, ranking: Ranking, *, suitable: bool
) -> CandidateReport:
    cost = ranking.costs.get(worker.slot) if suitable else None
    reason = ""
    if not worker.speaks(request.fingerprint):
        reason = "another tokenizer"
    elif not suitable:
        is_short = worker.longest_request < request.prompt_tokens + request.answer_tokens
        reason = "context or KV pool too small" if is_short else "cannot do all that is asked for"
    elif cost is None:
        reason = worker.ineligible_reason
    return CandidateReport(
        worker=worker,
        ineligible_reason=reason,
        matched_blocks=int(view.matched_blocks[worker.slot]),
        matched_tokens=view.matched_tokens(worker.slot),
        cost=cost,
    )
