"""`Fleet.Route` and `Fleet.RouteStream` give the same answers and the same errors, to the last detail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from radixfleet import convert
from radixfleet.v1 import fleet_pb2, inference_pb2
from tests.support.fake_worker import FakeWorker, Script
from tests.support.look_aside import FORMS, both_forms, ids_request, outcome, text_request
from tests.support.router_fixture import Fleet, fake_worker, running_fleet
from tests.support.waiting import until

Request = inference_pb2.GenerateRequest
CHAT = inference_pb2.Prompt(chat={"messages": [{"role": "user", "content": "hello " * 30}]})
VALID = {
    "ids": ids_request(200),
    "packed": Request(prompt={"token_ids": convert.pack_tokens(np.arange(200, dtype=np.uint32))}),
    "many": Request(prompt={"token_ids": convert.pack_tokens(np.arange(40_000, dtype=np.uint32) % 250)}),
    "text": text_request("x" * 300),
    "chat": Request(prompt=CHAT),
    "of a model": text_request("hello", model="fake-model"),
    "with the beginning of its answer": ids_request(100, generated={"ids": [1, 2, 3]}),
}
WRONG = {
    "no prompt": Request(),
    "an empty prompt": ids_request(0),
    "both forms of ids": Request(prompt={"token_ids": {"ids": [1], "packed": b"1234"}}),
    "packed ids that end in the middle of one": Request(prompt={"token_ids": {"packed": b"12345"}}),
    "an id that the model does not have": Request(prompt={"token_ids": {"ids": [1, 100_000]}}),
    "an empty chat": Request(prompt={"chat": {}}),
    "a temperature below zero": ids_request(sampling={"temperature": -1.0}),
    "a stop string that is too long": ids_request(sampling={"stop": ["x" * 5000]}),
    "a seed that is missing": ids_request(resume=True, sampling={"temperature": 1.0}),
    "a model that nobody serves": ids_request(model="other"),
    "a name that is too long": ids_request(request_id="é" * 600),
}


def comparable(answer: fleet_pb2.RouteResponse | status_pb2.Status) -> dict[str, Any]:
    """What must be the same in both forms: the lease's id is not."""
    if isinstance(answer, status_pb2.Status):
        return {"code": answer.code, "message": answer.message, "details": [bytes(d.value) for d in answer.details]}
    assert len(answer.lease_id) == 24
    assert answer.lease_s == 10.0
    return {"worker": answer.worker_id, "decision": answer.decision}


@pytest.mark.parametrize("name", VALID)
async def test_what_is_valid_is_routed_alike(name: str) -> None:
    found = {}
    for form in FORMS:
        async with running_fleet(1) as fleet:
            answer = await outcome(fleet.router.address, form, VALID[name])
            assert isinstance(answer, fleet_pb2.RouteResponse), answer
            found[form] = comparable(answer)
            (lease,) = fleet.router.look_aside._held.values()
            assert lease.lease.request.look_aside
            if form == "call" or not VALID[name].prompt.HasField("token_ids") or VALID[name].HasField("generated"):
                told = convert.unpack_tokens(answer.token_ids)
                assert told.tolist() == lease.lease.request.tokens.tolist()
            else:
                assert not answer.HasField("token_ids"), "the client has them"
            fleet.router.look_aside.close()
    assert found["call"] == found["stream"]


async def test_what_is_wrong_is_refused_alike() -> None:
    async with running_fleet(1) as fleet:
        for name, request in WRONG.items():
            by_call, by_stream = [await outcome(fleet.router.address, form, request) for form in FORMS]
            assert isinstance(by_call, status_pb2.Status), name
            assert comparable(by_call) == comparable(by_stream), name
        assert fleet.state(0).books.own_requests == 0


@both_forms
async def test_a_prompt_that_no_worker_can_take_gets_no_lease(form: str) -> None:
    async with running_fleet([fake_worker(max_context_tokens=512)]) as fleet:
        refused = await outcome(fleet.router.address, form, ids_request(600))
        assert isinstance(refused, status_pb2.Status)
        assert "the prompt has 600 tokens; at most 511 are taken here" in refused.message
        assert len(fleet.router.look_aside) == 0
        assert fleet.state(0).books.own_requests == 0


@both_forms
async def test_a_client_cannot_make_the_router_use_what_it_says_of_leases(form: str) -> None:
    async with running_fleet(1) as fleet:
        answer = await outcome(fleet.router.address, form, ids_request(lease_id="mine"))
        assert isinstance(answer, fleet_pb2.RouteResponse)
        assert answer.lease_id != "mine"
        fleet.router.look_aside.close()


async def test_without_a_worker_both_say_when_to_come_again() -> None:
    worker = fake_worker()
    async with running_fleet([worker]) as fleet:
        await worker.kill()
        await until(lambda: not fleet.eligible())
        answers = [await outcome(fleet.router.address, form, ids_request()) for form in FORMS]
    assert comparable(answers[0]) == comparable(answers[1])
    assert retry_s(answers[0]) == 1.0


@asynccontextmanager
async def full_fleet(**settings: Any) -> AsyncIterator[tuple[Fleet, FakeWorker]]:
    """One worker, whose one place is taken for as long as the block lasts."""
    gate = asyncio.Event()
    worker = fake_worker(script=lambda _: Script(before_finish=gate))
    worker.capacity = replace(worker.capacity, max_running_requests=1)
    async with running_fleet([worker], **settings) as fleet:
        running = asyncio.create_task(fleet.client.complete("first"))
        await until(lambda: worker.calls)
        yield fleet, worker
        gate.set()
        await running


async def test_a_full_queue_refuses_both_alike() -> None:
    async with full_fleet(max_queued_requests=1) as (fleet, worker):
        waiting = asyncio.create_task(fleet.client.route("waits"))
        await until(lambda: fleet.metric("queued_requests") == 1)
        answers = [await outcome(fleet.router.address, form, ids_request()) for form in FORMS]
        assert comparable(answers[0]) == comparable(answers[1])
        assert retry_s(answers[0]) is not None
        assert fleet.metric("queue_refusals_total", cause="full") == 2
        waiting.cancel()
        await until(lambda: fleet.metric("queued_requests") == 0)
        assert worker.running == 1


async def test_a_limit_of_requests_a_second_counts_both_alike() -> None:
    """A client's requests on a stream are counted one by one, and its streams are not."""
    async with running_fleet(1, max_client_requests_per_s=0.02) as fleet:
        first = await outcome(fleet.router.address, "stream", ids_request())
        assert isinstance(first, fleet_pb2.RouteResponse)
        for form in FORMS:
            refused = await outcome(fleet.router.address, form, ids_request())
            assert isinstance(refused, status_pb2.Status)
            assert "may send 0.02 requests a second" in refused.message
            wait_s = retry_s(refused)
            assert wait_s is not None
            assert 10 < wait_s <= 50
        assert fleet.metric("door_refusals_total", cause="resource_exhausted") == 2
        fleet.router.look_aside.close()


def retry_s(answer: fleet_pb2.RouteResponse | status_pb2.Status) -> float | None:
    """RetryInfo of a status."""
    assert isinstance(answer, status_pb2.Status)
    info = error_details_pb2.RetryInfo()
    for detail in answer.details:
        if detail.Unpack(info):
            return info.retry_delay.ToNanoseconds() / 1e9
    return None
