"""An engine process that is killed while its worker lives: what clients hear of it, and what the router makes of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from radixfleet.client import Client
from radixfleet.errors import Unavailable
from router.app import Router, running_router
from router.workers.breaker import BreakerState
from tests.support.byte_tokenizer import END_ID
from tests.support.router_fixture import NO_RETRY, settings
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.engine.config import EngineConfig
from worker.engine.process import ProcessEngine
from worker.runner.sim import CostModel, SimRunnerConfig

RUNNER = SimRunnerConfig(
    vocab_size=END_ID + 1, kv_tokens=65_536, max_context_tokens=65_536, cost=CostModel(step_s=0.01)
)
LONG: dict[str, Any] = {"max_new_tokens": 60_000, "ignore_eos": True, "temperature": 0.0}
START_S = 60.0


@dataclass(frozen=True, slots=True)
class _Fleet:
    router: Router
    client: Client
    engine: ProcessEngine

    async def until_serving(self) -> None:
        await until(
            lambda: not self.router.registry.workers[0].ineligible_reason, "the worker serves", timeout_s=START_S
        )

    async def kill_engine(self) -> None:
        """While it computes an answer of which the client has the beginning."""
        started = asyncio.Event()
        running = asyncio.create_task(self.client.complete("hello", on_text=lambda _: started.set(), **LONG))
        await asyncio.wait_for(started.wait(), START_S)
        os.kill(self.engine.child_pids[0], signal.SIGKILL)
        await running


@asynccontextmanager
async def fleet(*, max_restarts: int) -> AsyncIterator[_Fleet]:
    """A router and one worker with an engine and a runner of their own."""
    engine = ProcessEngine(
        EngineConfig(runner=RUNNER, restart_backoff_s=0.05, max_restarts=max_restarts, log_level="critical")
    )
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(sim_worker(engine=engine, serving=False))
        router = await stack.enter_async_context(running_router(settings(workers=(worker.address,))))
        client = await stack.enter_async_context(Client(router.address, retry=NO_RETRY))
        made = _Fleet(router, client, engine)
        await made.until_serving()
        yield made
        await until(lambda: not router.log.in_flight, "no request in flight")
        assert router.registry.workers[0].books.own_requests == 0


async def test_clients_hear_that_the_engine_died_and_is_started_again() -> None:
    """Behaviours 53 and 60: not that the worker was lost, which is there; it serves again, and no breaker opened."""
    async with fleet(max_restarts=5) as made:
        with pytest.raises(Unavailable, match=r"worker worker-0 stopped after \d+ tokens?: .*not complete") as caught:
            await made.kill_engine()
        assert "the engine died, and is being started again" in str(caught.value)
        assert "lost" not in str(caught.value)
        assert caught.value.retry_after_s is not None
        assert int(caught.value.metadata["delivered_tokens"]) > 0
        assert made.router.registry.workers[0].breaker.state is BreakerState.CLOSED
        await made.until_serving()
        assert len((await made.client.complete("hello", **(LONG | {"max_new_tokens": 4}))).token_ids) == 4


async def test_clients_hear_that_it_is_not_started_again() -> None:
    async with fleet(max_restarts=0) as made:
        with pytest.raises(Unavailable, match="the engine died, and is not started again; send the request to another"):
            await made.kill_engine()
        await until(lambda: made.router.registry.workers[0].ineligible_reason == "failed", "the router knows")
        with pytest.raises(
            Unavailable, match=r"worker-0: failed\); an engine that died or hangs is started"
        ) as refused:
            await made.client.complete("hello")
        assert refused.value.retry_after_s is not None
