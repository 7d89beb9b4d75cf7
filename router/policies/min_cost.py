"""The default policy: the lowest expected cost, in prompt tokens, with no settings.

    cost = U (1 + B/2)  +  M u^2 / (u^2 + 8^2)  +  Q N / (2 N + 3 Q')  +  2.5 N ((R - r) / (32 + R'))^3

    N  tokens of this prompt
    M  tokens of it that the worker holds, and u the requests there that use all of them now
    U  N - M: tokens of it that the worker would have to compute
    B  how full the worker's cache is, in terms of the fleet's mean; 1.5 at most
    Q  prompt tokens of other requests there, neither cached nor computed yet; Q' the mean of the other workers
    R  requests in flight there, and those of them once more that must end before another can run;
       R' the fleet's mean, r its least

What each part stands for:
- U is work that the fleet does only because of this choice, so it counts whole. It also takes a place in the cache,
  from which something leaves when the cache is full: so prefixes that nobody holds go where the least is cached. A new
  worker fills, and many prefixes at once are dealt evenly.
- A copy of a prefix serves those who come later too. The more requests use a prefix now, the less of the copy's price
  is this one's: a hot prefix spreads before its worker is full, and a few siblings stay together.
- Q is work that is done anyway; waiting for it costs this request alone, so it counts for half. The more waits
  everywhere the less it counts: then a prefix computed twice delays everybody, and only being behind says something.
- R makes steps longer: a step's fixed time is that of about 32 decodes (see `deploy.lab.presets`). Prefill alone would
  herd, for a prompt that is wholly cached leaves no Q. Cubed: an idle worker relieves those that only decode, while
  a few requests more or less, which even out by themselves, hardly count.

What was tried and lost, simulated (`tests/bench/bench_candidates.py`), mean time to first token over the best's:
- U + 0.2 Q + N/32 R, the default before: 1.35 on one hot prefix at 4 workers, 2.7 at 16; 0.94 of the throughput on the
  published experiment, for it tears groups. Without R: 2.6 to 3 on the hot prefix.
- Q counted whole (predicted time to first token): 4.8 on prefixes that do not fit, 3.2 on bursts of siblings.
- A match that loses its worth in proportion to its users, gone at 12: 0.88 of the published throughput.
- M k / (k + u) with k of 2 to 8 in place of the squares: tears bursts of 8 (p99 twice as long).
- R in tokens, 5 or 20 each: either too little for one hot prefix or too much for the published experiment. R in
  proportion or squared: one worker of 8 gets 9 groups, one 7, and throughput is 0.91.
- Without the place in the cache: the same, and 1.06 on prefixes that do not fit.
What is left: the first seconds of one hot prefix on a cold fleet, which round robin copies everywhere at once (mean of
the first 125 requests a worker 1.2, then 1.05). Whoever copies as early tears bursts of siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from radixfleet.blocks import BLOCK_TOKENS
from router.policies.policy import cheapest, reason_for
from router.view import NOBODY, Ranking, RequestView, WorkerView, eligible

PLACE_WEIGHT = 0.5
MOST_FILLED = 1.5
CROWD = 8
"""So many users of a prefix halve what its being there is worth."""
PATIENCE = 2.0
BACKLOG_WEIGHT = 3.0
BATCH_WEIGHT = 2.5
STEP_REQUESTS = 32
"""The fixed time of a step, in decodes."""


class MinCost:
    """The lowest sum of what must be computed for this prompt, what waits before it, and what runs beside it."""

    name = "min_cost"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: prompt tokens."""
        candidates = eligible(request, workers)
        if not candidates:
            return NOBODY
        prompt_tokens, matched = request.prompt_tokens, request.matched_blocks
        # This is the hot loop of the router: each worker is read once, and sums are made over whole columns.
        terms = [worker.terms for worker in candidates]
        _, queues, requests, _, fills = zip(*terms, strict=True)
        count, queued, least_requests = len(terms), sum(queues), min(requests)
        batch_weight = BATCH_WEIGHT * prompt_tokens / (STEP_REQUESTS + sum(requests) / count) ** 3
        fill = sum(fills) / count
        place_weight, most_filled = (PLACE_WEIGHT / fill if fill else 0.0), MOST_FILLED * fill
        # Q N / (2 N + 3 (sum - Q) / others), with what is the same for all workers taken out.
        others = max(1, count - 1) / BACKLOG_WEIGHT
        waited, patience = others * prompt_tokens, others * PATIENCE * prompt_tokens + queued
        costs = {}
        for slot, queue, in_flight, places_short, filled in terms:
            more = in_flight + places_short - least_requests
            # In whole blocks: the last token, which is always computed, changes no order.
            costs[slot] = (
                (prompt_tokens - BLOCK_TOKENS * matched[slot])
                * (1 + place_weight * (filled if filled < most_filled else most_filled))
                + queue * waited / (patience - queue)
                + batch_weight * (more * more * more)
            )
        for slot, users in request.users.items():
            if slot in costs:
                costs[slot] += BLOCK_TOKENS * matched[slot] * users * users / (users * users + CROWD * CROWD)
        chosen = cheapest(candidates, costs, random)
        return Ranking(chosen.slot, reason_for(chosen, candidates, request), costs)
