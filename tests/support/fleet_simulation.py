"""A fleet in virtual time: the router's own sketch and policies before workers that are a cost model and an LRU cache.

A worker computes in steps. A step decodes one token of each running request and prefills up to `chunk_tokens`, first
come first served; it takes a fixed time and a time for each prefilled token, decoding request and KV token read. Blocks
that no running request uses are evicted least recently used, the deepest first. The router sees loads and receipts at
once, and with `reports_s` the deltas of the cache that often.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import numpy as np
import numpy.typing as npt

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.types import WorkerId
from router.index import BlockLease, Sketch
from router.policies import Policy
from router.view import RequestView, WorkerView

HashArray = npt.NDArray[np.uint64]
NO_BLOCKS: HashArray = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request of the workload."""

    arrival_s: float
    hashes: HashArray
    """Of the prompt's whole blocks."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker can do. The defaults are roughly an 8 B model on a data-centre GPU."""

    kv_blocks: int = 8_000
    max_running_requests: int = 64
    chunk_tokens: int = 2_048
    step_s: float = 0.008
    prefill_token_s: float = 0.00008
    decode_s: float = 0.00005
    kv_token_s: float = 0.00000004


@dataclass(slots=True, eq=False)
class Run:
    """A job on a worker."""

    job: Job
    lease: BlockLease
    uncached_tokens: int
    """What counts as outstanding: the prediction until the worker begins, then the truth."""
    cached_tokens: int = 0
    to_prefill: int = 0
    decoded: int = 0
    first_token_s: float = -1.0
    end_s: float = -1.0

    @property
    def private_blocks(self) -> int:
        """KV blocks that it needs beside those of its prompt's whole blocks."""
        return -(-(self.job.prompt_tokens + self.job.output_tokens) // BLOCK_TOKENS) - len(self.job.hashes)


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """A queue, a batch and a cache."""

    slot: int
    machine: Machine
    waiting: deque[Run] = field(default_factory=deque)
    running: list[Run] = field(default_factory=list)
    users: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Cached block -> running requests that use it; least recently used first."""
    used_blocks: int = 0
    """Blocks that cannot be evicted, private ones included."""
    private_blocks: int = 0
    outstanding_tokens: int = 0
    last_booking: int = 0
    sequence: int = 0
    evicted: dict[int, None] = field(default_factory=dict)
    added: dict[int, None] = field(default_factory=dict)
    chunks: list[tuple[Run, int]] = field(default_factory=list)

    def admit(self) -> list[Run]:
        """Move requests from the queue into the batch. Returns those that began."""
        begun = []
        while self.waiting and len(self.running) < self.machine.max_running_requests:
            run = self.waiting[0]
            hashes: list[int] = run.job.hashes.tolist()
            depth = next((i for i, block in enumerate(hashes) if block not in self.users), len(hashes))
            need = sum(not self.users.get(block) for block in hashes) + run.private_blocks
            if self.used_blocks + need > self.machine.kv_blocks and self.running:
                break
            self.waiting.popleft()
            self._take(run, hashes, need)
            run.cached_tokens = min(depth * BLOCK_TOKENS, run.job.prompt_tokens - 1)
            run.to_prefill = run.job.prompt_tokens - run.cached_tokens
            self.outstanding_tokens += run.to_prefill - run.uncached_tokens
            run.uncached_tokens = run.to_prefill
            self.running.append(run)
            begun.append(run)
        return begun

    def launch(self) -> float:
        """Choose the work of one step. Returns its duration."""
        machine, budget, decoding, kv_tokens = self.machine, self.machine.chunk_tokens, 0, 0
        self.chunks = []
        for run in self.running:
            if not run.to_prefill:
                decoding += 1
                kv_tokens += run.job.prompt_tokens + run.decoded
            elif budget:
                chunk = min(budget, run.to_prefill)
                budget -= chunk
                self.chunks.append((run, chunk))
        prefill_s = (machine.chunk_tokens - budget) * machine.prefill_token_s
        return machine.step_s + prefill_s + decoding * machine.decode_s + kv_tokens * machine.kv_token_s

    def settle(self, now_s: float) -> list[Run]:
        """Apply the step that ended. Returns the requests that ended with it."""
        for run, chunk in self.chunks:
            run.to_prefill -= chunk
        for run in self.running:
            if not run.to_prefill:
                if not run.decoded:
                    run.first_token_s = now_s
                    self.outstanding_tokens -= run.uncached_tokens
                run.decoded += 1
        ended = [run for run in self.running if run.decoded >= run.job.output_tokens]
        for run in ended:
            run.end_s = now_s
            self.running.remove(run)
            self._give_back(run)
        return ended

    def view(self, sketch: Sketch) -> WorkerView:
        """What the policy sees."""
        return WorkerView(
            slot=self.slot,
            worker_id=WorkerId(f"worker-{self.slot}"),
            running_requests=len(self.running),
            waiting_requests=len(self.waiting),
            max_running_requests=self.machine.max_running_requests,
            outstanding_prompt_tokens=self.outstanding_tokens,
            kv_tokens=self.machine.kv_blocks * BLOCK_TOKENS,
            kv_protected_tokens=self.used_blocks * BLOCK_TOKENS,
            sketch_blocks=sketch.blocks(self.slot),
            last_booking=self.last_booking,
        )

    def report(self, sketch: Sketch) -> None:
        """Tell the sketch what changed since the last report."""
        gone = [block for block in self.evicted if block not in self.users]
        here = [block for block in self.added if block in self.users]
        self.sequence += bool(gone or here)
        in_step = sketch.apply_delta(
            self.slot, 1, self.sequence, np.array(gone, dtype=np.uint64), np.array(here, dtype=np.uint64)
        )
        assert in_step
        self.evicted.clear()
        self.added.clear()

    def _take(self, run: Run, hashes: list[int], need: int) -> None:
        self.used_blocks += need
        self.private_blocks += run.private_blocks
        for block in reversed(hashes):
            if block not in self.users:
                self.added[block] = None
            self.users[block] = self.users.get(block, 0) + 1
            self.users.move_to_end(block)
        excess = len(self.users) + self.private_blocks - self.machine.kv_blocks
        if excess > 0:
            for block in [block for block, users in self.users.items() if not users][:excess]:
                del self.users[block]
                self.evicted[block] = None

    def _give_back(self, run: Run) -> None:
        self.private_blocks -= run.private_blocks
        self.used_blocks -= run.private_blocks
        for block in reversed(run.job.hashes.tolist()):
            self.users[block] -= 1
            self.used_blocks -= not self.users[block]
            self.users.move_to_end(block)


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation gave."""

    runs: list[Run]
    duration_s: float
    requests_by_slot: list[int]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that the workers found in their caches."""
        return sum(run.cached_tokens for run in self.runs) / sum(run.job.prompt_tokens for run in self.runs)

    @property
    def predicted_rate(self) -> float:
        """The same as the sketch predicted it."""
        return sum(run.lease.predicted_tokens for run in self.runs) / sum(run.job.prompt_tokens for run in self.runs)

    @property
    def mean_ttft_s(self) -> float:
        """Mean time to first token."""
        return sum(run.first_token_s - run.job.arrival_s for run in self.runs) / len(self.runs)

    @property
    def p99_ttft_s(self) -> float:
        """Its 99th percentile."""
        return sorted(run.first_token_s - run.job.arrival_s for run in self.runs)[int(0.99 * (len(self.runs) - 1))]

    @property
    def mean_latency_s(self) -> float:
        """Mean time to the last token."""
        return sum(run.end_s - run.job.arrival_s for run in self.runs) / len(self.runs)


class Simulation:
    """One policy, one workload, one fleet."""

    def __init__(
        self, policy: Policy, machines: Sequence[Machine], *, seed: int = 0, reports_s: float | None = 0.1
    ) -> None:
        self.policy, self.random, self.sketch = policy, Random(seed), Sketch()
        self.workers = [SimulatedWorker(self.sketch.attach(), machine) for machine in machines]
        self.reports_s = reports_s
        self.runs: list[Run] = []
        self._events: list[tuple[float, int, Literal["arrival", "step", "report"], int]] = []
        self._num_events = 0
        for worker in self.workers:
            self.sketch.set_capacity(worker.slot, worker.machine.kv_blocks)
            if reports_s:
                self.sketch.apply_digest(worker.slot, 1, 0, NO_BLOCKS)

    def serve(self, jobs: Sequence[Job]) -> Result:
        """Serve all of `jobs` and return when the last one has ended."""
        for index, job in enumerate(jobs):
            self._at(job.arrival_s, "arrival", index)
        if self.reports_s:
            self._at(self.reports_s, "report", 0)
        left, now_s = len(jobs), 0.0
        while left:
            now_s, _, kind, index = heapq.heappop(self._events)
            if kind == "arrival":
                self.arrive(jobs[index], now_s)
            elif kind == "step":
                ended = self.workers[index].settle(now_s)
                for run in ended:
                    self.sketch.end(run.lease)
                left -= len(ended)
                self._go_on(self.workers[index], now_s)
            elif self.reports_s:
                for worker in self.workers:
                    worker.report(self.sketch)
                self._at(now_s + self.reports_s, "report", 0)
        assert self.sketch.open_leases == 0
        assert all(worker.outstanding_tokens == 0 for worker in self.workers)
        shares = [sum(run.lease.slot == worker.slot for run in self.runs) for worker in self.workers]
        return Result(self.runs, now_s, shares)

    def arrive(self, job: Job, now_s: float = 0.0) -> int:
        """Choose, book and queue in one go. Returns the slot."""
        matched = self.sketch.match(job.hashes)
        request = RequestView(job.prompt_tokens, job.hashes, matched, self.sketch.users(job.hashes, matched))
        views = [worker.view(self.sketch) for worker in self.workers]
        slot = self.policy.rank(request, views, self.random).slot
        assert slot is not None
        worker = self.workers[slot]
        lease = self.sketch.book(slot, job.hashes, job.prompt_tokens)
        run = Run(job, lease, request.uncached_tokens(slot))
        self.runs.append(run)
        worker.outstanding_tokens += run.uncached_tokens
        worker.last_booking = len(self.runs)
        worker.waiting.append(run)
        if not worker.running:
            self._go_on(worker, now_s)
        return slot

    def _go_on(self, worker: SimulatedWorker, now_s: float) -> None:
        for run in worker.admit():
            self.sketch.receipt(run.lease, run.cached_tokens)
        if worker.running:
            self._at(now_s + worker.launch(), "step", worker.slot)

    def _at(self, at_s: float, kind: Literal["arrival", "step", "report"], index: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, kind, index))


def shared_prefix_jobs(
    *,
    groups: int,
    jobs: int,
    prefix_blocks: int,
    own_tokens: int,
    output_tokens: float,
    rate: float | None = None,
    zipf: float = 0.0,
    seed: int = 0,
) -> list[Job]:
    """`jobs` requests whose prompts begin with one of `groups` prefixes, shuffled.

    `rate`: arrivals in a second (Poisson); None: all at once. `zipf`: exponent of the groups' popularity; 0: equal
    shares. Output lengths are exponential with the given mean.
    """
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, 2**63, (groups, prefix_blocks), dtype=np.uint64)
    weights = 1.0 / np.arange(1, groups + 1) ** zipf
    chosen = (
        rng.permutation(np.arange(jobs) % groups) if not zipf else rng.choice(groups, jobs, p=weights / weights.sum())
    )
    arrivals = np.cumsum(rng.exponential(1 / rate, jobs)) if rate else np.zeros(jobs)
    outputs = np.maximum(1, rng.exponential(output_tokens, jobs)).astype(int)
    own = rng.integers(0, 2**63, (jobs, own_tokens // BLOCK_TOKENS), dtype=np.uint64)
    prompt_tokens = prefix_blocks * BLOCK_TOKENS + own_tokens
    return [
        Job(float(arrivals[i]), np.concatenate([prefixes[chosen[i]], own[i]]), prompt_tokens, int(outputs[i]))
        for i in range(jobs)
    ]
