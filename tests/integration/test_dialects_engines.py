"""Other engines behind the router: SGLang's and vLLM's gRPC dialects, played by fakes, over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, get_args

import grpc.aio
import numpy as np
import pytest

from radixfleet.answers import Delta, Finished, Started
from radixfleet.compose import generate_request
from radixfleet.convert import pack_tokens
from radixfleet.errors import InvalidRequest, RadixfleetError, Unavailable
from radixfleet.types import FinishReason
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from router.dialects.engine import EngineSpeaker
from router.workers import tokenizers
from tests.support.engine_fleet import behind_router
from tests.support.foreign_engine import Dialect, ForeignEngine, alphabet
from tests.support.leaping_clock import LeapingClock
from tests.support.look_aside import asking_by, both_forms
from tests.support.router_fixture import fake_worker
from tests.support.waiting import until

CONNECT_TIMEOUT_S = 0.5
PROMPT = [(5 * position) % 251 for position in range(200)]


@pytest.fixture(params=get_args(Dialect))
def make(request: pytest.FixtureRequest) -> Callable[..., ForeignEngine]:
    def engine(**fields: Any) -> ForeignEngine:
        return ForeignEngine(request.param, **fields)

    return engine


def text(first: int, count: int) -> str:
    return bytes(alphabet(first, count)).decode()


async def test_a_client_sees_no_difference(make: Callable[..., ForeignEngine]) -> None:
    engine = make()
    async with behind_router(engine) as fleet:
        events = [event async for event in fleet.client.generate("hello", max_new_tokens=6, temperature=0)]
        assert isinstance(events[0], Started)
        assert events[0].worker_id == engine.worker_id
        assert events[0].prompt_tokens == 5
        deltas = [event for event in events if isinstance(event, Delta)]
        assert "".join(delta.text for delta in deltas) == text(5, 6)
        assert [token for delta in deltas for token in delta.token_ids] == alphabet(5, 6)
        last = events[-1]
        assert isinstance(last, Finished)
        assert (last.reason.value, last.usage.completion_tokens if last.usage else 0) == ("length", 6)
        assert engine.calls[0].state == "finished"
        assert engine.aborts == []


async def test_chats_and_models_come_from_the_engines_own_files(make: Callable[..., ForeignEngine]) -> None:
    async with behind_router(make()) as fleet:
        info = await fleet.client.model_info()
        assert (info.model, info.max_context_tokens, info.has_chat_template) == ("fake-model", 4096, True)
        done = await fleet.client.complete([{"role": "user", "content": "hi"}], max_new_tokens=1)
        assert done.started.prompt_tokens == len("user: hi\nassistant: ")


async def test_completions_logprobs_and_stops(make: Callable[..., ForeignEngine]) -> None:
    engine = make()
    async with behind_router(engine) as fleet:
        done = await fleet.client.complete([1, 2], n=3, max_new_tokens=4, logprobs=2)
        assert [choice.text for choice in done.choices] == [text(2 + index, 4) for index in range(3)]
        assert done.usage.completion_tokens == 12
        assert [told.logprob for told in done.choices[1].logprobs] == [-1.0] * 4
        assert done.choices[0].logprobs[0].top == ((1, -0.5), (99, -1.0))
        by_text = await fleet.client.complete([1, 2], max_new_tokens=20, stop=["fg"])
        assert (by_text.text, by_text.finished.matched_stop) == ("cde", "fg")
        by_token = await fleet.client.complete([1, 2], max_new_tokens=20, stop_token_ids=[102])
        assert (by_token.text, by_token.finished.matched_token_id) == ("cde", 102)
        assert by_token.token_ids[-1] == 102


async def test_an_answer_that_a_stop_string_ended_is_aborted_at_the_engine(make: Callable[..., ForeignEngine]) -> None:
    engine = make(gate=asyncio.Event())
    async with behind_router(engine) as fleet:
        done = await fleet.client.complete([1, 2], max_new_tokens=9, stop=["de"])
        assert done.text == "c"
        await until(lambda: engine.aborts == [engine.calls[0].request.request_id])


async def test_a_call_that_the_engine_leaves_open_is_ended(make: Callable[..., ForeignEngine]) -> None:
    """gRPC ends no call that is dropped, so each answer left one open for as long as the channel was."""
    engine = make(lingers=True)
    async with behind_router(engine) as fleet:
        assert (await fleet.client.complete("hello", max_new_tokens=2)).text == text(5, 2)
        await until(lambda: engine.calls[0].state == "cancelled")
        assert engine.aborts == []


async def test_a_tokenizer_is_read_once_for_all_engines_and_takes_its_time(
    make: Callable[..., ForeignEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a large one stops the event loop for seconds: at each engine, and again whenever one restarted.

    Where it took longer than a question may, the engine was never known. It is killed as it is asked what it is, which
    it was not taken to be lost by, where it tells no uptime.
    """
    reads = 0

    def slowly(*given: Any) -> Any:
        nonlocal reads
        reads += 1
        time.sleep(3 * CONNECT_TIMEOUT_S)
        return read(*given)

    read = tokenizers._read
    monkeypatch.setattr(tokenizers, "_read", slowly)
    first, second = make(), make()
    async with behind_router(first, second, connect_timeout_s=CONNECT_TIMEOUT_S) as fleet:
        was = fleet.state(first).incarnation
        await first.restart()
        await until(lambda: fleet.state(first).incarnation != was and not fleet.state(first).ineligible_reason)
        assert (await fleet.client.complete("hello", max_new_tokens=2)).text == text(5, 2)
    assert reads == 1


async def test_a_tokenizer_that_was_just_read_is_not_dropped_for_another_models_worker(
    make: Callable[..., ForeignEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read a second time, and made into JSON on the event loop for that."""
    is_healthy, made = EngineSpeaker._is_healthy, []

    async def while_another_comes(speaker: EngineSpeaker) -> bool:
        if not made:
            speaker._archives.keep_only(())  # type: ignore[attr-defined]
        return await is_healthy(speaker)

    monkeypatch.setattr(EngineSpeaker, "_is_healthy", while_another_comes)
    monkeypatch.setattr(tokenizers, "_make", lambda *given: made.append(given))
    async with behind_router(make()):
        assert not made


async def test_a_client_that_leaves_ends_the_request_at_the_engine(make: Callable[..., ForeignEngine]) -> None:
    """Behaviour 6."""
    engine = make(gate=asyncio.Event())
    async with behind_router(engine) as fleet:
        stream = fleet.client.generate([1, 2], max_new_tokens=5)
        assert isinstance(await anext(stream), Started)
        await stream.aclose()
        await until(lambda: not engine.running)
        await until(lambda: engine.aborts == [engine.calls[0].request.request_id])


async def test_an_answer_that_the_client_has_whole_is_not_asked_for(make: Callable[..., ForeignEngine]) -> None:
    """Its worker was lost after the last token: to ask for none more was refused."""
    engine = make()
    request = generate_request([1, 2], {"max_new_tokens": 3, "temperature": 0})
    request.generated.CopyFrom(pack_tokens(np.array([99, 100, 101], dtype=np.uint32)))
    async with behind_router(engine) as fleet, grpc.aio.insecure_channel(fleet.router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        *_, last = [message async for message in call]
        assert last.finished.reason == inference_pb2.FINISH_REASON_LENGTH
        assert last.finished.usage.completion_tokens == 3
        assert (engine.calls, engine.aborts) == ([], [])


async def test_nor_is_it_taken_for_cached(make: Callable[..., ForeignEngine]) -> None:
    engine = make(publishes=False)
    request = generate_request(PROMPT, {"max_new_tokens": 1, "temperature": 0})
    request.generated.CopyFrom(pack_tokens(np.array([99], dtype=np.uint32)))
    async with behind_router(engine) as fleet, grpc.aio.insecure_channel(fleet.router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        assert [message async for message in call][-1].HasField("finished")
        assert await fleet.matched(engine, PROMPT) == 0


async def test_data_parallel_ranks_have_one_load_together_and_caches_that_are_not_followed(
    make: Callable[..., ForeignEngine],
) -> None:
    """Batches of each rank have numbers of their own: the router asked for all of it again every second."""
    engine = make(ranks=3)
    engine.load.running_requests = 5
    async with behind_router(engine) as fleet:
        assert fleet.state(engine).capacity.kv_tokens == 3 * engine.kv_tokens
        await fleet.client.complete(PROMPT, max_new_tokens=1)
        await until(lambda: engine.history and not engine._subscribers)
        await until(lambda: fleet.state(engine).books.reported.running_requests == 15)
        assert fleet.state(engine).approximate
        asked = engine.uptimes_asked
        await until(lambda: engine.uptimes_asked > asked + 2, "it was asked twice more how it is")
        assert engine.subscriptions == [0]


async def test_requests_of_one_name_are_kept_apart(make: Callable[..., ForeignEngine]) -> None:
    """Behaviour 7."""
    engine = make()
    async with behind_router(engine) as fleet:
        await asyncio.gather(*(fleet.client.complete([1, 2], max_new_tokens=2, request_id="same") for _ in range(4)))
        assert len({call.request.request_id for call in engine.calls}) == 4


async def test_what_the_engine_refuses_is_told_and_is_no_fault_of_its_connection(
    make: Callable[..., ForeignEngine],
) -> None:
    """Behaviour 52."""
    engine = make(refusal=(grpc.StatusCode.INVALID_ARGUMENT, "too hot"))
    async with behind_router(engine) as fleet:
        for _ in range(8):
            with pytest.raises(InvalidRequest, match="too hot"):
                await fleet.client.complete([1, 2])
        assert fleet.state(engine).breaker.is_closed


@pytest.mark.parametrize("reason", ["error", "network_error"])
async def test_an_answer_that_the_engine_gives_up_is_an_error(make: Callable[..., ForeignEngine], reason: str) -> None:
    """Behaviour 53: never a silent stop."""
    async with behind_router(make(reason=reason)) as fleet:
        with pytest.raises(RadixfleetError, match=reason):
            await fleet.client.complete([1, 2], max_new_tokens=3)


async def test_an_end_for_an_unknown_reason_is_an_end(make: Callable[..., ForeignEngine]) -> None:
    async with behind_router(make(reason="surprise")) as fleet:
        done = await fleet.client.complete([1, 2], max_new_tokens=3)
        assert (len(done.token_ids), done.finished.reason) == (3, FinishReason.STOP)


async def test_what_no_engine_can_do_is_refused(make: Callable[..., ForeignEngine]) -> None:
    async with behind_router(make()) as fleet:
        with pytest.raises(InvalidRequest, match="salt"):
            await fleet.client.complete([1, 2], cache_salt="tenant")
        with pytest.raises(InvalidRequest, match="4096"):
            await fleet.client.complete([1, 2], max_new_tokens=5000)


async def test_the_engines_count_of_cached_tokens_is_the_receipt(make: Callable[..., ForeignEngine]) -> None:
    async with behind_router(make(publishes=False)) as fleet:
        first = await fleet.client.complete(PROMPT, max_new_tokens=1)
        second = await fleet.client.complete(PROMPT, max_new_tokens=1)
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 192)
        assert fleet.router.registry.workers[0].approximate


async def test_events_of_blocks_of_any_size_tell_what_is_cached(make: Callable[..., ForeignEngine]) -> None:
    engine = make(block_size=48)
    engine.store(PROMPT[:96])
    async with behind_router(engine) as fleet:
        await fleet.until_matched(engine, PROMPT, 64)
        assert not fleet.state(engine).approximate
        engine.store(PROMPT)
        await fleet.until_matched(engine, PROMPT, 192)
        engine.evict(PROMPT[:192])
        await fleet.until_matched(engine, PROMPT, 128)
        engine.clear()
        await fleet.until_matched(engine, PROMPT, 0)


async def test_a_request_goes_where_events_say_its_prefix_is(make: Callable[..., ForeignEngine]) -> None:
    holder, other = make(block_size=128), make(block_size=16)
    holder.store(PROMPT)
    async with behind_router(other, holder) as fleet:
        await fleet.until_matched(holder, PROMPT, 128)
        done = await fleet.client.complete(PROMPT, max_new_tokens=1)
        assert done.started.worker_id == holder.worker_id
        assert done.started.route is not None
        assert (done.started.route.reason, done.usage.cached_tokens) == ("prefix", 128)


async def test_our_workers_and_engines_serve_one_model_together(make: Callable[..., ForeignEngine]) -> None:
    ours, engine = fake_worker("ours", max_context_tokens=4096), make(model="fake-model")
    async with behind_router(ours, engine) as fleet:
        assert len(fleet.router.registry.models) == 1
        served = {(await fleet.client.complete(f"prompt {n}", max_new_tokens=2)).started.worker_id for n in range(20)}
        assert served == {"ours", engine.worker_id}


@both_forms
async def test_look_aside_never_sends_a_client_to_an_engine(make: Callable[..., ForeignEngine], form: str) -> None:
    """A native client could not talk to it."""
    async with behind_router(make()) as fleet:
        with pytest.raises(Unavailable, match="other dialects"):
            await asking_by(fleet.client, form).route(PROMPT)
    own, engine = fake_worker("ours", max_context_tokens=4096), make(model="fake-model")
    async with behind_router(own, engine) as fleet:
        for _ in range(4):
            assert (await asking_by(fleet.client, form).route(PROMPT)).address == own.address
        fleet.router.look_aside.close()


async def test_a_gap_costs_the_truth_until_it_is_told_anew(make: Callable[..., ForeignEngine]) -> None:
    """Behaviour 50: a gap in the event sequence leads to a resync."""
    engine = make()
    async with behind_router(engine) as fleet:
        engine.store(PROMPT[:96])
        await fleet.until_matched(engine, PROMPT, 64)
        engine.publish(lost=True)
        engine.store(PROMPT)
        await until(lambda: engine.subscriptions == [0, 0])
        await fleet.until_matched(engine, PROMPT, 192)
        assert not fleet.state(engine).approximate


async def test_a_snapshot_brings_what_the_history_has_lost(make: Callable[..., ForeignEngine]) -> None:
    engine = make(serves_snapshots=True)
    engine.store(PROMPT)
    engine.forget()
    async with behind_router(engine) as fleet:
        await fleet.until_matched(engine, PROMPT, 192)
        assert not fleet.state(engine).approximate


async def test_an_engine_that_lived_before_and_keeps_no_history_stays_approximate(
    make: Callable[..., ForeignEngine],
) -> None:
    engine = make()
    for lived in (PROMPT, [7] * 100, [8] * 100):  # what comes now is not taken for the first that it ever told
        engine.store(lived)
    engine.forget()
    async with behind_router(engine) as fleet:
        engine.store([9] * 100)
        await until(lambda: engine.subscriptions == [0])
        assert fleet.state(engine).approximate
        await fleet.client.complete(PROMPT, max_new_tokens=1)
        await fleet.until_matched(engine, PROMPT, 192)  # by the router's own record
        engine.clear()
        await until(lambda: not fleet.state(engine).approximate)
        await fleet.until_matched(engine, PROMPT, 0)


async def test_a_restarted_engine_holds_nothing(make: Callable[..., ForeignEngine]) -> None:
    """Behaviour 50."""
    engine = make()
    async with behind_router(engine) as fleet:
        engine.store(PROMPT)
        await fleet.until_matched(engine, PROMPT, 192)
        incarnation = fleet.state(engine).incarnation
        await engine.restart()
        await until(lambda: fleet.state(engine).incarnation != incarnation)
        await fleet.until_matched(engine, PROMPT, 0)
        engine.store(PROMPT[:96])
        await fleet.until_matched(engine, PROMPT, 64)


async def test_an_answer_that_comes_late_is_not_of_another_start(make: Callable[..., ForeignEngine]) -> None:
    """A router that stood still for a moment neither loses the engine nor forgets its tokenizer."""
    clock = LeapingClock()
    engine = make(now=clock.now)
    async with behind_router(engine, clock=clock) as fleet:
        engine.store(PROMPT)
        await fleet.until_matched(engine, PROMPT, 192)
        incarnation = fleet.state(engine).incarnation
        engine.uptime_gate, asked = asyncio.Event(), engine.uptimes_asked
        await until(lambda: engine.uptimes_asked > asked, "it was asked how long it is up")
        clock.leapt_s = 5.0
        engine.uptime_gate.set()
        await until(lambda: engine.uptimes_asked > asked + 2, "and asked again, twice")
        assert fleet.state(engine).incarnation == incarnation
        assert engine.subscriptions == [0], "it was never lost"
        await engine.restart()
        await until(lambda: fleet.state(engine).incarnation != incarnation)


async def test_an_engine_that_does_not_say_how_long_it_is_up_has_not_started_again(
    make: Callable[..., ForeignEngine],
) -> None:
    """vLLM's servicer leaves its uptime 0: time that passes between two questions is no other start."""
    clock = LeapingClock()
    engine = make(now=clock.now)
    async with behind_router(engine, clock=clock) as fleet:
        engine.store(PROMPT)
        await fleet.until_matched(engine, PROMPT, 192)
        incarnation = fleet.state(engine).incarnation
        for _ in range(3):
            asked = engine.uptimes_asked
            clock.leapt_s += 2.5
            await until(lambda asked=asked: engine.uptimes_asked > asked + 1, "it was asked once more")
        assert fleet.state(engine).incarnation == incarnation
        assert engine.subscriptions == [0], "it was never lost"


@pytest.mark.parametrize("patience", [{"heartbeat_timeout_s": 0.3}, {"connect_timeout_s": 0.3}])
async def test_an_engine_that_is_too_busy_to_answer_has_not_started_again(
    make: Callable[..., ForeignEngine], patience: dict[str, float]
) -> None:
    """One that tells no uptime was taken for another: its cache was forgotten, and that it was to drain."""
    engine = make(publishes=False)
    async with behind_router(engine, **patience) as fleet:
        await fleet.client.complete(PROMPT, max_new_tokens=1)
        state = fleet.state(engine)
        incarnation, state.drain_wanted = state.incarnation, True
        engine.uptime_gate = asyncio.Event()
        await until(lambda: not state.connected)
        asked = engine.uptimes_asked
        await until(lambda: engine.uptimes_asked > asked + 1 or "heartbeat_timeout_s" in patience)
        engine.uptime_gate.set()
        await until(lambda: state.connected)
        assert (state.incarnation, state.drain_wanted) == (incarnation, True)
        assert await fleet.matched(engine, PROMPT) == 192


async def test_load_records_count_as_load(make: Callable[..., ForeignEngine]) -> None:
    engine = make()
    async with behind_router(engine) as fleet:
        engine.load.running_requests, engine.load.waiting_requests = 3, 2
        engine.load.waiting_uncached_tokens = 700
        engine.tell_load()
        await until(lambda: fleet.state(engine).view.requests_in_flight == 5)
        view = fleet.state(engine).view
        assert (view.waiting_requests, view.outstanding_prompt_tokens) == (2, 700)
        assert engine.subscriptions == [0], "a record that repeats a number is no gap"


async def test_loads_are_asked_for_where_no_events_come(make: Callable[..., ForeignEngine]) -> None:
    engine = make(publishes=False)
    engine.load.running_requests = 4
    async with behind_router(engine) as fleet:
        await until(lambda: fleet.state(engine).view.requests_in_flight == 4)
        assert fleet.state(engine).view.max_running_requests == 8


async def test_an_engine_without_loads_is_served_all_the_same(make: Callable[..., ForeignEngine]) -> None:
    async with behind_router(make(has_loads=False, publishes=False)) as fleet:
        assert (await fleet.client.complete([1, 2], max_new_tokens=2)).text == text(2, 2)


async def test_an_unhealthy_engine_gets_no_requests(make: Callable[..., ForeignEngine]) -> None:
    """Behaviour 60."""
    engine = make()
    async with behind_router(engine) as fleet:
        engine.healthy = False
        await until(lambda: fleet.state(engine).ineligible_reason == "failed")
        with pytest.raises(Unavailable):
            await fleet.client.complete([1, 2])
        engine.healthy = True
        await until(lambda: not fleet.state(engine).ineligible_reason)


async def test_an_engine_is_drained_by_waiting(make: Callable[..., ForeignEngine]) -> None:
    """Behaviour 54."""
    gate = asyncio.Event()
    engine = make(gate=gate)
    async with behind_router(engine) as fleet:
        running = asyncio.create_task(fleet.client.complete([1, 2], max_new_tokens=3))
        await until(lambda: engine.running == 1)
        drained = asyncio.create_task(fleet.client.drain(engine.worker_id))
        await until(lambda: fleet.state(engine).ineligible_reason == "draining")
        gate.set()
        assert (await running).text == text(2, 3)
        assert (await drained).finished_requests == 1


async def test_an_engine_may_take_the_place_of_a_worker(make: Callable[..., ForeignEngine]) -> None:
    ours = fake_worker("ours")
    engine = make()
    async with behind_router(ours) as fleet:
        await ours.kill()
        await engine.start(ours.port)
        (state,) = fleet.router.registry.workers
        await until(lambda: state.worker_id == engine.worker_id and not state.ineligible_reason)
        done = await fleet.client.complete([1, 2], max_new_tokens=2)
        assert done.started.worker_id == engine.worker_id
        await until(lambda: not engine.running)
        await engine.kill()
