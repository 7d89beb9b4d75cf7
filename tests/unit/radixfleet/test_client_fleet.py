"""What the client makes of a router's and a worker's answers, each field with a value of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest

from radixfleet.accepted import ACCEPTED
from radixfleet.channel import listen, make_server
from radixfleet.client import Client
from radixfleet.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    RadixfleetError,
    Unavailable,
    UnknownWorker,
    Unreachable,
)
from radixfleet.heard import event
from radixfleet.retry import RetryPolicy
from radixfleet.types import FinishReason, WorkerStatus
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, worker_pb2, worker_pb2_grpc

INFO = worker_pb2.WorkerInfo(
    worker_id="w1",
    incarnation=2**64 - 1,
    status=worker_pb2.WORKER_STATUS_DRAINING,
    model=inference_pb2.ModelInfo(model="m", eos_token_ids=[1, 2], vocab_size=9),
    capacity=worker_pb2.Capacity(kv_tokens=2**33, page_size=16),
    memory=worker_pb2.MemoryPools(device="cpu", kv_bytes=7, bounded_by="x"),
    version="0.1.0",
    block_scheme=1,
    block_tokens=64,
)
ENTRY = fleet_pb2.WorkerEntry(
    worker_id="w1",
    address="h:1",
    status=worker_pb2.WORKER_STATUS_SERVING,
    connected=True,
    info=INFO,
    load=worker_pb2.Load(running_requests=3),
    booked_requests=4,
    booked_prompt_tokens=5,
    sketch_blocks=6,
    approximate=True,
    ineligible_reason="why",
)
CANDIDATE = fleet_pb2.Candidate(
    worker_id="w1",
    address="h:1",
    eligible=True,
    ineligible_reason="",
    matched_blocks=1,
    matched_tokens=64,
    uncached_tokens=2,
    outstanding_prompt_tokens=3,
    running_requests=4,
    cost=0.5,
    approximate=True,
)
DECISION = inference_pb2.RouteDecision(
    policy="p", reason="r", predicted_cached_tokens=64, retries=1, reachable_cached_tokens=65
)

ROUTED = fleet_pb2.RouteResponse(
    worker_id="w1", address="h:1", lease_id="l", token_ids={"ids": [1, 2]}, decision=DECISION, lease_s=2.5
)


class FakeFleet(fleet_pb2_grpc.FleetServicer, worker_pb2_grpc.WorkerServicer):
    """Answers with the messages above and remembers what it was asked."""

    def __init__(self, *, knows_streams: bool = True) -> None:
        self.requests: list[object] = []
        self.knows_streams = knows_streams
        self.last_word: RadixfleetError | None = Unavailable("the router stops: watch another one", retry_after_s=1.0)
        """Of a watched fleet. None: it ends without."""
        self.num_breaks = 0
        """So many watches break off, without a word of the server's."""
        self.watches: list[asyncio.Event] | None = None
        """Not None: each watch says one thing, and nothing more until its event."""

    async def Route(self, request, context):
        self.requests.append(request)
        return ROUTED

    async def RouteStream(self, request_iterator, context):
        if not self.knows_streams:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        await context.send_initial_metadata(ACCEPTED)
        async for message in request_iterator:
            for ask in message.asks:
                self.requests.append(ask)
                answer = fleet_pb2.RouteAnswer(number=ask.number, route=ROUTED)
                answer.route.ClearField("token_ids")  # the client has them
                yield fleet_pb2.RouteStreamResponse(answers=[answer])

    async def Explain(self, request, context):
        self.requests.append(request)
        return fleet_pb2.ExplainResponse(
            policy="p", worker_id="w1", reason="r", prompt_tokens=65, prompt_blocks=1, candidates=[CANDIDATE]
        )

    async def ListWorkers(self, request, context):
        return fleet_pb2.ListWorkersResponse(workers=[ENTRY, fleet_pb2.WorkerEntry(address="h:2")])

    async def WatchFleet(self, request, context):
        other = fleet_pb2.WorkerEntry(address="h:2")
        yield fleet_pb2.FleetUpdate(snapshot=True, workers=[ENTRY, other])
        if self.watches is not None:
            self.watches.append(asyncio.Event())
            await self.watches[-1].wait()
        if self.num_breaks:
            self.num_breaks -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)")
        other.connected = True
        yield fleet_pb2.FleetUpdate(workers=[other, fleet_pb2.WorkerEntry(address="h:3")], fleet={"policy": "p"})
        yield fleet_pb2.FleetUpdate(removed=["h:1"])
        yield fleet_pb2.FleetUpdate(snapshot=True, workers=[ENTRY])
        if self.last_word is not None:
            raise self.last_word

    async def Register(self, request, context):
        self.requests.append(request)
        return fleet_pb2.RegisterResponse(added=True)

    async def Drain(self, request, context):
        self.requests.append(request)
        if request.worker_id != "w1":
            raise UnknownWorker(f"no worker {request.worker_id}")
        return worker_pb2.DrainResponse(finished_requests=2, aborted_requests=1)

    async def Remove(self, request, context):
        self.requests.append(request)
        return fleet_pb2.RemoveResponse()

    async def GetInfo(self, request, context):
        return INFO

    async def FlushCache(self, request, context):
        return worker_pb2.FlushCacheResponse(flushed_tokens=128, kept_tokens=64)

    async def Abort(self, request, context):
        return worker_pb2.AbortResponse(found=request.execution_id == "e1")


@asynccontextmanager
async def connected(*, knows_streams: bool = True, timeout_s: float | None = None, retry: RetryPolicy | None = None):
    fleet = FakeFleet(knows_streams=knows_streams)
    server, _ = await make_server(["radixfleet.v1.Fleet", "radixfleet.v1.Worker"])
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    worker_pb2_grpc.add_WorkerServicer_to_server(fleet, server)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    async with Client(f"127.0.0.1:{port}", timeout_s=timeout_s, retry=retry) as client:
        yield client, fleet
    await server.stop(None)


def scalars(value) -> dict[str, object]:
    """The fields of a value that are neither values nor sequences themselves."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {
        name: item
        for name, item in fields.items()
        if isinstance(item, str | int | float) and not isinstance(item, WorkerStatus)
    }


def test_values_have_every_field_of_their_message():
    from radixfleet import answers

    pairs = [
        (answers.WorkerInfo, worker_pb2.WorkerInfo),
        (answers.WorkerEntry, fleet_pb2.WorkerEntry),
        (answers.Candidate, fleet_pb2.Candidate),
        (answers.Explanation, fleet_pb2.ExplainResponse),
        (answers.Route, fleet_pb2.RouteResponse),
        (answers.RouteDecision, inference_pb2.RouteDecision),
        (answers.Started, inference_pb2.Started),
        (answers.Delta, inference_pb2.Delta),
        (answers.Finished, inference_pb2.Finished),
        (answers.PromptLogprobs, inference_pb2.PromptLogprobs),
        (answers.DrainOutcome, worker_pb2.DrainResponse),
    ]
    for kind, message in pairs:
        names = {field.name for field in dataclasses.fields(kind)}
        if kind in (answers.Delta, answers.Finished):
            names.remove("index")  # of the message around them
        assert names == set(message.DESCRIPTOR.fields_by_name), kind


async def test_workers_as_the_router_sees_them():
    async with connected() as (client, _):
        first, second = await client.list_workers()
        info = await client.worker_info()
    assert scalars(first) == {name: getattr(ENTRY, name) for name in scalars(first)}
    assert first.status is WorkerStatus.SERVING
    assert first.load.running_requests == 3
    assert first.info == info
    assert scalars(info) == {name: getattr(INFO, name) for name in scalars(info)}
    assert info.status is WorkerStatus.DRAINING
    assert (info.model.eos_token_ids, info.capacity.kv_tokens, info.memory.bounded_by) == ((1, 2), 2**33, "x")
    assert (second.address, second.connected) == ("h:2", False)


@pytest.mark.parametrize(("is_told", "why"), [(True, "the router stops"), (False, "the router ended the stream")])
async def test_a_watched_fleet_is_put_together_of_its_updates_and_ends_with_an_error(is_told, why):
    reports = []

    async def watch(client):
        async for report in client.watch_fleet():
            reports.append(report)  # noqa: PERF401  an error ends it, and what came before is wanted

    async with connected() as (client, fleet):
        if not is_told:
            fleet.last_word = None
        with pytest.raises(Unavailable, match=why):
            await watch(client)
        [first, _] = await client.list_workers()
    seen = [{worker.address: worker.connected for worker in report.workers} for report in reports]
    assert seen == [
        {"h:1": True, "h:2": False},
        {"h:1": True, "h:2": True, "h:3": False},
        {"h:2": True, "h:3": False},
        {"h:1": True},
    ]
    assert reports[1].fleet.policy == "p"
    assert reports[3].workers == (first,)


async def test_a_watch_goes_on_with_the_router_that_is_there_after_one_was_lost():
    async with connected(retry=RetryPolicy(first_s=0.001)) as (client, fleet):
        fleet.num_breaks = 2
        async with aclosing(client.watch_fleet()) as reports:
            seen = [await anext(reports) for _ in range(4)]
    addresses = [[worker.address for worker in report.workers] for report in seen]
    assert addresses == [["h:1", "h:2"]] * 3 + [["h:1", "h:2", "h:3"]]


async def test_a_router_that_is_lost_for_good_is_named_and_not_asked_for_tls():
    async with connected(retry=RetryPolicy(retries=0)) as (client, fleet):
        fleet.num_breaks = 1
        with pytest.raises(Unreachable, match=r"^the connection to the router at 127.0.0.1:\d+ was lost: ") as caught:
            [report async for report in client.watch_fleet()]
    assert "ocket" not in str(caught.value)


async def test_a_router_that_hangs_is_told_and_not_asked_again(monkeypatch):
    monkeypatch.setattr("radixfleet.watched_fleet.SILENCE_S", 0.2)
    async with connected() as (client, fleet):
        fleet.watches = []
        with pytest.raises(Unavailable, match=r"^the router at 127.0.0.1:\d+ has been silent for 0.2 s"):
            [report async for report in client.watch_fleet()]
        assert len(fleet.watches) <= 1  # none: on a machine that takes longer to begin


async def test_closing_the_client_ends_what_watches():
    async with connected() as (client, fleet):
        fleet.watches = []
        watching = client.watch_fleet()
        await anext(watching)
        await client.close()
        with pytest.raises(Cancelled, match="closed"):
            await anext(watching)


async def test_a_fleet_is_watched_for_longer_than_an_answer_is_awaited():
    async with connected(timeout_s=1e-9) as (client, _):
        with pytest.raises(Unavailable, match="the router stops"):
            [report async for report in client.watch_fleet()]
        with pytest.raises(DeadlineExceeded, match="no answer within the client's timeout"):
            await client.list_workers()


async def test_a_watch_that_was_to_end_says_that_it_did():
    async with connected() as (client, fleet):
        fleet.last_word = DeadlineExceeded("the deadline passed")
        with pytest.raises(DeadlineExceeded, match=r"^the fleet was watched for 60 s, as asked"):
            [report async for report in client.watch_fleet(timeout_s=60)]
        with pytest.raises(DeadlineExceeded, match="no answer within the client's timeout of 1e-09 s"):
            await anext(client.watch_fleet(timeout_s=1e-9))


@pytest.mark.parametrize("knows_streams", [True, False])
async def test_explain_and_route(knows_streams):
    async with connected(knows_streams=knows_streams) as (client, fleet):
        explanation = await client.explain("hi", cache_salt="s")
        route = await client.route([1, 2], max_new_tokens=3)
    assert (explanation.policy, explanation.worker_id, explanation.reason) == ("p", "w1", "r")
    assert (explanation.prompt_tokens, explanation.prompt_blocks) == (65, 1)
    (candidate,) = explanation.candidates
    assert scalars(candidate) == {name: getattr(CANDIDATE, name) for name in scalars(candidate)}
    assert scalars(route) == {"worker_id": "w1", "address": "h:1", "lease_id": "l", "lease_s": 2.5}
    assert route.token_ids.tolist() == [1, 2]
    assert scalars(route.decision) == {name: getattr(DECISION, name) for name in scalars(route.decision)}
    asked, booked = (request.request for request in fleet.requests)
    assert (asked.prompt.text, asked.cache_salt) == ("hi", "s")
    assert booked.sampling.max_new_tokens == 3


async def test_what_an_operator_does():
    async with connected() as (client, fleet):
        assert await client.register("h:3") is True
        drained = await client.drain("w1", grace_s=1.5)
        await client.remove("w1")
        assert await client.flush_cache() == 128
        assert await client.abort("e1") is True
        assert await client.abort("e2") is False
        with pytest.raises(UnknownWorker, match="no worker w9"):
            await client.drain("w9")
    assert (drained.finished_requests, drained.aborted_requests, drained.resumed) == (2, 1, False)
    register, drain, remove, unset = fleet.requests
    assert register.address == "h:3"
    assert (drain.worker_id, drain.grace_s) == ("w1", 1.5)
    assert remove.worker_id == "w1"
    assert not unset.HasField("grace_s")


def test_events_from_the_wire():
    started = event(inference_pb2.GenerateResponse(started={"worker_id": "w", "cached_tokens": 5, "route": DECISION}))
    assert started.route.predicted_cached_tokens == 64
    assert event(inference_pb2.GenerateResponse(started={"worker_id": "w"})).route is None
    by_text = event(inference_pb2.GenerateResponse(finished={"reason": 1, "matched_stop": ""}))
    assert (by_text.reason, by_text.matched_stop, by_text.matched_token_id) == (FinishReason.STOP, "", None)
    by_token = event(inference_pb2.GenerateResponse(finished={"reason": 2, "matched_token_id": 0}))
    assert (by_token.reason, by_token.matched_stop, by_token.matched_token_id) == (FinishReason.LENGTH, None, 0)
    with pytest.raises(InternalError, match="does not know"):
        event(inference_pb2.GenerateResponse())
