"""One scenario on every way of running the engine: the same tokens from all of them, and from each request alone.

The simulated runner's tokens depend on the whole history in a row's KV slots, so a slot, a page or a relayed token that
one of the ways gets wrong changes the tokens; with `verify` it also checks each plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from radixfleet.types import FinishReason
from tests.support.engine_fakes import submit
from tests.support.tiny_model import tiny_model
from worker.core.messages import Report, Submit
from worker.engine.config import EngineConfig
from worker.engine.handle import EngineHandle
from worker.engine.inline import InlineEngine
from worker.engine.process import ProcessEngine
from worker.runner.sim import SimRunnerConfig
from worker.runner.torch_config import TorchRunnerConfig

RUNNER = SimRunnerConfig(
    vocab_size=500,
    kv_tokens=640,
    page_size=4,
    max_running_requests=6,
    chunked_prefill_size=48,
    max_context_tokens=400,
    cost=None,
    verify=True,
)
"""A pool so small that requests wait, are chunked, evict each other's prefixes and are retracted."""

KINDS = {
    "inline-serial": (InlineEngine.from_config, False),
    "inline-overlapped": (InlineEngine.from_config, True),
    "process-serial": (ProcessEngine, False),
    "process-overlapped": (ProcessEngine, True),
}


class Outcome(NamedTuple):
    """All of an answer that may not depend on how the engine is run."""

    token_ids: list[int]
    reason: FinishReason
    matched_token_id: int | None


@asynccontextmanager
async def engine_of(kind: str, runner: SimRunnerConfig | TorchRunnerConfig = RUNNER) -> AsyncIterator[EngineHandle]:
    make, overlap = KINDS[kind]
    engine = make(EngineConfig(runner=runner, overlap=overlap, log_level="critical"))
    await engine.start()
    try:
        async with asyncio.timeout(30):
            await engine.ready()
        yield engine
        assert engine.num_open == 0
    finally:
        await engine.stop()


def requests() -> list[Submit]:
    """Short and long, greedy and sampled, with shared prefixes, stop tokens and min_new_tokens.

    The first half ends long before its limits, so the scheduler learns to admit more than can run to theirs; the
    second half then runs to its limits, so that some must be retracted.
    """
    random = np.random.default_rng(7)
    shared = random.integers(0, 500, 60).tolist()
    made = []
    for index in range(40):
        stops_early = index < 20
        own = random.integers(0, 500, int(random.integers(1, 120))).tolist()
        request = submit(
            0,
            (shared if index % 3 else []) + own,
            max_new_tokens=220 if stops_early else int(random.integers(1, 140)),
            stop_token_ids=tuple(range(index, 500, 20)) if stops_early else (),
        )
        temperature = 0.8 if index % 5 == 2 else 0.0
        min_new_tokens = 8 if index % 8 == 1 and stops_early else 0
        made.append(
            msgspec.structs.replace(request, temperature=temperature, seed=index, min_new_tokens=min_new_tokens)
        )
    return made


async def answer(engine: EngineHandle, request: Submit) -> Outcome:
    token_ids: list[int] = []
    async for progress in engine.submit(msgspec.structs.replace(request, uid=engine.next_uid())):
        token_ids += progress.token_ids
        if progress.ended is not None:
            assert progress.ended.reason is not None
            return Outcome(token_ids, progress.ended.reason, progress.ended.matched_token_id)
    raise AssertionError("a stream ended without an end")


async def alone() -> list[Outcome]:
    """Each request on an engine that has nothing else to do and nothing cached."""
    outcomes = []
    async with engine_of("inline-serial") as engine:
        for request in requests():
            outcomes.append(await answer(engine, request))
            await engine.flush()
    return outcomes


@pytest.fixture(scope="module")
def expected() -> list[Outcome]:
    outcomes = asyncio.run(alone())
    assert {outcome.reason for outcome in outcomes} == {FinishReason.LENGTH, FinishReason.STOP}
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
async def test_the_tokens_of_a_request_depend_on_it_alone(kind: str, expected: list[Outcome]) -> None:
    """Behaviours 1, 2, 9 and 23, as far as the way of execution can break them; and 26 for the turn that follows."""
    async with engine_of(kind) as engine:
        outcomes = await asyncio.gather(*(answer(engine, request) for request in requests()))
        assert outcomes == expected
        counters = (await next_report(engine)).counters
        assert counters["cached_tokens"] > 0, "the pool is under pressure, or the comparison means little"
        assert counters["retractions"] > 0
        assert (counters["discarded_tokens"] > 0) == ("overlapped" in kind)

        await engine.flush()
        first = submit(0, [7] * 50, max_new_tokens=30)
        history = [7] * 50 + (await answer(engine, first)).token_ids
        with engine.submit(submit(engine.next_uid(), [*history, 8, 9], max_new_tokens=2)) as stream:
            progress = await anext(stream)
            assert progress.admitted is not None
            # 79 tokens have KV (that of the last is never computed), in pages of 4.
            assert progress.admitted.cached_tokens == 76


async def next_report(engine: EngineHandle) -> Report:
    """A report of now."""
    heard: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
    leave = engine.subscribe(lambda notice: heard.set_result(notice) if isinstance(notice, Report) else None)
    report = await heard
    leave()
    return report


async def test_a_real_model_gives_the_same_tokens_in_a_process_of_its_own() -> None:
    """One request at a time, so that the arithmetic is equal to the bit; with chunks, cache hits and a stop token."""
    runner = TorchRunnerConfig(
        model_path=str(tiny_model()),
        dtype="float32",
        device_memory_bytes=2**28,
        max_total_tokens=1024,
        chunked_prefill_size=32,
        max_running_requests=4,
    )
    random = np.random.default_rng(3)
    prompt = random.integers(3, 500, 70).tolist()
    first = submit(0, prompt, max_new_tokens=40)
    longer = submit(0, [*prompt, 17, 18], max_new_tokens=40)
    answers = {}
    for kind in ("inline-serial", "process-overlapped"):
        async with engine_of(kind, runner) as engine:
            outcomes = [await answer(engine, request) for request in (first, longer)]
            stop = outcomes[0].token_ids[20]
            stopped = await answer(engine, msgspec.structs.replace(first, stop_token_ids=(stop,)))
            assert (await next_report(engine)).counters["cached_tokens"] >= 2 * 64
            answers[kind] = [*outcomes, stopped]
    assert answers["process-overlapped"] == answers["inline-serial"]
    assert [outcome.reason for outcome in answers["inline-serial"]] == ["length", "length", "stop"]
