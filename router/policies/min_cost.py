"""The default policy: the lowest expected cost, in prompt tokens, with no settings.

    cost = U  +  0.2 * Q  +  N/32 * (R + W)

    N  tokens of this prompt
    U  tokens of it that the worker would have to compute
    Q  prompt tokens of other requests there, neither cached nor computed yet
    R  requests in flight there
    W  how many of them must end before one more can run; 0 unless the batch is full

U is work that the fleet has to do only because of this choice, so it counts whole. Q is work that is done anyway, and
waiting for it costs this one request time: it counts for less, and the less, the better the locality under overload.
Prefill alone would herd: a prompt that is wholly cached leaves no Q behind, and its worker would decode for the whole
fleet while others idle. So the requests in flight count too, on the scale of the prompt (a worker with 32 more of
them is as dear as computing the prompt once more), and twice when they stand between the request and its first step.

What it was tried on (`tests/bench/bench_policies.py`): bursts and streams of shared prefixes, uniform and Zipf, that
fit the fleet's caches or do not; one hot prefix; prompts with nothing in common; the Mooncake conversation trace.
Weights of Q from 0.1 to 0.3 and of R from N/64 to N/32 did alike. Without R one hot prefix had 100 times the time to
first token, and 50 times with the KV tokens of running requests in its place. A fixed number of tokens for a request
fitted either short prompts or long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from radixfleet.blocks import BLOCK_TOKENS
from router.policies.policy import cheapest, reason_for
from router.view import NOBODY, Ranking, RequestView, WorkerView, eligible

QUEUE_WEIGHT = 0.2
REQUESTS_A_PROMPT = 32


class MinCost:
    """The lowest sum of what must be computed for this prompt, what waits before it, and what runs beside it."""

    name = "min_cost"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: prompt tokens."""
        candidates = eligible(request, workers)
        if not candidates:
            return NOBODY
        prompt_tokens, matched = request.prompt_tokens, request.matched_blocks
        request_cost = prompt_tokens / REQUESTS_A_PROMPT
        # U in whole blocks: the last token, which is always computed, changes no order, and this loop is the hot one.
        costs = {
            worker.slot: prompt_tokens
            - BLOCK_TOKENS * matched[worker.slot]
            + QUEUE_WEIGHT * worker.outstanding_prompt_tokens
            + request_cost * (worker.requests_in_flight + worker.places_short)
            for worker in candidates
        }
        chosen = cheapest(candidates, costs, random)
        return Ranking(chosen.slot, reason_for(chosen, candidates, request), costs)
