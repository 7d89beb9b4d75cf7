"""A small fleet under load, scraped by a real Prometheus: a router, two simulated workers, clients.

Two workers with small KV pools and few places serve more clients than they have places for, so that all that a board
shows happens: hits and misses, spills, evictions, requests that wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
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
from worker.runner.sim import CostModel

RULES = Path(deploy.monitoring.__file__).parent / "files" / "rules" / "radixfleet.yml"
SCRAPE_S = 0.5
_GROUPS, _SHARED_TOKENS, _OWN_TOKENS, _ANSWER_TOKENS = 6, 512, 100, 12
_LETTERS = "abcdefghijklmnopqrstuvwxyz "
_CLIENTS = 12
_COST = CostModel(step_s=5e-4, prefill_token_s=2e-6, decode_token_s=1e-5)


@dataclass(frozen=True, slots=True)
class Recording:
    """What Prometheus saw; the fleet itself may be gone."""

    prometheus: Prometheus
    began_s: float
    """Unix time."""
    ended_s: float

    def values(self, expr: str) -> list[float]:
        """Of an expression with a board's variables, at the end of the load."""
        return self.prometheus.query(substituted(expr), self.ended_s)


def substituted(expr: str, *, interval: str = "4s") -> str:
    """An expression as Grafana sends it, with "All" chosen everywhere."""
    for name in ("$model", "$worker", "$router"):
        expr = expr.replace(f'"{name}"', '".*"')
    return expr.replace("$__rate_interval", interval)


@contextmanager
def recorded(seconds: float) -> Iterator[Recording]:
    """Load a fleet for so long, at least until a request has waited in the router; then it may be asked about."""
    with _recorded_by(asyncio.Runner(), seconds) as recording:
        yield recording


@contextmanager
def _recorded_by(runner: asyncio.Runner, seconds: float) -> Iterator[Recording]:
    with runner:
        fleet = _fleet()
        router = runner.run(fleet.__aenter__())
        try:
            with running_prometheus(_config(router)) as prometheus:
                began_s = time.time()
                runner.run(_load(router, prometheus, seconds))
                ended_s = time.time()
                runner.run(fleet.__aexit__(None, None, None))
                fleet = None
                yield Recording(prometheus, began_s, ended_s)
        finally:
            if fleet is not None:
                runner.run(fleet.__aexit__(None, None, None))


@asynccontextmanager
async def _fleet() -> AsyncIterator[Router]:
    runners = [sim_runner(kv_tokens=3072, max_running_requests=4, cost=_COST) for _ in range(2)]
    async with (
        sim_worker(runners[0], worker_id="worker-0") as first,
        sim_worker(runners[1], worker_id="worker-1") as second,
        running_router(settings(workers=(first.address, second.address)), random=Random(1)) as router,
    ):
        await until(lambda: sum(not state.ineligible_reason for state in router.registry.workers) == 2)
        yield router


def _config(router: Router) -> dict[str, Any]:
    """The configuration that operators get, but faster."""
    config: dict[str, Any] = yaml.safe_load(prometheus_config([f"127.0.0.1:{router.metrics_port}"]))
    interval = f"{round(SCRAPE_S * 1000)}ms"
    config["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    config["scrape_configs"][0]["http_sd_configs"][0]["refresh_interval"] = "1s"
    config["rule_files"] = [str(RULES)]
    return config


async def _load(router: Router, prometheus: Prometheus, seconds: float) -> None:
    """Clients ask one after another, until the time is over and every target was scraped often enough for a rate."""
    random = Random(1)
    prefixes = [_text(random, _SHARED_TOKENS) for _ in range(_GROUPS)]
    is_over = asyncio.Event()

    async def ask(client: Client) -> None:
        while not is_over.is_set():
            prompt = random.choice(prefixes) + _text(random, _OWN_TOKENS)
            await client.complete(prompt, max_new_tokens=_ANSWER_TOKENS, ignore_eos=True)

    async with Client(router.address, timeout_s=60) as client, asyncio.TaskGroup() as group:
        for _ in range(_CLIENTS):
            group.create_task(ask(client))
        await asyncio.sleep(seconds)
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(_scraped_enough, prometheus):  # noqa: ASYNC110  only asking tells
                await asyncio.sleep(SCRAPE_S)
        is_over.set()


def _text(random: Random, tokens: int) -> str:
    return "".join(random.choices(_LETTERS, k=tokens))


def _scraped_enough(prometheus: Prometheus) -> bool:
    """Whether all three targets were scraped at least eight times, and rules evaluated since."""
    scrapes = prometheus.query('count_over_time(up{job="radixfleet"}[5m])')
    return len(scrapes) == 3 and min(scrapes) >= 8 and bool(prometheus.query("radixfleet:hit_rate:ratio5m"))
