"""SGLang's rule, as its router publishes it. A baseline."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.policies.policy import cheapest, reason_for
from router.view import NOBODY, Ranking, RequestView, WorkerView, eligible

MATCH_THRESHOLD = 0.3
IMBALANCE_REQUESTS = 64
IMBALANCE_RATIO = 1.5


class SGLangCacheAware:
    """Cache first, unless the fleet is out of balance.

    The `cache_aware` policy of SGLang's router (sgl-model-gateway, formerly sgl-router; announced with SGLang v0.4):
    with `max` and `min` the most and the fewest requests in flight on a worker, the fleet is out of balance when
    max - min > 64 and max > 1.5 * min, and then the shortest queue wins. Otherwise the longest match wins when it
    covers more than 0.3 of the prompt, and else the worker with the smallest tree. The published rule matches
    characters in a tree of its own; here the sketch's blocks stand for both.
    """

    name = "sglang"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: requests in flight, negative match ratio, or blocks held, by which of the three rules decides."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        loads = [worker.requests_in_flight for worker in candidates]
        most, fewest = max(loads), min(loads)
        ratios = [request.matched_tokens(worker.slot) / request.prompt_tokens for worker in candidates]
        if most - fewest > IMBALANCE_REQUESTS and most > IMBALANCE_RATIO * fewest:
            measure: Sequence[float] = loads
        elif max(ratios) > MATCH_THRESHOLD:
            measure = [-ratio for ratio in ratios]
        else:
            measure = [worker.sketch_blocks for worker in candidates]
        costs = {worker.slot: float(value) for worker, value in zip(candidates, measure, strict=True)}
        chosen = cheapest(candidates, costs, random)
        return Ranking(chosen.slot, reason_for(chosen, candidates, request), costs)
