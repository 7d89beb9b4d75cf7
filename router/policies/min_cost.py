"""The default policy: the lowest expected cost, in prompt tokens, with no settings.

    cost = U (1 + B/2)  -  C u^4 / (u^4 + 8^4)  +  Q N / (2 N + 3 Q')  +  2.5 N ((R - r) / (32 + R'))^3

    N  tokens of this prompt
    U  tokens of it that the worker would have to compute
    C  those of U that another worker holds, and u the requests that use them now, for each worker that holds them
    B  how full the worker's cache is, in terms of the fleet's mean; 1.5 at most
    Q  prompt tokens of other requests there, neither cached nor computed yet; Q' the mean of the other workers
    R  requests in flight there, and those of them once more that must end before another can run;
       R' the fleet's mean, r its least

What each part stands for:
- U is work that the fleet does only because of this choice, so it counts whole. It also takes a place in the cache,
  from which something leaves when the cache is full: so prefixes that nobody holds go where the least is cached. A new
  worker fills, and many prefixes at once are dealt evenly.
- A copy of a prefix serves those who come later too. The more requests use the prefix now, the less of the copy's price
  is this one's: a hot prefix spreads before its worker is full, and a few siblings stay together.
- Q is work that is done anyway; waiting for it costs this request alone, so it counts for half. The more waits
  everywhere the less it counts: then a prefix computed twice delays everybody, and only being behind says something.
- R makes steps longer: a step's fixed time is that of about 32 decodes (see `deploy.lab.presets`). Prefill alone would
  herd, for a prompt that is wholly cached leaves no Q. Cubed: an idle worker relieves those that only decode, while
  a few requests more or less, which even out by themselves, hardly count.

What was tried and lost, simulated by `tests/bench/bench_candidates.py`, which prints it again. On one hot prefix at 4
workers, mean time to first token over round robin's, and in the published experiment, output tokens a second over those
of groups dealt in turn by who knows them (`Dealt`): this policy 1.07 and 1.00;
- U + 0.2 Q + N/32 R, the default before: 1.35 and 0.94, for it tears groups; 2.7 on the hot prefix at 16 workers (this
  policy: 1.15).
- U + 0.1 Q or 0.3 Q, without R: all herd to the hot prefix's first worker, more than 50 and 1.00.
- Q counted whole, or the predicted time to first token: 1.01 and 0.93, but 3.2 times this policy's mean on bursts of
  siblings, and 3.1 on prefixes that do not fit (working-set-1.5).
- Users taken from what a match is worth, not from the price of a copy: in proportion, gone at 12, 1.18 and 0.88; by the
  squares 1.5 and 1.00. No users at all: 2.6.
- R in tokens, 5 each: 1.25 and 1.00, too little for the one; 20 each: 1.15 and 0.94, too much for the other.
- R in proportion or squared: 1.06 and 0.91, for groups are dealt unevenly.
- Without the place in the cache: 1.05 and 1.00, but 0.96 of the output tokens a second on prefixes that do not fit.
The ratios above are of seed 0, and of a time when siblings that wait for one prefix counted as other routers' work;
those below are of other seeds, and of today:
- Q counted 16 / (16 + R'), whole on an idle fleet: 0.9 and 0.7 of this policy's mean on one hot prefix at 4 and 16
  workers, and 0.95 on Zipf, but it tears bursts of siblings, and groups of the published experiment (0.95 of the output
  tokens a second). 16 / (17 + R'): 0.99 and 0.88, and bursts of short tails are torn all the same. With 16 / (16 + R')
  and no users: the same on a cold fleet, but 1.2 where a prefix becomes hot on 16 workers that are busy with others.
- The place by the share of the pool instead of the fleet's mean: the same or worse.
What is left: the first seconds of one hot prefix on a cold fleet, which round robin copies everywhere at once. Whoever
copies as early tears bursts of siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS
from router.fleet_view import Columns, FleetView, FloatArray, IntArray
from router.policies.policy import cheapest_of, reason_of
from router.view import NOBODY, Ranking, RequestView, WorkerView

PLACE_WEIGHT = 0.5
MOST_FILLED = 1.5
CROWD = 8
"""So many users of a prefix halve the price of a copy."""
PATIENCE = 2.0
BACKLOG_WEIGHT = 3.0
BATCH_WEIGHT = 2.5
STEP_REQUESTS = 32
"""The fixed time of a step, in decodes."""
FEW = 8
"""So many workers are ranked one by one, which is sooner done: numpy's fixed price for the columns is some 15 us."""


class MinCost:
    """The lowest sum of what must be computed for this prompt, what waits before it, and what runs beside it."""

    name = "min_cost"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: prompt tokens."""
        columns = FleetView.of(workers).eligible(request)
        if not len(columns):
            return NOBODY
        if len(columns) <= FEW:
            return _rank_few(request, columns, random)
        matched = request.matched_at(columns.slots)
        most = int(matched.max())
        costs = _costs(request.prompt_tokens, matched if most else None, columns)
        if most:
            _share_copies(costs, matched, most, columns.slots, request)
        chosen = cheapest_of(columns, costs, random)
        return Ranking(
            int(columns.slots[chosen]),
            reason_of(int(matched[chosen]), most, len(columns)),
            columns.named(costs),
            most_matched_blocks=most,
        )


def _costs(prompt_tokens: int, matched: IntArray | None, columns: Columns) -> FloatArray:
    """One cost a worker; `matched` in blocks, None: nobody holds any.

    This is the hot loop of the router: whole columns at once, in place, with what is the same for all workers taken
    out. A step that changes nothing is left out.
    """
    count, fill = len(columns), columns.filled / len(columns)
    if fill:
        costs: FloatArray = np.minimum(columns.fill, MOST_FILLED * fill)
        costs *= PLACE_WEIGHT / fill
        costs += 1.0
    else:
        costs = np.ones(count)
    # In whole blocks: the last token, which is always computed, changes no order.
    costs *= prompt_tokens if matched is None else prompt_tokens - BLOCK_TOKENS * matched
    if columns.queued:
        # Q N / (2 N + 3 (sum - Q) / others)
        others = max(1, count - 1) / BACKLOG_WEIGHT
        waited = columns.queue * (others * prompt_tokens)
        waited /= (others * PATIENCE * prompt_tokens + columns.queued) - columns.queue
        costs += waited
    more = columns.held - columns.least_requests
    cubed = more * more
    cubed *= more
    cubed *= BATCH_WEIGHT * prompt_tokens / (STEP_REQUESTS + columns.in_flight / count) ** 3
    costs += cubed
    return costs


def _share_copies(costs: FloatArray, matched: IntArray, most: int, slots: IntArray, request: RequestView) -> None:
    """Take from the cost of each worker that holds less of the prompt than others what later requests will pay."""
    holders = slots[matched == most]
    if len(holders) == len(slots):
        return
    share = _share([request.users.get(slot, 0) for slot in holders.tolist()])
    if share:
        costs -= share * (most - matched)


def _share(users: Sequence[int]) -> float:
    """What is taken off for each block that only others hold; `users` of it at each of them."""
    crowd = sum(users) / len(users)
    return BLOCK_TOKENS * crowd**4 / (crowd**4 + CROWD**4)


def _rank_few(request: RequestView, columns: Columns, random: Random) -> Ranking:
    """The same choice, to the last bit of the costs."""
    slots: list[int] = columns.slots.tolist()
    matched = [int(request.matched_blocks[slot]) for slot in slots]
    most = max(matched)
    costs = _costs_of_few(request.prompt_tokens, matched, columns)
    holders = [slot for slot, blocks in zip(slots, matched, strict=True) if blocks == most]
    if most and len(holders) < len(slots):
        share = _share([request.users.get(slot, 0) for slot in holders])
        if share:
            costs = [cost - share * (most - blocks) for cost, blocks in zip(costs, matched, strict=True)]
    lowest = min(costs)
    equals = [place for place, cost in enumerate(costs) if cost == lowest]
    if len(equals) > 1:
        fewest = min([columns.requests[place] for place in equals])
        equals = [place for place in equals if columns.requests[place] == fewest]
    chosen = equals[0] if len(equals) == 1 else random.choice(equals)
    reason = reason_of(matched[chosen], most, len(slots))
    return Ranking(slots[chosen], reason, columns.named(costs), most_matched_blocks=most)


def _costs_of_few(prompt_tokens: int, matched: Sequence[int], columns: Columns) -> list[float]:
    """`_costs`, step by step in the same order."""
    queue, _, held, fill, _, _ = columns.table.tolist()
    count, mean_fill = len(held), columns.filled / len(held)
    place = PLACE_WEIGHT / mean_fill if mean_fill else 0.0
    others = max(1, count - 1) / BACKLOG_WEIGHT
    backlog, patience = others * prompt_tokens, others * PATIENCE * prompt_tokens + columns.queued
    least, batch = (
        columns.least_requests,
        BATCH_WEIGHT * prompt_tokens / (STEP_REQUESTS + columns.in_flight / count) ** 3,
    )
    costs = []
    for at, blocks in enumerate(matched):
        cost = min(fill[at], MOST_FILLED * mean_fill) * place + 1.0
        cost *= prompt_tokens - BLOCK_TOKENS * blocks
        if columns.queued:
            cost += queue[at] * backlog / (patience - queue[at])
        more = held[at] - least
        costs.append(cost + more * more * more * batch)
    return costs
