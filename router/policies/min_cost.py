"""The default policy: the lowest expected cost, in prompt tokens, with no settings.

    cost = U (1 + B/10)  -  C x^4/(x^4 + 1) min(1, u/(h R'))  +  Q / (1 + 8/i + 3 Q'/N)  +  2.5 N ((R - r)/(32 + R'))^3

    N  tokens of this prompt
    U  tokens of it that the worker would have to compute
    C  those of U that the h best matching workers hold, and u the requests that use them there now, in all;
       x = u/8, or 5 u/4 F where that is more and there have been such requests for 5 ms
    B  how full the worker's cache is, in terms of the fleet's mean; 1.5 at most
    Q  what it waits for there: prompt tokens of others, neither cached nor computed yet, and KV tokens to come free;
       Q' what three workers of four have at least, and i the idle workers, 8 at least: those where no prompt waits,
       another request could run at once, and fewer than 8 are in flight
    R  requests in flight there, and those of them once more that must end before another can run;
       R' the fleet's mean, r its least, F its sum

What each part stands for:
- U is work that the fleet does only because of this choice, so it counts whole. It also takes a place in the cache, so
  a new prefix goes where the least is cached. A new worker fills, and many prefixes at once are dealt evenly.
- A copy of a prefix serves those who come later too. The more requests use the prefix now, the less of the copy's price
  is this one's: a few siblings stay together. But only as far as the prefix makes its holders busier than others: at
  u/h = R' they have as much to do with it alone as a worker has on average, and a copy relieves them; with less, what
  else the fleet does can be dealt so that all are equally busy. So a hot prefix spreads until as many hold it as its
  load needs, one copy after another without waiting for eight more users each, and one of a hundred prefixes does not.
- Siblings come in one moment, and then no more come; so who comes later than the first of those who use the prefix says
  that more will follow. If it is nearly all that the fleet does, it is copied at once: nobody else needs the workers.
- Q is work that is done anyway; waiting for it costs this request alone, while a prefix computed twice also delays who
  comes next and needs that worker. So Q counts for half; but where more are idle than a burst has siblings, the next
  needs just that one only so often as eight are of i, and Q counts nearly whole where many are. Whoever decodes for 32
  is not idle, nor who has no place left: a prefill there delays all that run, or waits for one of them. The more waits
  everywhere the less Q counts: then a prefix computed twice delays everybody, and only being behind says something.
  Where nothing waits at a quarter of the workers nobody waits longer, however much waits behind a few long prompts.
- A full KV pool is a wait like others. Leave out the workers that have one, and the last with room gets all that comes.
- R makes steps longer: a step's fixed time is that of about 32 decodes (see `deploy.lab.presets`). Prefill alone would
  herd, for a prompt that is wholly cached leaves no Q. Cubed: an idle worker relieves those that only decode, while
  a few requests more or less, which even out by themselves, hardly count.

What other forms did, what each part is worth, and where this one is behind: TRIED.md, beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS
from router.fleet_view import BURST_REQUESTS, STEP_REQUESTS, Columns, FleetView, FloatArray, IntArray
from router.policies.policy import cheapest_of, reason_of
from router.view import NOBODY, Ranking, RequestView, WorkerView

PLACE_WEIGHT = 0.1
MOST_FILLED = 1.5
CROWD = BURST_REQUESTS
"""At this many users of a prefix, half of the price of a copy is theirs."""
MAIN = 0.8
"""At this share of all requests in flight it is half, too, unless they have all come in the same moment."""
MOMENT_S = 0.005
"""Requests that a client sends at once come within this time."""
BACKLOG_WEIGHT = 3.0
BATCH_WEIGHT = 2.5


class MinCost:
    """The lowest sum of what must be computed for this prompt, what waits before it, and what runs beside it."""

    name = "min_cost"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: prompt tokens."""
        columns = FleetView.of(workers).serving
        if not columns.count:
            return NOBODY
        matched = request.matched_at(columns.slots)
        most = matched.item(matched.argmax())
        costs = _costs(request, matched, most, columns)
        chosen = cheapest_of(columns, costs, random)
        return Ranking(
            columns.slots.item(chosen),
            reason_of(matched.item(chosen), most, columns.count),
            columns.named(costs),
            most_matched_blocks=most,
        )


def _costs(request: RequestView, matched: IntArray, most: int, columns: Columns) -> FloatArray:
    """One cost a worker; `matched` in blocks, `most` the largest of them.

    This is the hot loop of the router: whole columns at once, in place, with what is the same for all workers taken
    out. An operation on a column takes a third of a microsecond, and twice that with a number besides or from integers;
    so a part that changes nothing is left out.
    """
    prompt_tokens, count, fill = request.prompt_tokens, columns.count, columns.filled / columns.count
    is_even = not most or matched.item(matched.argmin()) == most
    # C = U - U of the holders, so the first two terms are U (1 + B/10 - copied) + copied U of the holders.
    copied = 0.0 if is_even else _copied_share(request, columns.slots[matched == most].tolist(), columns)
    computed = 1.0 - copied
    costs: FloatArray
    if fill:
        costs = columns.fill_up_to(MOST_FILLED * fill) * (PLACE_WEIGHT / fill)
        costs += computed
    else:
        costs = np.full(count, computed)
    # In whole blocks: the last token, which is always computed, changes no order.
    uncached = prompt_tokens - float(BLOCK_TOKENS) * (most if is_even else matched)
    costs *= uncached
    queue, is_short = columns.queue, columns.least_room < prompt_tokens
    if is_short:
        queue = queue + np.maximum(uncached - columns.room, 0.0)
    if columns.queued or is_short:
        # Q / (1 + 8/i + 3 Q'/N)
        usual = float(np.partition(queue, count // 4)[count // 4]) if is_short else columns.queue_at(count // 4)
        delayed = 1 + BURST_REQUESTS / max(BURST_REQUESTS, columns.num_idle)
        costs += queue * (prompt_tokens / (delayed * prompt_tokens + BACKLOG_WEIGHT * usual))
    # 2.5 N ((R - r)/(32 + R'))^3
    costs += columns.crowding * (BATCH_WEIGHT * prompt_tokens / (STEP_REQUESTS + columns.in_flight / count) ** 3)
    if copied:
        costs += copied * (prompt_tokens - BLOCK_TOKENS * most)
    return costs


def _copied_share(request: RequestView, holders: list[int], columns: Columns) -> float:
    """x^4/(x^4 + 1) min(1, u/(h R')): how much of a copy's price later requests will pay. `holders`: their slots."""
    users = sum([request.users.get(slot, 0) for slot in holders])
    if not users:
        return 0.0
    # Reports are late, and may know of fewer requests than use the prefix.
    of_all = users / max(users, columns.in_flight)
    used = users / CROWD
    if used < of_all / MAIN and max([request.used_for_s.get(slot, 0.0) for slot in holders]) >= MOMENT_S:
        used = of_all / MAIN
    return min(1.0, of_all * columns.count / len(holders)) * used**4 / (used**4 + 1)
