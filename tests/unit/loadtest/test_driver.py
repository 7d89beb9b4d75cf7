"""The driver: open loop, one outcome a request, times from when a request was due."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from loadtest.callers import GrpcCaller
from loadtest.driver import Driver, Progress, unfit
from loadtest.statistics import Objective, summarize
from loadtest.tokens import Run, TokenSource
from loadtest.workloads import Arrival
from radixfleet.client import Client
from radixfleet.errors import Overloaded
from radixfleet.retry import RetryPolicy
from radixfleet.v1 import inference_pb2
from tests.support.fake_inference import FakeInference, Silence, delta, finished, serving, started

SOURCE = TokenSource(vocab_size=1000, seed=0)
ROUTE = inference_pb2.RouteDecision(
    policy="p", reason="prefix", predicted_cached_tokens=6, retries=1, reachable_cached_tokens=7
)
USAGE = inference_pb2.Usage(completion_tokens=3, queue_s=0.25)


def arrival(at_s: float = 0.0, prompt: int = 10, answer: int = 3) -> Arrival:
    return Arrival(at_s, (Run(1, prompt),), answer, 2, SOURCE)


@asynccontextmanager
async def driver(*scripts, on_progress=lambda progress: None, workers=("v", "w")):
    fake = FakeInference(scripts)
    async with serving(fake) as address, Client(address, retry=RetryPolicy(retries=0)) as client:
        yield fake, Driver(GrpcCaller(client), workers, on_progress=on_progress)


async def test_an_outcome_holds_what_the_stream_said():
    script = (started(prompt_tokens=10, cached_tokens=5, route=ROUTE), delta(1), delta(2, 3), finished(usage=USAGE))
    async with driver(script) as (fake, drive):
        driven = await drive.drive("p", [arrival()])
    (outcome,) = driven.result.outcomes
    assert (outcome.worker, outcome.reason, outcome.tries) == (1, "prefix", 2)
    assert (outcome.reachable_tokens, outcome.predicted_tokens, outcome.cached_tokens) == (7, 6, 5)
    assert (outcome.output_tokens, outcome.started_s, outcome.error) == (3, 0.25, "")
    assert 0 < outcome.first_token_s <= outcome.ended_s <= driven.result.duration_s
    assert driven.result.gap_tokens.tolist() == [2]
    request = fake.requests[0]
    assert request.sampling.max_new_tokens == 3
    assert request.sampling.ignore_eos
    assert request.prompt.token_ids.packed == SOURCE.tokens((Run(1, 10),)).tobytes()


async def test_a_silent_request_holds_up_no_other():
    seen: list[Progress] = []
    done = asyncio.Event()

    def on_progress(progress: Progress) -> None:
        seen.append(progress)
        if progress.ended == 2:
            done.set()

    answer = (started(), delta(1), finished(usage=USAGE))
    async with driver((started(), Silence()), answer, on_progress=on_progress) as (fake, drive):
        running = asyncio.create_task(drive.drive("p", [arrival(), arrival(0.01), arrival(0.02)]))
        await done.wait()
        assert seen[-1].sent == 3
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await fake.ended.wait()


async def test_a_run_that_is_stopped_gives_what_had_ended():
    def on_progress(progress: Progress) -> None:
        if progress.ended == 1:
            drive.stop()

    answer = (started(), delta(1), finished(usage=USAGE))
    async with driver((started(), Silence()), answer, on_progress=on_progress) as (fake, drive):
        driven = await drive.drive("p", [arrival(), arrival(0.01), arrival(3600.0)])
        await fake.ended.wait()
    (outcome,) = driven.result.outcomes
    assert (outcome.arrived_s, outcome.is_complete, driven.num_cut) == (0.01, True, 1)


async def test_refusals_are_results_and_are_not_tried_again():
    async with driver((Overloaded("full", retry_after_s=0.01),)) as (fake, drive):
        driven = await drive.drive("p", [arrival(), arrival()])
    assert [outcome.error for outcome in driven.result.outcomes] == ["RESOURCE_EXHAUSTED: full"] * 2
    assert [outcome.output_tokens for outcome in driven.result.outcomes] == [0, 0]
    assert len(fake.requests) == 2
    summary = summarize(driven.result, Objective())
    assert (summary.failed, summary.requests, summary.busy_share) == (2, 2, None)


async def test_times_count_from_when_a_request_was_due():
    answer = (started(), delta(1), finished(usage=USAGE))
    async with driver(answer) as (_, drive):
        driven = await drive.drive("p", [arrival(0.05)])
    (outcome,) = driven.result.outcomes
    assert outcome.arrived_s == 0.05
    assert outcome.first_token_s > 0.05
    assert driven.late_s >= 0


async def test_workers_that_nobody_named_are_counted_too():
    answer = (started(), delta(1), finished(usage=USAGE))
    async with driver(answer, workers=()) as (_, drive):
        driven = await drive.drive("p", [arrival(), arrival()])
    assert driven.result.num_workers == 1
    assert summarize(driven.result, Objective()).request_shares == (1.0,)


def test_what_a_context_cannot_hold_is_counted():
    assert unfit([arrival(prompt=10, answer=3), arrival(prompt=11, answer=3)], 13) == 1
