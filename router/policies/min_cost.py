"""The default policy: the lowest expected cost, in prompt tokens, with no settings."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.policies.policy import cheapest, reason_for
from router.view import NOBODY, Ranking, RequestView, WorkerView, eligible

QUEUE_WEIGHT = 0.2


class MinCost:
    """cost = U + 0.2 * Q."""

    name = "min_cost"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: prompt tokens."""
        candidates = eligible(request, workers)
        if not candidates:
            return NOBODY
        prompt_tokens = request.prompt_tokens
        costs = {}
        for worker in candidates:
            cost = request.uncached_tokens(worker.slot) + QUEUE_WEIGHT * worker.outstanding_prompt_tokens
            if worker.places_short:
                cost += worker.places_short * prompt_tokens
            costs[worker.slot] = cost
        chosen = cheapest(candidates, costs, random)
        return Ranking(chosen.slot, reason_for(chosen, candidates, request), costs)
