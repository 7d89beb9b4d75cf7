"""Consistent hashing of the prompt's beginning, with bounded load. A baseline that needs no index."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import xxhash

from router.policies.counting import LeastLoad
from router.policies.policy import cheapest
from router.view import NOBODY, Ranking, RequestView, WorkerView, eligible

PREFIX_BLOCKS = 4
LOAD_FACTOR = 1.25


class PrefixHash:
    """Equal beginnings go to one worker while that has at most 1.25 times the mean load, and else to the next in line.

    V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018, as KubeAI's PrefixHash
    strategy applies it to prompts. The line of workers is drawn by rendezvous hashing (Thaler and Ravishankar, 1998) in
    place of a ring: it needs no state, and a worker that leaves moves only its own prompts.
    """

    name = "prefix_hash"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: places down the line for the workers within the bound, and beyond all of them for those over it.

        A prompt of less than one block has no beginning worth keeping together and goes to the least loaded.
        """
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        num_blocks = min(PREFIX_BLOCKS, len(request.block_hashes))
        if num_blocks == 0:
            return LeastLoad().rank(request, workers, random)
        key = int(request.block_hashes[num_blocks - 1])
        line = sorted(candidates, key=lambda worker: _score(worker, key))
        # The request itself counts, on both sides, and whatever the mean one request is always within the bound.
        bound = max(1.0, LOAD_FACTOR * (sum(worker.requests_in_flight for worker in line) + 1) / len(line))
        costs = {
            worker.slot: float(place if worker.requests_in_flight + 1 <= bound else place + len(line))
            for place, worker in enumerate(line)
        }
        chosen = cheapest(line, costs, random)
        if len(line) == 1:
            return Ranking(chosen.slot, "only", costs)
        return Ranking(chosen.slot, "hash" if chosen is line[0] else "spill", costs)


def _score(worker: WorkerView, key: int) -> int:
    return xxhash.xxh3_64_intdigest(worker.worker_id.encode(), seed=key)
