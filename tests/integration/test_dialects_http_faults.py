"""What goes wrong with engines behind OpenAI's HTTP, and what the router knows of their lives."""

from __future__ import annotations

import asyncio
import json
from asyncio import Task
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from radixfleet.answers import Completion, DrainOutcome
from radixfleet.client import Client
from radixfleet.errors import InvalidRequest, Overloaded, RadixfleetError, Unavailable
from radixfleet.types import FinishReason
from router.app import running_router
from tests.support.engine_fleet import PROMPT, Fleet, behind_router
from tests.support.http_client import post
from tests.support.openai_engine import OpenAiEngine, letters
from tests.support.router_fixture import settings
from tests.support.waiting import until

# What goes wrong.


async def test_a_client_that_leaves_ends_the_request_at_the_engine() -> None:
    """Behaviour 6: before the first token, and in the middle."""
    engine = OpenAiEngine(gate=asyncio.Event())
    async with behind_router(engine) as fleet:
        stream = fleet.client.generate("hello", max_new_tokens=5)
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.calls[0].state == "cancelled")
        engine.before_headers = asyncio.Event()
        waiting = asyncio.create_task(fleet.client.complete("hello"))
        await until(lambda: len(engine.calls) == 2)
        waiting.cancel()
        await until(lambda: engine.calls[1].state == "cancelled")


async def test_an_engine_that_dies_in_an_answer_is_an_error() -> None:
    """Behaviour 53: never a silent stop."""
    engine = OpenAiEngine(dies_after=2)
    async with behind_router(engine) as fleet:
        with pytest.raises(Unavailable, match="lost after 2 tokens"):
            await fleet.client.complete("hello", max_new_tokens=5)


@pytest.mark.parametrize(
    "said",
    [
        b"data: {oops\n\n",
        b'data: {"choices": [{"index": 7, "text": "x"}]}\n\n',
        b"data: " + b"x" * 9_000_000 + b"\n\n",
        b"data: [DONE]\n\n",
        b'data: {"choices": "many"}\n\n',
        b'data: {"choices": [{"index": 0, "text": "x", "token_ids": [-1]}]}\n\n',
    ],
    ids=["no json", "index", "endless", "done too early", "shape", "token ids"],
)
async def test_nonsense_is_an_error_and_no_stop(said: bytes) -> None:
    """Behaviour 53."""
    engine = OpenAiEngine(says={0: said})
    async with behind_router(engine, max_retries=0) as fleet:
        with pytest.raises(Unavailable):
            await fleet.client.complete("hello", max_new_tokens=3)


@pytest.mark.parametrize(
    "said",
    [b'data: {"error": {"message": "CUDA died"}}\n\n', b'data: {"object": "error", "message": "CUDA died"}\n\n'],
)
async def test_an_error_in_the_stream_is_told(said: bytes) -> None:
    async with behind_router(OpenAiEngine(says={1: said}), max_retries=0) as fleet:
        with pytest.raises(RadixfleetError):
            await fleet.client.complete("hello", max_new_tokens=3)
        with pytest.raises(Unavailable, match=r"stopped after 1 token: .*CUDA died"):
            await fleet.client.complete("hello", max_new_tokens=3)


@pytest.mark.parametrize("owned_by", ["vllm", "library"], ids=["token ids", "text"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_knows_no_limit_is_cut_off(owned_by: str, stream: bool) -> None:
    """It was never ended: what it streamed was passed on, or collected, for ever."""
    engine = OpenAiEngine(is_endless=True, owned_by=owned_by)
    async with behind_router(engine, http_port=0) as fleet:
        body = {"prompt": "hello", "max_tokens": 5, "stream": stream}
        answer = await post(fleet.router.http_port, "/v1/completions", body)
        assert answer.status == 200
        choices = [event["choices"][0] for event in answer.events[:-1]] if stream else [answer.json["choices"][0]]
        assert choices[-1]["finish_reason"] == "length"
        text = "".join(choice["text"] for choice in choices)
        assert len(text) == 5 if owned_by == "vllm" else 5 <= len(text) < 200
        await until(lambda: engine.calls[0].state == "cancelled")


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 4, 3)),
        ({"prompt_tokens": 9.0, "completion_tokens": 3.0}, (9, 0, 3)),
        ({"prompt_tokens": None, "completion_tokens": None}, (5, 0, 2)),
        ({"prompt_tokens": -1, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": -1}}, (5, 0, 2)),
        ({"prompt_tokens": 2**40, "completion_tokens": 2**70, "prompt_tokens_details": {}}, (5, 0, 2)),
    ],
    ids=["right", "floats", "nulls", "negative", "huge"],
)
async def test_an_answer_does_not_fail_for_counts_that_cannot_be(
    usage: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    """What was counted here takes their place. The text of the event that tells them is left out."""
    said = b"data: " + json.dumps({"choices": None, "usage": usage}).encode() + b"\n\n"
    engine = OpenAiEngine(usage="none", says={1: said}, stop_reason=["zz"], reason="model_length")
    async with behind_router(engine, max_retries=0) as fleet:
        answer = await fleet.client.complete(list(range(1, 6)), max_new_tokens=3)
        told = answer.usage
        assert (told.prompt_tokens, told.cached_tokens, told.completion_tokens) == counts
        assert answer.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("stream", [True, False])
async def test_an_end_for_an_unknown_reason_is_an_end(stream: bool) -> None:
    """A new version's word, or a hosted engine's own, is no fault of ours: over HTTP it gave a 500."""
    async with behind_router(OpenAiEngine(reason="surprise"), http_port=0) as fleet:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": stream}
        answer = await post(fleet.router.http_port, "/v1/chat/completions", body)
        assert answer.status == 200
        last = answer.events[-2] if stream else answer.json
        assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("reason", ["error", "network_error"])
async def test_an_answer_that_the_engine_says_has_failed_is_an_error(reason: str) -> None:
    """Behaviour 53: never a silent stop."""
    async with behind_router(OpenAiEngine(reason=reason), max_retries=0) as fleet:
        with pytest.raises(RadixfleetError, match=reason):
            await fleet.client.complete("hello", max_new_tokens=3)


async def test_a_list_of_models_may_be_long() -> None:
    """Hosted servers list hundreds, in more bytes than come in one piece."""
    others = [{"id": f"adapter-{index}", "parent": "fake-model", "description": "x" * 500} for index in range(1000)]
    async with behind_router(OpenAiEngine(others=others)) as fleet:
        assert (await fleet.client.complete("hello", max_new_tokens=3)).text == letters(5, 3)


async def test_a_stream_without_a_reason_at_its_end_is_no_answer() -> None:
    """llama-cpp-python says no more than [DONE] to a stream that it interrupts for another request."""
    async with behind_router(OpenAiEngine(reason=None), max_retries=0) as fleet:
        with pytest.raises(Unavailable):
            await fleet.client.complete("hello", max_new_tokens=3)


@pytest.mark.parametrize(
    ("status", "told", "expected", "words"),
    [
        (400, {"error": {"message": "too hot"}}, InvalidRequest, "too hot"),
        (422, {"detail": [{"msg": "bad"}]}, InvalidRequest, "bad"),
        (429, {"error": "slow down"}, Overloaded, "slow down"),
        (401, {"error": "who are you"}, Unavailable, "--engine-api-key"),
        (404, {"object": "error", "message": "no model"}, Unavailable, "no model"),
        (503, {}, Unavailable, "not ready"),
        (500, {"error": "boom"}, Unavailable, "failed: it answered with status 500: boom"),
        (302, {}, Unavailable, "give that address"),
    ],
)
async def test_what_the_engine_refuses_is_told(
    status: int, told: Any, expected: type[RadixfleetError], words: str
) -> None:
    engine = OpenAiEngine(refusal=(status, told))
    async with behind_router(engine, max_retries=0) as fleet:
        with pytest.raises(expected, match=words):
            await fleet.client.complete("hello", max_new_tokens=3)


async def test_refusals_and_crashes_count_against_nobody_where_nobody_does_better() -> None:
    """Behaviour 52: five requests that made an engine answer 500 took it from all others."""
    engine = OpenAiEngine(refusal=(400, {"error": "no"}))
    async with behind_router(engine, max_retries=0, breaker_failures=3) as fleet:
        for _ in range(6):
            with pytest.raises(InvalidRequest):
                await fleet.client.complete("hello")
        assert fleet.state(engine).breaker.is_closed
        engine.refusal = (500, "boom")
        for _ in range(6):
            with pytest.raises(Unavailable, match="boom"):
                await fleet.client.complete("hello")
        engine.refusal = None
        assert await fleet.client.complete("hello", max_new_tokens=1)


async def test_an_engine_that_fails_where_others_answer_gets_no_more_requests() -> None:
    bad, good = OpenAiEngine(refusal=(500, "boom")), OpenAiEngine()
    async with behind_router(bad, good, policy="round_robin", retry_ratio=1.0, breaker_failures=3) as fleet:
        for _ in range(8):
            await fleet.client.complete("hello", max_new_tokens=1)
        assert len(bad.calls) == 3
        assert fleet.state(bad).ineligible_reason == "breaker"


async def test_a_request_that_failed_before_its_first_token_is_tried_elsewhere() -> None:
    """Behaviour 53."""
    bad, good = OpenAiEngine(refusal=(500, "boom")), OpenAiEngine()
    async with behind_router(bad, good, policy="round_robin", retry_ratio=1.0) as fleet:
        for _ in range(4):
            assert (await fleet.client.complete("hello", max_new_tokens=2)).started.worker_id == good.worker_id
        assert bad.calls


async def test_a_deadline_ends_the_request_on_both_sides() -> None:
    engine = OpenAiEngine(gate=asyncio.Event())
    async with behind_router(engine) as fleet:
        with pytest.raises(RadixfleetError) as late:
            await fleet.client.complete("hello", timeout_s=1.0)
        assert late.value.code == "DEADLINE_EXCEEDED"
        await until(lambda: engine.calls[0].state == "cancelled")


async def test_without_usage_events_are_counted() -> None:
    engine = OpenAiEngine(usage="none", owned_by="library")
    async with behind_router(engine) as fleet:
        done = await fleet.client.complete("hello", max_new_tokens=4)
        assert (done.usage.completion_tokens, done.usage.cached_tokens_unknown) == (4, True)
        asked = fleet.metric("prompt_tokens_asked_total")
        assert asked == 0, "what was cached is not known, so the hit rate leaves it out"
        answer = await fleet.http("/v1/completions", {"prompt": "hello"})
        assert "prompt_tokens_details" not in answer.json["usage"]


async def test_an_engine_that_says_nothing_of_nothing_cached() -> None:
    """vLLM and SGLang leave the count out where it is 0; once they told one, that means 0."""
    engine = OpenAiEngine(usage="cached")
    async with behind_router(engine) as fleet:
        assert (await fleet.client.complete(PROMPT, max_new_tokens=1)).usage.cached_tokens_unknown
        assert (await fleet.client.complete(PROMPT, max_new_tokens=1)).usage.cached_tokens > 0
        cold = await fleet.client.complete("quite another prompt", max_new_tokens=1)
        assert (cold.usage.cached_tokens, cold.usage.cached_tokens_unknown) == (0, False)


async def test_an_answer_in_one_piece_and_a_stream_without_done() -> None:
    for fields in ({"streams": False}, {"says_done": False}):
        async with behind_router(OpenAiEngine(**fields)) as fleet:  # type: ignore[arg-type]  # of several types
            assert (await fleet.client.complete("hello", max_new_tokens=4)).text == letters(5, 4)


async def test_what_stopped_an_answer_is_told_where_the_engine_tells_it() -> None:
    engine = OpenAiEngine(reason="stop", stop_reason="zz")
    async with behind_router(engine) as fleet:
        done = await fleet.client.complete("hello", max_new_tokens=3, stop=["zz"])
        assert (done.finished.reason.value, done.finished.matched_stop) == ("stop", "zz")
        engine.stop_reason = 107
        assert (await fleet.client.complete("hello", max_new_tokens=3)).finished.matched_token_id == 107


# What it is, and whether it lives.


async def test_it_is_known_as_approximate_and_not_for_look_aside() -> None:
    engine = OpenAiEngine()
    async with behind_router(engine) as fleet:
        [entry] = await fleet.client.list_workers()
        assert (entry.worker_id, entry.approximate) == (engine.worker_id, True)
        assert entry.info is not None
        assert entry.info.version == "openai vllm"
        with pytest.raises(Unavailable, match="other dialects"):
            await fleet.client.route("hello")


@pytest.mark.parametrize("has_health", [True, False])
async def test_an_engine_that_is_gone_gets_no_requests_until_it_is_back(has_health: bool) -> None:
    """Behaviours 50 and 60: and then it holds nothing."""
    engine = OpenAiEngine(has_health=has_health)
    async with behind_router(engine) as fleet:
        await fleet.client.complete(PROMPT, max_new_tokens=1)
        assert await fleet.matched(engine, PROMPT) > 0
        incarnation = fleet.state(engine).incarnation
        await engine.kill()
        await until(lambda: fleet.state(engine).ineligible_reason == "disconnected")
        with pytest.raises(Unavailable):
            await fleet.client.complete("hello")
        await engine.restart()
        await until(lambda: not fleet.state(engine).ineligible_reason)
        assert fleet.state(engine).incarnation != incarnation
        assert await fleet.matched(engine, PROMPT) == 0


async def test_an_engine_that_loads_or_is_ill_gets_no_requests() -> None:
    """Behaviour 60."""
    engine = OpenAiEngine()
    async with behind_router(engine) as fleet:
        for status, reason in ((503, "loading"), (500, "failed"), (200, "")):
            engine.health = status
            await until(lambda reason=reason: fleet.state(engine).ineligible_reason == reason)


async def test_while_it_lives_nobody_asks_for_its_models_again() -> None:
    """llama-cpp-python breaks running answers off to tell its models."""
    engine = OpenAiEngine(has_health=False, gate=asyncio.Event())
    async with behind_router(engine) as fleet:
        await until(lambda: engine.listings == 2)  # when it was found, and when it was seen to serve
        running = asyncio.create_task(fleet.client.complete("hello", max_new_tokens=2))
        updated_at_s = fleet.state(engine).updated_at_s
        await until(lambda: fleet.state(engine).updated_at_s != updated_at_s)
        assert engine.gate is not None
        engine.gate.set()
        await running
        assert engine.listings == 2


async def test_of_several_models_the_address_names_one() -> None:
    others = [{"id": "second", "owned_by": "vllm"}, {"id": "adapter", "owned_by": "vllm", "parent": "fake-model"}]
    engine = await OpenAiEngine(others=others).start()
    try:
        named = f"{engine.address}/v1#second"
        async with running_router(settings(workers=(engine.address, named))) as router:
            plain, second = router.registry.workers
            await until(lambda: not second.ineligible_reason)
            assert second.worker_id == f"{engine.worker_id}#second"
            async with Client(router.address) as client:
                await client.complete("hello", model="second", max_new_tokens=1)
            assert engine.calls[0].body["model"] == "second"
            assert "serves several models (fake-model, second): give " in plain.ineligible_reason
    finally:
        await engine.kill()


async def test_a_router_is_no_worker() -> None:
    """Not itself, whose requests would go round, and not another, which may name the first."""
    engine = OpenAiEngine()
    try:
        async with running_router(settings(http_port=0)) as router, Client(router.address) as client:
            own = f"http://127.0.0.1:{router.http_port}"
            for address in (own, f"{own}#{engine.model}"):
                assert await client.register(address)
            whole, named = router.registry.workers
            await until(lambda: "serves several models (none)" in whole.ineligible_reason)
            with capture_logs() as lines:
                await engine.start()
                router.registry.add(engine.address)
                told = f"127.0.0.1:{router.http_port} is a Radixfleet router: name its workers instead"
                await until(lambda: whole.ineligible_reason == named.ineligible_reason == told)
                await client.complete("hello", max_new_tokens=1)
            assert len(engine.calls) == 1
            assert [line.get("reason") for line in lines].count(told) == 2
    finally:
        await engine.kill()


async def test_adapters_beside_the_model_are_not_taken_for_it() -> None:
    engine = OpenAiEngine(others=[{"id": "adapter", "owned_by": "vllm", "parent": "fake-model"}])
    async with behind_router(engine) as fleet:
        assert fleet.router.registry.models == ("fake-model",)


async def test_the_key_is_shown_to_configured_engines_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    configured, registered = OpenAiEngine(api_key="secret"), await OpenAiEngine(model="other").start()
    try:
        async with behind_router(configured, engine_api_key=f"@{key}") as fleet:
            await fleet.client.complete("hello", max_new_tokens=1)
            assert configured.calls[0].headers["authorization"] == "Bearer secret"
            fleet.router.registry.add(registered.address)
            await until(lambda: not fleet.state(registered).ineligible_reason)
            await fleet.client.complete("hello", model="other", max_new_tokens=1)
            assert "authorization" not in registered.calls[0].headers
    finally:
        await registered.kill()


async def test_addresses_that_are_none() -> None:
    async with behind_router(OpenAiEngine()) as fleet:
        for address in ("ftp://h:1", "http://", "http://u:p@h:1", "http://h:99999", "http://h:1?key=x"):
            with pytest.raises(InvalidRequest):
                await fleet.client.register(address)


async def _drain_while_it_runs(fleet: Fleet, engine: OpenAiEngine) -> tuple[Task[Completion], Task[DrainOutcome]]:
    """A request, and the drain that waits for it."""
    running = asyncio.create_task(fleet.client.complete("hello", max_new_tokens=3))
    await until(lambda: engine.running == 1)
    drained = asyncio.create_task(fleet.client.drain(engine.worker_id))
    await until(lambda: fleet.state(engine).ineligible_reason == "draining")
    return running, drained


async def test_the_drain_of_an_engine_ends_when_it_is_resumed() -> None:
    gate = asyncio.Event()
    engine = OpenAiEngine(gate=gate)
    async with behind_router(engine) as fleet:
        running, drained = await _drain_while_it_runs(fleet, engine)
        await fleet.client.resume(engine.worker_id)
        assert (await drained).resumed, "it still runs"
        gate.set()
        assert (await running).token_ids


async def test_an_engine_is_drained_by_waiting() -> None:
    """Behaviour 54."""
    gate = asyncio.Event()
    engine = OpenAiEngine(gate=gate)
    async with behind_router(engine) as fleet:
        running, drained = await _drain_while_it_runs(fleet, engine)
        gate.set()
        await drained
        assert (await running).text == letters(5, 3)
        await fleet.client.resume(engine.worker_id)
        assert (await fleet.client.complete("hello", max_new_tokens=1)).text
