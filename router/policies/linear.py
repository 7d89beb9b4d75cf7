"""Dynamo's cost, as it is published. A baseline."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from radixfleet.blocks import BLOCK_TOKENS
from router.policies.policy import cheapest, reason_for
from router.view import NOBODY, Ranking, RequestView, WorkerView, eligible

OVERLAP_WEIGHT = 1.0


class Linear:
    """The lowest weighted sum of blocks to prefill and blocks held by running requests.

    The KV router of NVIDIA Dynamo with its defaults (kv-overlap-score-weight 1, temperature 0): cost =
    weight * prefill_blocks + decode_blocks, where prefill_blocks are the blocks that the worker has still to prefill,
    this prompt's uncached ones included, and decode_blocks those that running requests hold, this one's included.
    """

    name = "linear"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: blocks."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        costs = {}
        for worker in candidates:
            uncached = request.uncached_tokens(worker.slot)
            prefill = worker.outstanding_prompt_tokens + uncached
            decode = worker.kv_protected_tokens + uncached
            costs[worker.slot] = (OVERLAP_WEIGHT * prefill + decode) / BLOCK_TOKENS
        chosen = cheapest(candidates, costs, random)
        return Ranking(chosen.slot, reason_for(chosen, candidates, request), costs)
