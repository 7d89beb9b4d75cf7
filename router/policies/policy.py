"""What a routing policy is, and the two steps that most of them end with: the cheapest worker, and why it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

from router.fleet_view import Columns, FloatArray
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
        """Rank the workers for `request`. Those that `router.view.eligible` lets through have a cost, and no others.

        The router passes a `router.fleet_view.FleetView`, which has the workers' figures as columns too.
        """
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


def cheapest_of(columns: Columns, costs: FloatArray, random: Random) -> int:
    """`cheapest` of columns: the place of the worker. There must be one."""
    lowest = int(costs.argmin())
    # The first and the last of the lowest are one where it is alone.
    if lowest + int(costs[::-1].argmin()) == len(costs) - 1:
        return lowest
    equals = (costs == costs[lowest]).nonzero()[0]
    requests = columns.requests[equals]
    fewest: list[int] = equals[requests == requests[requests.argmin()]].tolist()  # `min` takes three times as long
    return fewest[0] if len(fewest) == 1 else random.choice(fewest)


def reason_for(chosen: WorkerView, candidates: Sequence[WorkerView], request: RequestView) -> Reason:
    """Why a policy that weighs cache against load chose `chosen` among `candidates`."""
    matched = request.matched_blocks
    most = max([matched[worker.slot] for worker in candidates])
    return reason_of(matched[chosen.slot], most, len(candidates))


def reason_of(matched: int, most: int, count: int) -> Reason:
    """The same, of `count` candidates of which the chosen one holds `matched` blocks, and the best one `most`."""
    if count == 1:
        return "only"
    if most == 0:
        return "load"
    return "prefix" if matched == most else "spill"
