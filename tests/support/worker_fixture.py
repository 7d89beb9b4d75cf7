"""A whole worker in this process, on a port that the system picks: real gRPC, real scheduler and cache, inline engine.

    async with sim_worker() as worker, open_channel(worker.address) as channel: ...

The simulated runner takes no time and invents tokens that depend on prompt, parameters and seed alone. Leaving the
block checks that nothing is left over: no running request, no KV in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from radixfleet.clock import MonotonicClock
from tests.support.byte_tokenizer import END_ID, byte_spec
from tests.support.waiting import until
from worker.app import Worker, make_engine, running_worker
from worker.config import WorkerSettings
from worker.engine.handle import EngineHandle
from worker.engine.inline import InlineEngine
from worker.model.tokenizer_files import load_tokenizer_spec
from worker.runner.protocol import Runner
from worker.runner.sim import SimRunner, SimRunnerConfig


def sim_runner(*, kv_tokens: int = 65_536, **config: Any) -> SimRunner:
    """A simulated runner that checks every plan. `config`: fields of SimRunnerConfig."""
    defaults = {
        "vocab_size": END_ID + 1,
        "kv_tokens": kv_tokens,
        "page_size": 16,
        "max_running_requests": 32,
        "chunked_prefill_size": 512,
        "max_context_tokens": kv_tokens,
        "cost": None,
        "verify": True,
    }
    return SimRunner(SimRunnerConfig(**(defaults | config)), MonotonicClock())


@asynccontextmanager
async def sim_worker(
    runner: Runner | None = None, *, engine: EngineHandle | None = None, serving: bool = True, **settings: Any
) -> AsyncIterator[Worker]:
    """A worker with the byte vocabulary; `settings` are fields of WorkerSettings.

    `serving`: wait until it serves before the block is entered, and check at its end that nothing is left over.
    """
    values = {"model": "sim-model", "runner": "sim", "port": 0, "metrics_port": 0, "worker_id": "worker-0"} | settings
    engine = engine or InlineEngine(runner or sim_runner())
    async with running_worker(WorkerSettings(**values), byte_spec(), engine) as worker:
        if serving:
            await engine.ready()
        yield worker
        if serving:
            await at_rest(worker)


@asynccontextmanager
async def torch_worker(model: Path, **settings: Any) -> AsyncIterator[Worker]:
    """A worker that computes the model of a directory, inline, in float32."""
    values = {"model": str(model), "port": 0, "metrics_port": 0, "inline": True, "device": "cpu", "dtype": "float32"}
    worker_settings = WorkerSettings(**(values | {"device_memory": "64MiB", "threads": 1} | settings))
    spec = load_tokenizer_spec(model)
    engine = make_engine(worker_settings, model, spec)
    async with running_worker(worker_settings, spec, engine) as worker:
        await engine.ready()
        yield worker
        await at_rest(worker)


async def at_rest(worker: Worker) -> None:
    """Wait until nothing runs and no KV is in use; fails when that does not come to be. Empties the cache."""
    await until(lambda: not len(worker.requests) and not worker.engine.num_open)
    async with asyncio.timeout(60):
        while (await worker.engine.flush()).kept_tokens:  # noqa: ASYNC110  only asking tells
            await asyncio.sleep(0.002)
