"""Runs prompts through a real engine: scheduler, cache and runner, without the front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import msgspec

from radixfleet.types import FinishReason
from tests.support.engine_fakes import submit
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.engine.handle import EngineHandle
from worker.engine.inline import InlineEngine
from worker.runner.protocol import Runner


class Generation(NamedTuple):
    """What came of one prompt."""

    token_ids: list[int]
    cached_tokens: int


class LoadedRunner:
    """A runner that is loaded already and outlives the engine: it serves several, one after another.

    An engine's own choice of the chunk, at most what the runner was loaded with, is part of what it is told.
    """

    def __init__(self, runner: Runner, ready: Ready, chunk: int) -> None:
        self._runner = runner
        assert chunk <= ready.capacity.chunked_prefill_size
        capacity = replace(ready.capacity, chunked_prefill_size=chunk)
        self._ready = msgspec.structs.replace(ready, capacity=capacity)

    def load(self) -> Ready:
        return self._ready

    def run(self, plan: StepPlan) -> StepResult:
        return self._runner.run(plan)

    def close(self) -> None:
        """The runner belongs to somebody else."""


@asynccontextmanager
async def inline_engine(runner: Runner, *, overlap: bool) -> AsyncIterator[EngineHandle]:
    """An engine in this process, serving, with an empty cache."""
    engine = InlineEngine(runner, overlap=overlap)
    async with started(engine):
        yield engine


@asynccontextmanager
async def started(engine: EngineHandle) -> AsyncIterator[EngineHandle]:
    """The engine from its start to its end; nothing may be left open."""
    await engine.start()
    try:
        await engine.ready()
        yield engine
        assert engine.num_open == 0
    finally:
        await engine.stop()


async def generate(engine: EngineHandle, prompt: Sequence[int], num_tokens: int) -> Generation:
    """Greedy tokens of one prompt, exactly `num_tokens`."""
    request = submit(engine.next_uid(), list(prompt), max_new_tokens=num_tokens)
    token_ids: list[int] = []
    cached_tokens = -1
    with engine.submit(request) as stream:
        async for progress in stream:
            token_ids += progress.token_ids
            if progress.admitted is not None:
                cached_tokens = progress.admitted.cached_tokens
            if progress.ended is not None:
                assert progress.ended.reason is FinishReason.LENGTH
    assert len(token_ids) == num_tokens
    return Generation(token_ids, cached_tokens)


async def generate_together(
    engine: EngineHandle, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[Generation]:
    """All prompts at once: the engine batches them as it likes."""
    return await asyncio.gather(*(generate(engine, prompt, num_tokens) for prompt in prompts))


async def generate_alone(engine: EngineHandle, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Generation]:
    """One prompt after another: batches of one."""
    return [await generate(engine, prompt, num_tokens) for prompt in prompts]
