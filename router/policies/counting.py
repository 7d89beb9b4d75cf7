"""Policies that look at no prompt: they count requests, take turns, or draw lots. Baselines to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.policies.policy import cheapest
from router.view import NOBODY, Ranking, Reason, RequestView, WorkerView, eligible


class LeastLoad:
    """The worker with the fewest requests in flight ("least connections" of every load balancer)."""

    name = "least_load"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: requests in flight."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        costs = {worker.slot: float(worker.requests_in_flight) for worker in candidates}
        return Ranking(cheapest(candidates, costs, random).slot, _unless_only(candidates, "load"), costs)


class PowerOfTwo:
    """The less loaded of two workers drawn at random.

    M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001.
    """

    name = "power_of_two"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: requests in flight, of all candidates; only the two drawn can be chosen."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        costs = {worker.slot: float(worker.requests_in_flight) for worker in candidates}
        drawn = random.sample(candidates, min(2, len(candidates)))
        chosen = cheapest(drawn, {worker.slot: costs[worker.slot] for worker in drawn}, random)
        return Ranking(chosen.slot, _unless_only(candidates, "load"), costs)


class RoundRobin:
    """The worker whose newest request is the oldest: each gets every n-th, and one that joins falls into step."""

    name = "round_robin"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: the number of the worker's newest booking."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        costs = {worker.slot: float(worker.last_booking) for worker in candidates}
        return Ranking(cheapest(candidates, costs, random).slot, _unless_only(candidates, "turn"), costs)


class RandomChoice:
    """Any worker."""

    name = "random"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: the same for all."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        costs = dict.fromkeys((worker.slot for worker in candidates), 0.0)
        return Ranking(random.choice(candidates).slot, _unless_only(candidates, "chance"), costs)


def _unless_only(candidates: Sequence[WorkerView], reason: Reason) -> Reason:
    return reason if len(candidates) > 1 else "only"
