"""Requests through a router to fake workers, over real gRPC."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixfleet.answers import Delta, Finished, Started
from radixfleet.channel import open_channel
from radixfleet.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    RadixfleetError,
    Unavailable,
    UnknownModel,
)
from radixfleet.types import ChatMessage
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_worker import Call, Script
from tests.support.router_fixture import fake_worker, running_fleet
from tests.support.waiting import until


async def test_the_worker_gets_tokens_and_the_client_gets_its_replies_with_the_decision() -> None:
    async with running_fleet(1) as fleet:
        events = [
            event
            async for event in fleet.client.generate(
                "x" * 300, request_id="mine", max_new_tokens=7, cache_salt="tenant", priority=3, timeout_s=60.0
            )
        ]
        call = fleet.workers[0].calls[0]
        sent = call.request
        assert sent.prompt.WhichOneof("form") == "token_ids"
        assert np.array_equal(call.tokens, np.frombuffer(b"x" * 300, dtype=np.uint8))
        assert (sent.request_id, sent.model, sent.cache_salt, sent.priority) == ("mine", "fake-model", "tenant", 3)
        assert sent.sampling.max_new_tokens == 7
        assert call.time_remaining_s is not None
        assert 2.0 < call.time_remaining_s < 66.0  # gRPC rounds up
        started = events[0]
        assert isinstance(started, Started)
        assert (started.request_id, started.worker_id, started.prompt_tokens) == ("mine", "w0", 300)
        assert started.route is not None
        assert (started.route.policy, started.route.reason, started.route.retries) == ("min_cost", "only", 0)
        *deltas, finished = events[1:]
        assert sum(len(delta.token_ids) for delta in deltas if isinstance(delta, Delta)) == 4
        assert isinstance(finished, Finished)


async def test_without_a_deadline_the_worker_gets_none() -> None:
    async with running_fleet(1) as fleet, open_channel(fleet.router.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="hello"))
        call = stub.Generate(request)
        kinds = [message.WhichOneof("event") async for message in call]
        assert (kinds[0], set(kinds[1:-1]), kinds[-1]) == ("started", {"delta"}, "finished")
        metadata = dict(await call.initial_metadata())
        assert metadata["radixfleet-execution-id"] == "w0-1"
        assert fleet.workers[0].calls[0].time_remaining_s is None


async def test_all_completions_of_a_request_reach_the_client() -> None:
    """Behaviour 43: each with its index; the one with the usage ends the stream."""
    worker = fake_worker("w0", script=lambda _: Script(tokens=2, others=3))
    async with running_fleet([worker]) as fleet, open_channel(fleet.router.address) as channel:
        sampling = inference_pb2.SamplingParams(n=4)
        request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="hello"), sampling=sampling)
        replies = [reply async for reply in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
        assert worker.calls[0].request.sampling.n == 4
        ends = [reply.index for reply in replies if reply.WhichOneof("event") == "finished"]
        assert ends == [1, 2, 3, 0]
        assert replies[-1].finished.HasField("usage")
        assert sum(len(reply.delta.token_ids) for reply in replies) == 5
        assert worker.count("finished") == 1
        assert fleet.metric("requests_total", outcome="ok") == 1


async def test_the_second_request_goes_where_the_first_left_its_prefix() -> None:
    async with running_fleet(4) as fleet:
        first = await fleet.client.complete("y" * 640)
        for _ in range(5):
            again = await fleet.client.complete("y" * 640 + "more")
            assert again.started.worker_id == first.started.worker_id
            assert again.started.route is not None
            assert again.started.route.reason == "prefix"
            assert again.started.route.predicted_cached_tokens == again.started.cached_tokens == 640
            assert again.started.route.reachable_cached_tokens == 640
        names = ("asked", "reachable", "predicted", "actual")
        counted = [fleet.metric(f"prompt_tokens_{name}_total") for name in names]
        assert counted == [640 + 5 * 644, 5 * 640, 5 * 640, 5 * 640]


async def test_prompts_of_different_salts_share_nothing() -> None:
    async with running_fleet(1) as fleet:
        for salt, cached in (("a", 0), ("b", 0), ("a", 256), ("", 0)):
            done = await fleet.client.complete("z" * 300, cache_salt=salt)
            assert done.started.cached_tokens == cached
            assert done.started.route is not None
            assert done.started.route.predicted_cached_tokens == cached


async def test_chats_and_token_ids_and_text_mean_the_same_tokens() -> None:
    async with running_fleet(1) as fleet:
        text = "user: hi\nassistant: "
        await fleet.client.complete([ChatMessage("user", "hi")])
        await fleet.client.complete(text)
        await fleet.client.complete(list(text.encode()))
        assert len({call.tokens.tobytes() for call in fleet.workers[0].calls}) == 1
        assert (await fleet.client.tokenize([ChatMessage("user", "hi")])).tolist() == list(text.encode())
        assert await fleet.client.detokenize(list(text.encode())) == text


async def test_the_model_is_described_by_its_workers() -> None:
    async with running_fleet(2) as fleet:
        info = await fleet.client.model_info()
        assert info == fleet.workers[0].model_info()
        assert await fleet.client.model_info("fake-model") == info


async def test_an_unknown_model_is_refused_with_the_names_of_those_served() -> None:
    async with running_fleet(1) as fleet:
        with pytest.raises(UnknownModel, match="served are fake-model"):
            await fleet.client.complete("x", model="other")
        assert fleet.metric("requests_total", outcome="not_found") == 1


async def test_among_several_models_one_must_be_named() -> None:
    async with running_fleet([fake_worker("w0", model="a"), fake_worker("w1", model="b")]) as fleet:
        with pytest.raises(InvalidRequest, match="one of a, b") as caught:
            await fleet.client.complete("x")
        assert caught.value.field == "model"
        for model, worker_id in (("a", "w0"), ("b", "w1")):
            for _ in range(4):
                done = await fleet.client.complete("x" * 100, model=model)
                assert done.started.worker_id == worker_id


async def test_workers_of_one_model_with_different_tokenizers_get_their_own_tokens_only() -> None:
    other = byte_spec(chat_template=None)
    workers = [fake_worker("w0"), fake_worker("w1")]
    workers[1].spec = other
    async with running_fleet(workers) as fleet:
        done = [await fleet.client.complete(f"{n}" * 100) for n in range(6)]
        assert len({item.started.worker_id for item in done}) == 1
        entries = {entry.worker_id: entry for entry in (await fleet.client.explain("x" * 100)).candidates}
        assert "another tokenizer" in {entry.ineligible_reason for entry in entries.values()}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"max_new_tokens": 0}, "sampling.max_new_tokens"),
        ({"stop_token_ids": [999]}, "sampling.stop_token_ids"),
        ({"request_id": "x" * 2000}, "request_id"),
    ],
)
async def test_bad_requests_are_refused_before_any_worker_sees_them(options: dict[str, object], field: str) -> None:
    """Behaviour 34: on the router as on a worker, with the field's name."""
    async with running_fleet(1) as fleet:
        request = convert_request(options)
        async with open_channel(fleet.router.address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in (caught.value.details() or "")
        assert fleet.workers[0].calls == []
        assert fleet.metric("requests_total", outcome="invalid_argument") == 1


def convert_request(options: dict[str, object]) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="hello"))
    for name, value in options.items():
        target = request if name == "request_id" else request.sampling
        if isinstance(value, list):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return request


@pytest.mark.parametrize("prompt", ["", [], [257]])
async def test_prompts_without_tokens_or_with_unknown_ones_are_refused(prompt: str | list[int]) -> None:
    """Behaviour 40: an empty prompt is a clear INVALID_ARGUMENT."""
    async with running_fleet(1) as fleet:
        with pytest.raises(InvalidRequest):
            await fleet.client.complete(prompt)
        assert fleet.workers[0].calls == []


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("prompt has 9 tokens, the context 8: shorten it", field="prompt", limit="8"),
        InternalError("a NaN in the logits"),
        Overloaded("the queue is full", retry_after_s=2.5),
    ],
)
async def test_what_a_worker_says_reaches_the_client_unchanged(error: RadixfleetError) -> None:
    worker = fake_worker("w0", script=lambda _: Script(error=error))
    async with running_fleet([worker]) as fleet:
        with pytest.raises(type(error)) as caught:
            await fleet.client.complete("hello")
        assert str(caught.value) == str(error)
        assert caught.value.metadata == error.metadata
        assert caught.value.retry_after_s == error.retry_after_s
        assert fleet.metric("requests_total", outcome=error.code.lower()) == 1


async def test_cancelling_before_the_first_token_stops_the_worker() -> None:
    """Behaviour 6: the client's going away reaches the worker, also while it waits. Behaviour 58: counted apart."""
    worker = fake_worker("w0", script=lambda _: Script(before_first_token=asyncio.Event()))
    async with running_fleet([worker]) as fleet:
        task = asyncio.create_task(fleet.client.complete("hello"))
        await until(lambda: worker.count("started") == 1)
        task.cancel()
        await until(lambda: worker.count("cancelled") == 1)
        await fleet.until_settled()
        assert fleet.metric("requests_total", outcome="cancelled") == 1
        assert sum(fleet.metric("requests_total", outcome=name) for name in ("ok", "internal", "unavailable")) == 0


async def test_cancelling_in_the_middle_stops_the_worker() -> None:
    """Behaviour 6: leaving the loop over the answer is enough."""
    worker = fake_worker("w0", script=lambda _: Script(before_finish=asyncio.Event()))
    async with running_fleet([worker]) as fleet:
        async with aclosing(fleet.client.generate("hello")) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        await until(lambda: worker.count("cancelled") == 1)
        await fleet.until_settled()
        assert fleet.metric("requests_total", outcome="cancelled") == 1


async def test_a_deadline_ends_the_request_everywhere_and_is_no_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dispatch.record._TRAVEL_S", 5.0)  # on a busy machine, requests travel for long
    worker = fake_worker("w0", script=lambda _: Script(before_first_token=asyncio.Event()))
    async with running_fleet([worker]) as fleet:
        with pytest.raises(DeadlineExceeded):
            await fleet.client.complete("hello", timeout_s=1.0)
        await until(lambda: worker.running == 0)
        await fleet.until_settled()
        assert fleet.metric("requests_total", outcome="deadline_exceeded") == 1
        assert fleet.metric("requests_total", outcome="cancelled") == 0


async def test_a_health_check_touches_no_load() -> None:
    """Behaviour 44: probes are answered by the router itself and never reach a counter."""
    async with running_fleet(1) as fleet, open_channel(fleet.router.address) as channel:
        before = (await fleet.client.list_workers())[0]
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "radixfleet.v1.Inference", "radixfleet.v1.Fleet"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        after = (await fleet.client.list_workers())[0]
        assert (after.booked_requests, after.booked_prompt_tokens) == (0, 0)
        assert after.load == before.load
        assert fleet.metric("requests_in_flight") == 0
        assert fleet.workers[0].calls == []


async def test_no_counter_keeps_anything_of_a_mixed_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 44: successes, errors, deadlines and cancellations at once, over real gRPC."""
    monkeypatch.setattr("router.dispatch.record._TRAVEL_S", 5.0)  # on a busy machine, requests travel for long
    hang = asyncio.Event()

    def script(call: Call) -> Script:
        kind = call.request.request_id.split("-")[0]
        scripts = {
            "ok": Script(),
            "refused": Script(error=InvalidRequest("no")),
            "late": Script(error=Unavailable("draining"), error_after=2),
            "busy": Script(error=Overloaded("full")),
            "hang": Script(before_first_token=hang),
            "stuck": Script(before_finish=hang),
            "cut": Script(finish=False),
        }
        return scripts[kind]

    async with running_fleet([fake_worker(f"w{n}", script=script) for n in range(3)]) as fleet:
        await fleet.client.list_workers()  # connects, so that deadlines run from about the same time on both sides
        kinds = ("ok", "refused", "late", "busy", "hang", "stuck", "cut")
        tasks = [
            asyncio.create_task(
                fleet.client.complete(
                    f"{kind}{n % 4}" * 40,
                    request_id=f"{kind}-{n}",
                    timeout_s=4.0 if kind == "hang" else 60.0,
                )
            )
            for n in range(12)
            for kind in kinds
        ]

        def stuck_calls() -> list[Call]:
            calls = (call for worker in fleet.workers for call in worker.calls)
            return [call for call in calls if call.request.request_id.startswith("stuck") and call.tokens_sent == 4]

        await until(lambda: len(stuck_calls()) == 12)
        stuck = [task for task, kind in zip(tasks, kinds * 12, strict=True) if kind == "stuck"]
        for task in stuck:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.until_settled()
        await until(lambda: all(worker.running == 0 for worker in fleet.workers))
        assert sum(not isinstance(result, BaseException) for result in results) == 12
        outcomes = ("ok", "invalid_argument", "unavailable", "resource_exhausted", "deadline_exceeded", "cancelled")
        counted = {name: fleet.metric("requests_total", outcome=name) for name in outcomes}
        assert counted == {
            "ok": 12,
            "invalid_argument": 12,
            "unavailable": 24,
            "resource_exhausted": 12,
            "deadline_exceeded": 12,
            "cancelled": 12,
        }
