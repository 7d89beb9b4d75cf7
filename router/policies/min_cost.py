"""The default policy: the lowest expected cost, in prompt tokens, with no settings.

    cost = U (1 + B/10)  -  C x^4/(x^4 + 1) min(1, u/(h R'))  +  Q / (1 + 8/i + 3 Q'/N)  +  2.5 N ((R - r)/(32 + R'))^3

    N  tokens of this prompt
    U  tokens of it that the worker would have to compute
    C  those of U that the h best matching workers hold, and u the requests that use them there now, in all;
       x = u/8, or 5 u/4 F where that is more and there have been such requests for 5 ms
    B  how full the worker's cache is, in terms of the fleet's mean; 1.5 at most
    Q  prompt tokens of other requests there, neither cached nor computed yet;
       Q' what three workers of four have at least, and i the idle workers, 8 at least: those that have none, could run
       another request at once, and have fewer than 32 in flight
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
- R makes steps longer: a step's fixed time is that of about 32 decodes (see `deploy.lab.presets`). Prefill alone would
  herd, for a prompt that is wholly cached leaves no Q. Cubed: an idle worker relieves those that only decode, while
  a few requests more or less, which even out by themselves, hardly count.

What was tried and lost, simulated by `tests/bench/bench_candidates.py`, which prints it again. Chosen on seeds 1 to 3;
the README's figures are of seeds 101 and 202, which nothing was chosen on. First Q' and x, mean time to first token
over this form's:
- x = u/8 alone, and Q' the mean of the others, the form before: 1.09 on a hot prefix on a cold fleet of 4 workers and
  1.06 on one of 16, where eight wait before a copy is begun; 1.06 on the Mooncake trace at 16 workers. There a dozen
  requests in 640 made the difference, which waited 2 to 9 s behind prompts of 50,000 to 120,000 tokens while 2 to 9
  workers were idle: a few such queues made the mean so large that Q did not count.
- Q' the least of all: 0.99 on that trace, and 1.03 and 1.04 on working-set-0.5 and 0.75 at load 1.1, for one idle
  worker says too little; with 8 Q' in place of 3 Q' also 0.91 of the output tokens a second in the published
  experiment. Q' the median: 1.05 on the trace. Q' the squared mean of the roots: 1.06. The mean and Q (1 + Q/40,000),
  for the attention of long prompts: 1.03.
- 10, 30 and 50 ms in place of 5: up to 1.04, 1.07 and 1.10 on the hot prefix at 4 workers. None: bursts at a low rate
  take 1.8 times the device time (hit rate 0.75 of 0.86), and groups that come all at once are torn. Siblings that come
  spread over 20 ms do that now where the fleet is idle, for 0.9 of the form before's time to first token (hit rate 0.70
  of 0.83); at load 0.9 hardly (0.82).
- u/3 after 5 ms in place of 5 u/4 F: 1.04 on the hot prefix at 4 workers.
Then 8/i, seeds 1 and 2 (64 workers: 301), where the form before had Q counted for half wherever nobody waits:
- The form before: 1.05 and 1.14 of this form's time to first token in bursts on 16 and 64 workers at load 0.6 (hit rate
  0.81, here 0.72 and 0.55), where siblings waited for each other while others were idle. Elsewhere 0.99 to 1.00 on 16;
  on 64, seed 101, 1.00, but 0.97 and 0.98 on working-set-0.5 at loads 0.9 and 1.1, and 1.02 on 0.75 at 0.9.
- All that have no queue as i: the same in all these, where no worker decodes for 32. With 150 decodes on each of 40
  and 64 workers, siblings of 6,016 + 256 tokens are torn at the sixth and the fourth, here at the 19th.
- 1/i in place of 8/i: 0.91 and 0.95 in those bursts, but 1.01 to 1.02 on working-set-0.5, 0.98 of the output tokens a
  second on shared prefixes at load 1.1, and bursts are torn on four workers (hit rate 0.76 of 0.86).
- The square of the busy workers over the idle: 0.94 and 1.00 in bursts, and 1.01 to 1.03 on working-set-0.5.
Then the form before, on seeds of its own, over the best of all tried on the hot prefix at 2, 4 and 16 workers:
- U (1 + B/2) and x = u/8 h: 1.09, 1.18 and 1.46, for each copy waits until eight more use every one that there is.
- u/3 in place of u/8: 1.02, 1.04 and 1.04; u/(u + 1): 1.00, 1.00 and 1.00. Both tear bursts of siblings: on 4 workers,
  8 prompts of 4,096 + 64 tokens at a time, all others idle, are computed four times (hit rate 0.65 of 0.86, here 0.86),
  and on busier fleets their mean time to first token is up to 1.13 times this form's. u/5: 1.06, 1.08 and 1.07, and
  1.06. u/(u + 1) also tears groups that come all at once (0.83 of the output tokens a second for 16 groups of 16).
- Those with a copy's place in the cache besides (C B, by 0.4 to 1): bursts stay together and the row is 1.00, but where
  caches have something already, a hot prefix has 1.15 to 1.3 times round robin's mean on 4 workers and 1.3 to 1.9 times
  on 16.
- B/2 in place of B/10: 1.06 to 1.08 on the Mooncake trace at 4 and 16 workers, where short prompts stood behind long
  ones for the sake of an emptier cache. No B: 1.07 on working-set-0.75, and 0.95 of the output tokens a second in the
  published experiment, where groups are dealt unevenly. The share of the pool in place of B: 1.07 on that trace.
Tried for earlier forms, on seeds of their own: weights of Q and R that do not fall (U + 0.2 Q + N/32 R: 2.7 on the hot
prefix at 16 workers); Q without R (all herd to the hot prefix's first worker); Q whole or the predicted time to first
token (three times the mean on bursts and on prefixes that do not fit); R in tokens, in proportion or squared (groups
are torn, or dealt unevenly); Q counted 16/(16 + R') (bursts and groups are torn).
What each part is worth: mean time to first token (output tokens a second) without it over with it, where that matters
most, of seeds 401 to 404 or 401 alone on 4 workers where not said otherwise; `no_...` among the candidates:
    B                1.09 on prefixes of 1.5 times the KV, 1.04 on shared ones, at load 0.6; 1.03 on zipf at 0.9
    C                1.45, 1.64, 1.78 on the hot prefix at loads 0.6, 0.9, 1.1 (0.94, 0.92, 0.86)
    min(1, u/(h R')) 1.03 on zipf at load 0.9 on 2 workers and at 1.1 on 4, for fewer hits (seeds 101 and 202; 101)
    5 u/4 F          1.07, 1.09, 1.10 on the hot prefix
    the 5 ms         1.01 on bursts at loads 0.9 and 1.1 (0.98, 0.99); device time where they come seldom, as above
    Q', Q/2 instead  1.03 on bursts at loads 0.9 and 1.1; 0.97 on the hot prefix
    Q', as the mean  1.00; on the trace as above
    R                1.03 on zipf at load 0.9, (0.97) at 1.1; a worker that joins others which hold all gets nothing
What is left, of 91 rows of workload, fleet and load with one seed or two: four are more than 5 % behind the best. None
is on other seeds (301 on), ours over the best other policy's, seed by seed: bursts at load 0.6 on 2 and 16 workers
1.002 +- 0.005 and 0.990 +- 0.000, prefixes of 1.5 times the KV of 2 workers at 0.6 0.99 +- 0.04 (12 seeds each), the
Mooncake trace on 4 at 1.1 0.95 +- 0.02 (10 stretches). To compute each sibling of a burst where nobody waits, which is
the best there on some seeds (0.9 of ours on 16 workers), takes 1.4 to 5 times as long on others, when bursts meet.
On 64 workers at load 0.6 the predicted time to first token is ahead on a cold hot prefix while each worker has had no
more than 15 requests: 1.05 +- 0.015 (seeds 301 to 303), for most of what counts there are the first copies. With 60
requests a worker it is behind. At load 1.1 llm-d's filter is, on working-set-0.75: 1.06 on seed 101, for 0.79 of our
output tokens a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS
from router.fleet_view import STEP_REQUESTS, Columns, FleetView, FloatArray, IntArray
from router.policies.policy import cheapest_of, reason_of
from router.view import NOBODY, Ranking, RequestView, WorkerView

PLACE_WEIGHT = 0.1
MOST_FILLED = 1.5
CROWD = 8
"""So many users of a prefix halve the price of a copy, where they are all that there is; a burst has about so many."""
MAIN = 0.8
"""So does such a share of the fleet's requests, where they have not all come in the same moment."""
MOMENT_S = 0.005
"""What somebody sends at once comes within such a time."""
BACKLOG_WEIGHT = 3.0
BATCH_WEIGHT = 2.5


class MinCost:
    """The lowest sum of what must be computed for this prompt, what waits before it, and what runs beside it."""

    name = "min_cost"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: prompt tokens."""
        columns = FleetView.of(workers).eligible(request)
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
    out. An operation on a column takes half a microsecond, and with a number besides nearly one; so a part that changes
    nothing is left out.
    """
    prompt_tokens, count, fill = request.prompt_tokens, columns.count, columns.filled / columns.count
    # U (1 + B/10), in whole blocks: the last token, which is always computed, changes no order.
    costs: FloatArray
    uncached = prompt_tokens - BLOCK_TOKENS * matched if most else None
    if fill:
        costs = columns.fill_up_to(MOST_FILLED * fill) * (PLACE_WEIGHT / fill)
        costs += 1.0
        costs *= prompt_tokens if uncached is None else uncached
    else:
        costs = np.full(count, prompt_tokens, dtype=np.float64) if uncached is None else uncached.astype(np.float64)
    if columns.queued:
        # Q / (1 + 8/i + 3 Q'/N)
        usual = columns.queue_at(count // 4)
        delayed = 1 + CROWD / max(CROWD, columns.num_idle)
        costs += columns.queue * (prompt_tokens / (delayed * prompt_tokens + BACKLOG_WEIGHT * usual))
    # 2.5 N ((R - r)/(32 + R'))^3
    costs += columns.crowding * (BATCH_WEIGHT * prompt_tokens / (STEP_REQUESTS + columns.in_flight / count) ** 3)
    if uncached is not None:
        copied = _copied_share(request, matched, most, columns)
        if copied:
            # C: what the holders have beyond what is here.
            uncached -= prompt_tokens - BLOCK_TOKENS * most
            costs -= copied * uncached
    return costs


def _copied_share(request: RequestView, matched: IntArray, most: int, columns: Columns) -> float:
    """x^4/(x^4 + 1) min(1, u/(h R')): how much of a copy's price later requests will pay."""
    holders = columns.slots[matched == most]
    if len(holders) == columns.count:
        return 0.0
    slots = holders.tolist()
    users = sum([request.users.get(slot, 0) for slot in slots])
    if not users:
        return 0.0
    # Reports are late, and may know of fewer requests than use the prefix.
    of_all = users / max(users, columns.in_flight)
    used = users / CROWD
    if used < of_all / MAIN and max([request.used_for_s.get(slot, 0.0) for slot in slots]) >= MOMENT_S:
        used = of_all / MAIN
    return min(1.0, of_all * columns.count / len(slots)) * used**4 / (used**4 + 1)
