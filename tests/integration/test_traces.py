"""One trace from the client through the router to the steps of the worker's engine, over real gRPC."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from radixfleet.client import Client
from radixfleet.errors import Unavailable
from radixfleet.tracing import headers
from router.app import Router, running_router
from tests.support.fake_worker import Script
from tests.support.router_fixture import fake_worker, running_fleet, settings
from tests.support.spans import client_span
from tests.support.waiting import until
from tests.support.worker_fixture import sim_runner, sim_worker
from worker.runner.sim import CostModel

CHUNK_TOKENS = 128


@asynccontextmanager
async def fleet(*, link: bool = True) -> AsyncIterator[tuple[Client, Router]]:
    runner = sim_runner(chunked_prefill_size=CHUNK_TOKENS, max_running_requests=1, cost=CostModel(step_s=2e-3))
    async with (
        sim_worker(runner) as worker,
        running_router(settings(workers=(worker.address,), link=link)) as router,
        Client(router.address, timeout_s=60) as client,
    ):
        await until(lambda: any(not state.ineligible_reason for state in router.registry.workers))
        yield client, router


def within(child: ReadableSpan, parent: ReadableSpan) -> bool:
    """In time. Each process looks at its two clocks once a trace, and a busy machine may stop it between the looks."""
    slack_ns = 100_000_000 if (parent.name, child.name) == ("forward", "Generate") else 1_000
    return parent.start_time - slack_ns <= child.start_time <= child.end_time <= parent.end_time + slack_ns


@pytest.mark.parametrize("link", [True, False], ids=["link", "calls"])
async def test_a_trace_goes_from_the_client_to_the_chunks_of_the_prompt(link: bool) -> None:
    async with fleet(link=link) as (client, _):
        with client_span() as traced:
            done = await client.complete(list(range(250)) * 2, max_new_tokens=5, ignore_eos=True, request_id="mine")
        await until(lambda: len([span for span in traced.spans if span.name == "Generate"]) == 2)
    router, worker = [span for span in traced.spans if span.name == "Generate"]
    assert router.parent.span_id == traced.context.span_id
    assert [span.name for span in traced.below(router)] == ["prepare", "route", "forward"]
    forward = traced.one("forward")
    assert forward.kind is SpanKind.CLIENT
    assert traced.below(forward) == [worker]
    assert [span.name for span in traced.below(worker)] == ["queue", "prefill", "decode"]
    chunks = traced.below(traced.one("prefill"))
    assert [(span.attributes["start"], span.attributes["tokens"]) for span in chunks] == [
        (0, 128),
        (128, 128),
        (256, 128),
        (384, 116),
    ]
    assert all(span.name == "prefill chunk" and span.end_time - span.start_time >= 1_900_000 for span in chunks)
    for parent in (router, forward, worker, traced.one("prefill")):
        assert all(within(child, parent) for child in traced.below(parent))
    assert [event.name for event in router.events] == ["first token"]
    assert [event.name for event in worker.events] == ["first token"]
    for span in (router, worker):
        assert span.attributes["radixfleet.request_id"] == "mine"
        assert span.attributes["gen_ai.usage.input_tokens"] == 500
        assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert worker.attributes["radixfleet.execution_id"] == done.started.execution_id
    assert traced.one("route").attributes["radixfleet.reason"] == "only"


async def test_a_request_that_waits_in_the_router_has_its_wait_in_the_trace() -> None:
    async with fleet() as (client, router):
        first = client.generate([5] * 300, max_new_tokens=50_000, ignore_eos=True)
        await anext(first)  # it runs, and has the only place
        with client_span() as traced:
            waiting = asyncio.create_task(client.complete([7] * 10, max_new_tokens=2, ignore_eos=True))
            await until(lambda: router.gate.num_waiting)
            await first.aclose()
            await waiting
        await until(lambda: len([span for span in traced.spans if span.name == "Generate"]) == 2)
    route = traced.one("route")
    (queue,) = traced.below(route)
    assert queue.name == "queue"
    assert within(queue, route)


async def test_a_worker_that_is_lost_is_an_error_in_the_trace_and_the_next_try_a_span_beside_it() -> None:
    workers = [fake_worker("w0", script=lambda _: Script(error=Unavailable("lost"))), fake_worker("w1")]
    async with running_fleet(workers, policy="round_robin") as running:
        with client_span() as traced:
            for _ in range(2):
                await running.client.complete("hello", max_new_tokens=2)
    routers = [
        span for span in traced.spans if span.name == "Generate" and span.parent.span_id == traced.context.span_id
    ]
    assert len(routers) == 2
    retried, *_ = [span for span in routers if span.attributes["radixfleet.retries"] == 1]
    assert [span.name for span in traced.below(retried)] == ["prepare", "route", "forward", "route", "forward"]
    failed, good = [span for span in traced.below(retried) if span.name == "forward"]
    assert failed.status.status_code is StatusCode.ERROR
    assert good.status.status_code is StatusCode.UNSET
    assert retried.status.status_code is StatusCode.UNSET


async def test_a_request_that_fails_is_an_error_in_the_trace() -> None:
    async with running_fleet(1) as running:
        running.workers[0].script = lambda _: Script(error=Unavailable("no"))
        with client_span() as traced, pytest.raises(Unavailable):
            await running.client.complete("hello", max_new_tokens=2)
        await until(lambda: [span for span in traced.spans if span.name == "Generate"])
    assert traced.one("Generate").status.status_code is StatusCode.ERROR


async def test_what_a_client_does_not_sample_is_not_recorded_anywhere() -> None:
    async with fleet() as (client, _):
        with client_span(sampled=False) as traced:
            await client.complete("hello", max_new_tokens=2, ignore_eos=True)
        await client.complete("hello", max_new_tokens=2, ignore_eos=True)
    assert traced.spans == []


async def test_the_trace_of_a_client_that_speaks_http_goes_on_as_well() -> None:
    async with running_fleet(1, http_port=0) as running:
        with client_span() as traced:
            body = json.dumps({"model": running.workers[0].model, "prompt": "hello", "max_tokens": 2}).encode()
            url = f"http://127.0.0.1:{running.router.http_port}/v1/completions"
            asked = urllib.request.Request(url, body, {"content-type": "application/json", **headers()})
            answer = await asyncio.to_thread(urllib.request.urlopen, asked, timeout=60)
            answer.close()
        await until(lambda: [span for span in traced.spans if span.name == "Generate"])
    generate = traced.one("Generate")
    assert generate.parent.span_id == traced.context.span_id
    assert [span.name for span in traced.below(generate)] == ["prepare", "route", "forward"]
