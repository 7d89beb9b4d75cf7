"""Where the CPU of a look-aside request goes, by part: `python -m tests.bench.bench_route_parts`.

The router's own code for one request of `Fleet.RouteStream`, without a network: microseconds of one thread, the
quickest of a hundred, so that other work on the machine matters little. What `bench_router_path` measures beyond their
sum is gRPC, the event loop, and following the workers. And caches: with --cold, other memory is written before each
request, as happens to a router that is asked one thing at a time; then the same code takes more than twice as long.

Three quarters of each prompt is shared by all. Workers tell of each lease that it has begun, has its first token, and
has ended, 64 leases at a time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from random import Random
from time import perf_counter
from typing import NamedTuple

import numpy as np

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.clock import MonotonicClock
from radixfleet.convert import pack_tokens
from radixfleet.text import Tokenizer
from radixfleet.types import HashArray
from radixfleet.v1 import fleet_pb2, inference_pb2
from router.api.prompts import Prompts
from router.api.routing import Routing
from router.dispatch.chooser import Chooser
from router.dispatch.gate import Gate
from router.dispatch.lookaside import LookAside, Owner
from router.index import HotPrefixes, Sketch
from router.index.sketch import NO_BLOCKS
from router.policies import make_policy
from router.workers.group import ModelGroup
from router.workers.listener import LeasePhase
from router.workers.state import WorkerState
from router.workers.tokenizers import TokenizerStore
from tests.support.byte_tokenizer import byte_spec
from tests.support.router_parts import CAPACITY, FINGERPRINT, MODEL, Parts

OTHER_BYTES = 48 << 20
"""More than the CPU's caches hold."""
VOCABULARY = 50_000
KV_TOKENS = 1 << 20
IN_FLIGHT = 64
PHASES = {
    "lease: begun": LeasePhase.STARTED,
    "lease: first token": LeasePhase.FIRST_TOKEN,
    "lease: ended": LeasePhase.ENDED,
}


class Held(NamedTuple):
    """A lease, as its worker and its client know it."""

    lease_id: str
    worker: WorkerState
    cached_tokens: int
    block_hashes: HashArray


class Fleet(Parts):
    """Large workers that report, in one group; stands in for the registry."""

    models = ("m",)

    def serve(self, num_workers: int) -> None:
        """So many workers."""
        for index in range(num_workers):
            worker = self.add(f"w{index}", model=replace(MODEL, vocab_size=VOCABULARY))
            worker.capacity = replace(CAPACITY, kv_tokens=KV_TOKENS)
            self.sketch.set_capacity(worker.slot, KV_TOKENS // BLOCK_TOKENS)
            self.sketch.apply_digest(worker.slot, 1, 0, NO_BLOCKS)
        self._group = ModelGroup(self.workers)
        self._reports = dict.fromkeys(self.workers, 0)

    def report(self, worker: WorkerState, cached: Sequence[HashArray]) -> None:
        """The worker tells that it has these blocks in its cache."""
        self._reports[worker] += bool(cached)
        added = np.concatenate([NO_BLOCKS, *cached])
        assert self.sketch.apply_delta(worker.slot, 1, self._reports[worker], NO_BLOCKS, added)

    def group(self, model: str) -> ModelGroup:
        """The same one always."""
        return self._group


class Tokenizers(TokenizerStore):
    """Has the one that is asked for."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__(executor)
        self._ready = {FINGERPRINT: Tokenizer(byte_spec())}


class Part:
    """Takes the time of what is inside."""

    def __init__(self, times_s: list[float]) -> None:
        self._times_s = times_s

    def __enter__(self) -> None:
        self._began_s = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._times_s.append(perf_counter() - self._began_s)


class Watch:
    """Times of the parts of each request."""

    def __init__(self) -> None:
        self.times_s: dict[str, list[float]] = defaultdict(list)

    def part(self, name: str) -> Part:
        """One of one request."""
        return Part(self.times_s[name])

    def us(self, name: str) -> float:
        """What one request takes: of a hundred the quickest."""
        times_s = sorted(self.times_s[name])
        return times_s[len(times_s) // 100] * 1e6


class Router:
    """The parts of one that a look-aside request meets."""

    def __init__(self, num_workers: int, executor: ThreadPoolExecutor) -> None:
        clock = MonotonicClock()
        fleet = self.fleet = Fleet(num_workers=0, sketch=Sketch(clock))
        fleet.serve(num_workers)
        metrics = fleet.metrics
        policy = make_policy("min_cost")
        self.chooser = Chooser(fleet, fleet.sketch, policy, metrics, Random(1), HotPrefixes(clock))
        self.prompts = Prompts(fleet, Tokenizers(executor), executor, metrics)  # type: ignore[arg-type]  # stands in
        self.look_aside = LookAside(60.0, metrics)
        self.owner: Owner = set()
        gate = Gate(self.chooser, max_waiting=512, metrics=metrics, clock=clock)
        self.routing = Routing(self.prompts, gate, self.look_aside)


def asks(count: int, num_tokens: int) -> list[bytes]:
    """Messages of one request each."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCABULARY, num_tokens * 3 // 4)
    messages = []
    for number in range(count):
        ids = np.concatenate([common, rng.integers(0, VOCABULARY, num_tokens - len(common))]).astype(np.uint32)
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(token_ids=pack_tokens(ids)),
            sampling=inference_pb2.SamplingParams(max_new_tokens=16),
        )
        ask = fleet_pb2.RouteAsk(number=number, request=request, timeout_s=60.0)
        messages.append(fleet_pb2.RouteStreamRequest(asks=[ask]).SerializeToString())
    return messages


def routed(router: Router, data: bytes, watch: Watch) -> Held:
    """What `RouteStream` and `Routing.begin` do, step by step."""
    with watch.part("read the message"):
        request = fleet_pb2.RouteStreamRequest.FromString(data).asks[0].request
    with watch.part("check the request"):
        preparation = router.prompts.begin(request, look_aside=True)
    with watch.part("token ids, their hashes"):
        prepared = preparation.work()
    with watch.part("take in what changed"):
        router.fleet.group(prepared.model).view  # noqa: B018  makes it
    with watch.part("choose and book"):
        lease = router.chooser.choose_unless_saturated(prepared)
    assert lease is not None
    with watch.part("lease id, answer"):
        answer = fleet_pb2.RouteAnswer(number=1)
        router.routing._book(lease, preparation, answer.route, router.owner)
    with watch.part("write the message"):
        fleet_pb2.RouteStreamResponse(answers=[answer]).SerializeToString()
    return Held(answer.route.lease_id, lease.worker, lease.decision.predicted_cached_tokens, prepared.block_hashes)


def told(router: Router, leases: Sequence[Held], watch: Watch) -> None:
    """What workers tell of these leases."""
    for name, phase in PHASES.items():
        for lease in leases:
            with watch.part(name):
                router.look_aside.lease_event(lease.worker, lease.lease_id, phase, lease.cached_tokens)
    for worker in router.fleet.workers:
        router.fleet.report(worker, [lease.block_hashes for lease in leases if lease.worker is worker])


async def bench(num_workers: int, num_tokens: int, count: int, *, cold: bool) -> None:
    """Print a table."""
    other = np.zeros(OTHER_BYTES if cold else 0, np.uint8)
    with ThreadPoolExecutor(1) as executor:
        router, watch = Router(num_workers, executor), Watch()
        messages = asks(count, num_tokens)
        for begin in range(0, count, IN_FLIGHT):
            leases = []
            for data in messages[begin : begin + IN_FLIGHT]:
                other += 1
                leases.append(routed(router, data, watch))
            told(router, leases, watch)
    parts = {name: watch.us(name) for name in watch.times_s}
    print(f"\n{num_workers} workers, prompts of {num_tokens} tokens{', caches cold' * cold}: us a request")
    for name, part_us in {**parts, "in all": sum(parts.values())}.items():
        print(f"{name:24} {part_us:7.1f}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 64])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2_000, 16_000])
    parser.add_argument("--requests", type=int, default=4_096)
    parser.add_argument("--cold", action="store_true", help="with CPU caches that hold something else")
    arguments = parser.parse_args()
    for num_workers, num_tokens in product(arguments.workers, arguments.tokens):
        asyncio.run(bench(num_workers, num_tokens, arguments.requests, cold=arguments.cold))


if __name__ == "__main__":
    main()
