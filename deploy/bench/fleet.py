"""A workload on a fleet that runs: what it is, what it can take, and the run itself; or fleets of simulated workers."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.local_fleet import LocalFleet, LocalSpec
from deploy.progress import Tell
from loadtest.callers import Caller, GrpcCaller
from loadtest.catalog import CATALOG, Size
from loadtest.driver import unfit
from loadtest.trace import ID_TOKENS, Trace
from loadtest.workloads import Arrival, scaled
from radixfleet.client import Client
from radixfleet.endpoint import Endpoint
from radixfleet.errors import InternalError
from radixfleet.retry import RetryPolicy

RATE_OF_A_WORKER = 4.0
"""Requests a second, where nobody says how many."""


class UnfitWorkload(ValueError):
    """There is no such workload, or the model cannot take it. `str(error)` says what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a workload is made for, and sent to."""

    policy: str
    workers: tuple[str, ...]
    kv_tokens: int
    """Of all workers together."""
    vocab_size: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What to send."""

    workload: str
    """Name in the catalog, or path of a trace."""
    requests: int
    rate: float | None = None
    speed: float = 1.0
    lengths: float = 1.0
    seed: int = 0
    model: str = ""
    timeout_s: float | None = None
    id_tokens: int = ID_TOKENS

    def asked_rate(self, target: Target) -> float | None:
        """Requests a second that were asked for, by the user or by the default; None: a trace's own times."""
        return self._rate(target) if self.workload in CATALOG else self.rate

    def _rate(self, target: Target) -> float:
        return self.rate or RATE_OF_A_WORKER * max(1, len(target.workers))

    def arrivals(self, target: Target) -> list[Arrival]:
        """The requests. Raises UnfitWorkload, TraceError, or OSError for a trace that cannot be read."""
        arrivals = self._made(target)
        if self.lengths != 1.0:
            arrivals = scaled(arrivals, self.lengths)
        if number := unfit(arrivals, target.max_context_tokens):
            longest = max(arrival.prompt_tokens + arrival.max_new_tokens for arrival in arrivals)
            raise UnfitWorkload(
                f"{number} of {len(arrivals)} requests are longer than the model's context: up to {longest:,} of "
                f"{target.max_context_tokens:,} tokens. Shorten them: "
                f"--lengths {target.max_context_tokens / longest * self.lengths * 0.95:.3g}"
            )
        return arrivals

    def _made(self, target: Target) -> list[Arrival]:
        if self.workload in CATALOG:
            size = Size(
                num_workers=max(1, len(target.workers)),
                kv_tokens=target.kv_tokens,
                num_requests=self.requests,
                requests_per_s=self._rate(target),
            )
            return CATALOG[self.workload].make(size).arrivals(vocab_size=target.vocab_size, seed=self.seed)
        path = Path(self.workload)
        if not path.is_file():
            raise UnfitWorkload(
                f"no workload is called {self.workload!r}, nor is there such a file; there are {', '.join(CATALOG)}"
            )
        trace = Trace(path, self.speed, self.rate, max_requests=self.requests, id_tokens=self.id_tokens)
        return trace.arrivals(vocab_size=target.vocab_size, seed=self.seed)


async def survey(endpoint: Endpoint, model: str) -> Target:
    """What serves there: a router with its workers, or one worker. Raises RadixfleetError."""
    async with Client(endpoint, timeout_s=10) as client:
        info = await client.model_info(model)
        workers: tuple[str, ...]
        try:
            report = await client.fleet()
        except InternalError:  # it does not implement Fleet: no router
            worker = await client.worker_info()
            policy, workers, kv_tokens = "worker", (worker.worker_id,), worker.capacity.kv_tokens
        else:
            serving = [worker for worker in report.workers if worker.info.model.model == info.model]
            policy, workers = report.fleet.policy, tuple(sorted(worker.worker_id for worker in serving))
            kv_tokens = sum(worker.info.capacity.kv_tokens for worker in serving)
    return Target(policy, workers, kv_tokens, info.vocab_size, info.max_context_tokens)


@asynccontextmanager
async def grpc_caller(endpoint: Endpoint, demand: Demand) -> AsyncIterator[Caller]:
    """What puts the requests to a fleet of ours."""
    async with Client(endpoint, retry=RetryPolicy(retries=0)) as client:
        yield GrpcCaller(client, model=demand.model, timeout_s=demand.timeout_s)


def simulated_fleet(policy: str, num_workers: int, kv_tokens: int, tell: Tell) -> LocalFleet:
    """A router with `policy` and workers that pretend to be GPUs with `kv_tokens` each: real processes, real time."""
    spec = LocalSpec(
        num_workers=num_workers,
        router_options={"port": 0, "metrics_port": 0, "http_port": -1, "policy": policy, "log_level": "warning"},
        worker_options={"model": "demo", "runner": "sim", "max_total_tokens": kv_tokens, "log_level": "warning"},
        run_dir=Path(tempfile.mkdtemp(prefix="radixfleet-bench-")),
    )
    return LocalFleet(spec, tell)
