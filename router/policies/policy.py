"""What a routing policy is, and the two steps that most of them end with: the cheapest worker, and why it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

from router.view import Ranking, Reason, RequestView, WorkerView


class Policy(Protocol):
    """Chooses a worker for a request.

    `rank` is a function of its arguments: it changes nothing, remembers nothing and draws all its randomness from
    `random`, so that a choice can be explained, replayed and simulated. Booking the choice is the caller's, in the same
    turn of the event loop; the next choice sees it in the views.
    """

    @property
    def name(self) -> str:
        """What the policy is called in settings, metrics and answers."""
        ...

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Rank the workers for `request`. Only those that `router.view.eligible` lets through have a cost."""
        ...


def cheapest(candidates: Sequence[WorkerView], costs: Mapping[int, float], random: Random) -> WorkerView:
    """The candidate of lowest cost; among equals one with the fewest requests, drawn at random.

    `candidates` is not empty, and `costs` has the slot of each.
    """
    lowest = min(costs.values())
    equals = [worker for worker in candidates if costs[worker.slot] == lowest]
    if len(equals) > 1:
        fewest = min([worker.requests_in_flight for worker in equals])
        equals = [worker for worker in equals if worker.requests_in_flight == fewest]
    return equals[0] if len(equals) == 1 else random.choice(equals)


def reason_for(chosen: WorkerView, candidates: Sequence[WorkerView], request: RequestView) -> Reason:
    """Why a policy that weighs cache against load chose `chosen` among `candidates`."""
    if len(candidates) == 1:
        return "only"
    matched = request.matched_blocks
    most = max([matched[worker.slot] for worker in candidates])
    if most == 0:
        return "load"
    return "prefix" if matched[chosen.slot] == most else "spill"
