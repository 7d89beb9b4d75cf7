"""What a router keeps of prompts that never come again: `python -m tests.bench.bench_router_memory`.

The router's own code for requests of `Fleet.RouteStream`, without a network: a million prompts that share nothing pass
through hashing, choice, booking, receipts and the workers' reports, as in production. The workers' caches are soon
full, and evict what is oldest. Prints the process's resident memory as it goes, and last what it grew by for each
prompt of the second half, when all has long been as full as it gets: next to nothing, if nothing is kept. (Routers that
keep the prompts themselves take about 11 kB for each of 8,000 characters, until they trim their trees.)

`--receipts`: of workers that tell nothing of their caches. `--text`: with text in place of token ids, so that the
tokenizer and its caches are among it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.convert import pack_tokens
from radixfleet.types import HashArray, Load
from radixfleet.v1 import fleet_pb2, inference_pb2
from router.index.sketch import NO_BLOCKS
from tests.bench.bench_route_parts import IN_FLIGHT, KV_TOKENS, PHASES, VOCABULARY, Held, Router, Watch, routed

LINES = 20


class Cache:
    """A worker's, of blocks that are never asked for again: the oldest prompt is evicted first."""

    def __init__(self) -> None:
        self._prompts: deque[HashArray] = deque()
        self._blocks = 0
        self.reports = 0

    def insert(self, block_hashes: HashArray) -> HashArray:
        """Returns the blocks that had to go."""
        self._prompts.append(block_hashes)
        self._blocks += len(block_hashes)
        evicted = [NO_BLOCKS]
        while self._blocks > KV_TOKENS // BLOCK_TOKENS:
            evicted.append(self._prompts.popleft())
            self._blocks -= len(evicted[-1])
        return np.concatenate(evicted)


def message(rng: np.random.Generator, num_tokens: int, text: bool) -> bytes:
    """One ask with a prompt like no other."""
    if text:
        words = rng.integers(0, 1 << 32, num_tokens // 8 + 1, np.uint64)
        prompt = inference_pb2.Prompt(text="".join(f"{word:08x}" for word in words.tolist())[:num_tokens])
    else:
        prompt = inference_pb2.Prompt(token_ids=pack_tokens(rng.integers(0, VOCABULARY, num_tokens).astype(np.uint32)))
    request = inference_pb2.GenerateRequest(prompt=prompt, sampling=inference_pb2.SamplingParams(max_new_tokens=16))
    ask = fleet_pb2.RouteAsk(number=1, request=request, timeout_s=60.0)
    return fleet_pb2.RouteStreamRequest(asks=[ask]).SerializeToString()


def finish(router: Router, held: Held, cache: Cache | None) -> None:
    """The worker computes this request, and tells of it. `cache`: None where it says nothing of its blocks."""
    for phase in PHASES.values():
        router.look_aside.lease_event(held.worker, held.lease_id, phase, held.cached_tokens)
    if cache is not None:
        cache.reports += 1
        evicted = cache.insert(held.block_hashes)
        assert router.fleet.sketch.apply_delta(held.worker.slot, 1, cache.reports, evicted, held.block_hashes)


async def bench(num_workers: int, num_tokens: int, count: int, receipts: bool, text: bool) -> None:
    """Print a table."""
    process, rng, watch = psutil.Process(), np.random.default_rng(0), Watch()
    resident: list[int] = []
    with ThreadPoolExecutor(1) as executor:
        router = Router(num_workers, executor)
        caches = {worker.slot: None if receipts else Cache() for worker in router.fleet.workers}
        print("   prompts  resident, MB", flush=True)
        for begin in range(0, count, IN_FLIGHT):
            batch = [message(rng, num_tokens, text) for _ in range(min(IN_FLIGHT, count - begin))]
            for held in [routed(router, data, watch) for data in batch]:
                finish(router, held, caches[held.worker.slot])
            router.fleet.clock.advance(1.0)
            for worker in router.fleet.workers:
                worker.report(Load())
            watch.times_s.clear()
            done = begin + len(batch)
            if done * LINES // count > len(resident):
                resident.append(process.memory_info().rss)
                print(f"{done:10,} {resident[-1] / 1e6:13.1f}", flush=True)
    grown = (resident[-1] - resident[LINES // 2 - 1]) / (count / 2)
    print(f"in the second half: {grown:.1f} bytes a prompt of {num_tokens} tokens")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2_048, help="of a prompt; characters with --text")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--receipts", action="store_true")
    parser.add_argument("--text", action="store_true")
    arguments = parser.parse_args()
    if arguments.prompts < LINES * IN_FLIGHT:
        parser.error(f"--prompts: {LINES * IN_FLIGHT} or more")
    asyncio.run(bench(arguments.workers, arguments.tokens, arguments.prompts, arguments.receipts, arguments.text))


if __name__ == "__main__":
    main()
