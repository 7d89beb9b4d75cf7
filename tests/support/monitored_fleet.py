"""A small fleet under load, scraped by a real Prometheus: a router, two simulated workers, clients.

Two workers with small KV pools and few places serve more clients than they have places for, so that all that a board
shows happens: hits and misses, spills, evictions, requests that wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

import deploy.monitoring
from deploy.monitoring.bundle import prometheus_config
from radixfleet.client import Client
from router.app import Router, running_router
from tests.support.prometheus import Prometheus, running_prometheus
from tests.support.router_fixture import settings
from tests.support.waiting import until
from tests.support.worker_fixture import sim_runner, sim_worker
from worker.engine.handle import EngineHandle
from worker.engine.inline import InlineEngine
from worker.runner.sim import CostModel

RULES = Path(deploy.monitoring.__file__).parent / "files" / "rules" / "radixfleet.yml"
_POLL_S = 0.25
_HAPPENED = (
    "radixfleet:hit_rate:ratio5m > 0",
    "sum(rate(radixfleet_router_queue_seconds_count[10s])) > 0",
    "sum(rate(radixfleet_router_tokenize_seconds_count[10s])) > 0",
    "sum(rate(radixfleet_worker_inter_token_seconds_count[10s])) > 0",
    "sum(radixfleet_worker_evicted_blocks_total) > 0",
)
"""A request waited in the router, prefixes were evicted, and so on; lately, where panels show rates."""
_SHARED_TOKENS, _OWN_TOKENS, _ANSWER_TOKENS = 512, 100, 12
_LETTERS = "abcdefghijklmnopqrstuvwxyz "
_COST = CostModel(step_s=5e-4, prefill_token_s=2e-6, decode_token_s=1e-5)


@dataclass(frozen=True, slots=True)
class Phase:
    """A time of the load."""

    seconds: float
    clients: int = 12
    """Each asks again when it has its answer."""
    prefixes: int = 6
    """Of which a prompt begins with one, chosen at random."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What Prometheus saw; the fleet itself may be gone."""

    prometheus: Prometheus
    began_s: float
    """Unix time."""
    ended_s: float
    """The last moment of the load, with all that it is for in sight."""

    def values(self, expr: str) -> list[float]:
        """Of an expression with a board's variables, at the end of the load."""
        return self.prometheus.query(substituted(expr), self.ended_s)


def substituted(expr: str, *, interval: str = "10s") -> str:
    """An expression as Grafana sends it, with "All" chosen everywhere."""
    for name in ("$model", "$worker", "$router"):
        expr = expr.replace(f'"{name}"', '".*"')
    return expr.replace("$__rate_interval", interval)


def quick_engine() -> EngineHandle:
    """In this process, with a small pool and short steps."""
    return InlineEngine(sim_runner(kv_tokens=3072, max_running_requests=2, cost=_COST))


@contextmanager
def recorded(
    *phases: Phase, engine: Callable[[], EngineHandle] = quick_engine, scrape_s: float = 0.5
) -> Iterator[Recording]:
    """Load a fleet, and end it; then what was seen of it may be asked about."""
    with ExitStack() as stack:
        began_s, ended_s, prometheus = asyncio.run(_observe(phases, engine, scrape_s, stack))
        yield Recording(prometheus, began_s, ended_s)


async def _observe(
    phases: Sequence[Phase], engine: Callable[[], EngineHandle], scrape_s: float, stack: ExitStack
) -> tuple[float, float, Prometheus]:
    """Prometheus goes on until `stack` ends."""
    async with _fleet(engine) as router:
        prometheus = await asyncio.to_thread(stack.enter_context, running_prometheus(_config(router, scrape_s)))
        began_s = time.time()
        async with Client(router.address, timeout_s=60) as client:
            for phase in phases[:-1]:
                await _load(client, phase)
            ended_s = began_s

            def is_enough() -> bool:
                nonlocal ended_s
                ended_s = time.time()
                return _scraped_enough(prometheus, ended_s)

            await _load(client, phases[-1], is_enough)
        return began_s, ended_s, prometheus


@asynccontextmanager
async def _fleet(engine: Callable[[], EngineHandle]) -> AsyncIterator[Router]:
    async with (
        sim_worker(engine=engine(), worker_id="worker-0") as first,
        sim_worker(engine=engine(), worker_id="worker-1") as second,
        running_router(
            settings(workers=(first.address, second.address), heartbeat_timeout_s=30.0), random=Random(1)
        ) as router,
    ):
        await until(lambda: sum(not state.ineligible_reason for state in router.registry.workers) == 2)
        yield router


def _config(router: Router, scrape_s: float) -> dict[str, Any]:
    """The configuration that operators get, but faster."""
    config: dict[str, Any] = yaml.safe_load(prometheus_config([f"127.0.0.1:{router.metrics_port}"]))
    interval = f"{round(scrape_s * 1000)}ms"
    config["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    config["scrape_configs"][0]["http_sd_configs"][0]["refresh_interval"] = "1s"
    config["rule_files"] = [str(RULES)]
    return config


async def _load(client: Client, phase: Phase, is_enough: Callable[[], bool] = lambda: True) -> None:
    """Clients ask until the time is over and, asked in a thread, it is enough."""
    random = Random(1)
    prefixes = [_text(random, _SHARED_TOKENS) for _ in range(phase.prefixes)]
    is_over = asyncio.Event()

    async def ask() -> None:
        while not is_over.is_set():
            prompt = random.choice(prefixes) + _text(random, _OWN_TOKENS)
            await client.complete(prompt, max_new_tokens=_ANSWER_TOKENS, ignore_eos=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(phase.clients):
            group.create_task(ask())
        await asyncio.sleep(phase.seconds)
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(is_enough):  # noqa: ASYNC110  only asking tells
                await asyncio.sleep(_POLL_S)
        is_over.set()


def _text(random: Random, tokens: int) -> str:
    return "".join(random.choices(_LETTERS, k=tokens))


def _scraped_enough(prometheus: Prometheus, at_s: float) -> bool:
    """Whether all three targets were scraped at least eight times, and what the load is for was seen to happen.

    And that the last scrape did not fail, as one does on a slow machine: what it should have brought is missing then.
    """
    scrapes = prometheus.query('count_over_time(up{job="radixfleet"}[5m])', at_s)
    up = prometheus.query('up{job="radixfleet"} == 1', at_s)
    recorded = [rule["record"] for group in _rule_groups() for rule in group["rules"] if "record" in rule]
    return (
        (len(scrapes), len(up)) == (3, 3)
        and min(scrapes) >= 8
        and all(prometheus.query(expr, at_s) for expr in (*_HAPPENED, *recorded))
    )


def _rule_groups() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return groups
