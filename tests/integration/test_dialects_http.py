"""Engines that speak nothing but OpenAI's HTTP behind the router, played by a fake on a real port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from radixfleet.answers import Delta, Finished, Started
from radixfleet.client import Client
from radixfleet.errors import InvalidRequest, Overloaded, RadixfleetError, Unavailable
from router.app import Router, running_router
from router.workers.state import WorkerState
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_worker import FakeWorker
from tests.support.http_client import Answer, get, post
from tests.support.openai_engine import OpenAiEngine, letters
from tests.support.router_fixture import NO_RETRY, fake_worker, settings
from tests.support.waiting import until

PROMPT = "the worker keeps a prefix of each prompt in its cache and the router sends the next request there " * 10


class Fleet:
    """A router and what is behind it."""

    def __init__(self, router: Router, client: Client) -> None:
        self.router, self.client = router, client

    def state(self, worker: OpenAiEngine | FakeWorker) -> WorkerState:
        return next(state for state in self.router.registry.workers if state.address == worker.address)

    async def matched(self, worker: OpenAiEngine | FakeWorker, prompt: Any) -> int:
        told = await self.client.explain(prompt)
        return next(each.matched_tokens for each in told.candidates if each.address == worker.address)

    async def http(self, path: str, body: Mapping[str, Any]) -> Answer:
        return await post(self.router.http_port, path, {"model": "fake-model", **body})

    def metric(self, name: str) -> float:
        return self.router.metrics.registry.get_sample_value(f"radixfleet_router_{name}") or 0.0


@asynccontextmanager
async def behind_router(*workers: OpenAiEngine | FakeWorker, **values: Any) -> AsyncIterator[Fleet]:
    """All of them connected; at the end nothing of a request is left anywhere."""
    try:
        for worker in workers:
            await worker.start()
        addresses = tuple(worker.address for worker in workers)
        async with (
            running_router(settings(**{"workers": addresses, "http_port": 0, **values})) as router,
            Client(router.address, retry=NO_RETRY, timeout_s=30.0) as client,
        ):
            fleet = Fleet(router, client)
            await until(lambda: all(not state.ineligible_reason for state in router.registry.workers))
            yield fleet
            await until(lambda: not router.log.in_flight)
            for worker in workers:
                await until(lambda worker=worker: not worker.running)
            for state in router.registry.workers:
                assert (state.books.own_requests, state.books.own_tokens) == (0, 0)
            assert router.sketch.open_leases == 0
            router.sketch.check()
    finally:
        for worker in workers:
            await worker.kill()


async def until_served_by(fleet: Fleet, engine: OpenAiEngine) -> None:
    """The next request is this engine's, by turns."""
    while (await fleet.client.explain("hello")).worker_id != engine.worker_id:
        with suppress(RadixfleetError):
            await fleet.client.complete("hello", max_new_tokens=1)


def model_directory(folder: Path) -> Path:
    spec = byte_spec()
    (folder / "tokenizer.json").write_text(spec.tokenizer_json)
    settings_json = {"eos_token": spec.eos_token, "chat_template": spec.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_json))
    return folder


# Without a tokenizer: text and chats go as they are.


async def test_text_without_a_tokenizer() -> None:
    engine = OpenAiEngine(owned_by="library", max_model_len=None)
    async with behind_router(engine) as fleet:
        events = [event async for event in fleet.client.generate("hello", max_new_tokens=6, temperature=0)]
        assert isinstance(events[0], Started)
        assert events[0].worker_id == engine.worker_id
        deltas = [event for event in events if isinstance(event, Delta)]
        assert "".join(delta.text for delta in deltas) == letters(5, 6)
        last = events[-1]
        assert isinstance(last, Finished)
        assert last.usage is not None
        assert (last.reason.value, last.usage.prompt_tokens, last.usage.completion_tokens) == ("length", 5, 6)
        [call] = engine.calls
        assert (call.path, call.prompt, call.body["max_tokens"]) == ("/v1/completions", "hello", 6)
        assert (call.body["temperature"], call.body["stream"]) == (0.0, True)
        assert call.body["stream_options"] == {"include_usage": True}


async def test_chats_without_a_tokenizer_go_through_as_messages() -> None:
    engine = OpenAiEngine(owned_by="library", max_model_len=None)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    earlier = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": earlier},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    async with behind_router(engine) as fleet:
        answer = await fleet.http("/v1/chat/completions", {"messages": messages, "tools": tools})
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == letters(4, 4)
        [call] = engine.calls
        assert call.path == "/v1/chat/completions"
        assert call.body["tools"] == tools
        assert "max_tokens" not in call.body, "the engine knows what its context leaves"
        sent = call.body["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
        assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern"}
        assert sent[2]["tool_call_id"] == "1"


async def test_calls_of_tools_and_reasoning_come_through() -> None:
    engine = OpenAiEngine(
        owned_by="library",
        thought="hm",
        reason="tool_calls",
        tool_calls=[("weather", '{"city": "Bern"}'), ("time", "{}")],
    )
    tools = [{"type": "function", "function": {"name": "weather"}}]
    async with behind_router(engine) as fleet:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 2}
        answer = await fleet.http("/v1/chat/completions", body)
        [choice] = answer.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"].split("</think>")[1].strip() == letters(2, 2)
        called = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [(call["name"], json.loads(call["arguments"])) for call in called] == [
            ("weather", {"city": "Bern"}),
            ("time", {}),
        ]


async def test_what_needs_the_tokenizer_says_so() -> None:
    async with behind_router(OpenAiEngine()) as fleet:
        with pytest.raises(InvalidRequest, match="--tokenizers fake-model="):
            await fleet.client.tokenize("hello")
        with pytest.raises(InvalidRequest, match="--tokenizers fake-model="):
            await fleet.client.complete("hello", resume=True, temperature=0)
        answer = await fleet.http("/tokenize", {"prompt": "hello"})
        assert (answer.status, "--tokenizers" in answer.json["error"]["message"]) == (400, True)
        models = await get(fleet.router.http_port, "/v1/models")
        assert models.json["data"][0]["max_model_len"] == 4096


async def test_prefixes_of_texts_are_followed_without_a_tokenizer() -> None:
    first, second = OpenAiEngine(), OpenAiEngine()
    async with behind_router(first, second) as fleet:
        home = (await fleet.client.complete(PROMPT, max_new_tokens=1)).started.worker_id
        for number in range(6):
            done = await fleet.client.complete(f"{PROMPT}{number}", max_new_tokens=1)
            assert done.started.worker_id == home
            assert done.started.route is not None
            assert done.started.route.reason == "prefix"
            assert done.usage.cached_tokens >= len(PROMPT) // 16 * 16 - 16
        asked, actual = fleet.metric("prompt_tokens_asked_total"), fleet.metric("prompt_tokens_actual_total")
        assert asked == 6 * -(-(len(PROMPT) + 1) // 4), "the first one is not counted: the engine said nothing of it"
        assert 0.97 < actual / asked < 1.0, "what engines count in tokens of theirs is counted in ours"


async def test_a_chats_next_turn_goes_where_its_first_was() -> None:
    engines = OpenAiEngine(owned_by="library"), OpenAiEngine(owned_by="library")
    async with behind_router(*engines) as fleet:
        chat = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "one"}]
        home = (await fleet.client.complete(chat, max_new_tokens=2)).started.worker_id
        chat += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
        again = await fleet.client.complete(chat, max_new_tokens=2)
        assert again.started.worker_id == home


# With a tokenizer: of a worker of the same model, or one that is given.


async def test_beside_our_workers_engines_are_sent_the_same_token_ids() -> None:
    ours, engine = fake_worker("ours", max_context_tokens=4096), OpenAiEngine()
    async with behind_router(ours, engine) as fleet:
        served: dict[str, int] = {}
        for number in range(20):
            done = await fleet.client.complete(f"prompt {number}", max_new_tokens=2)
            served[done.started.worker_id] = served.get(done.started.worker_id, 0) + 1
        assert set(served) == {"ours", engine.worker_id}
        assert all(bytes(call.prompt).startswith(b"prompt ") for call in engine.calls)
        assert done.started.prompt_tokens == len("prompt 19")


async def test_a_tokenizer_that_is_given(tmp_path: Path) -> None:
    engine = OpenAiEngine(owned_by="vllm")
    given = f"fake-model={model_directory(tmp_path)}"
    async with behind_router(engine, tokenizers=(given,)) as fleet:
        chat = [{"role": "user", "content": "hi"}]
        done = await fleet.client.complete(chat, max_new_tokens=3)
        rendered = b"user: hi\nassistant: "
        assert bytes(engine.calls[0].prompt) == rendered
        assert done.started.prompt_tokens == len(rendered)
        assert bytes(done.token_ids).decode() == done.text == letters(len(rendered), 3)
        logprobs = await fleet.client.complete("abc", max_new_tokens=2, logprobs=2)
        assert [told.top for told in logprobs.choices[0].logprobs] == [
            ((5, -0.5), (100, -1.0)),
            ((5, -0.5), (101, -1.0)),
        ]
        info = await fleet.client.model_info()
        assert (info.has_chat_template, info.max_context_tokens) == (True, 4096)
        assert (await fleet.client.tokenize("hi")).tolist() == [104, 105]


async def test_a_tokenizer_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    for given in (f"m={tmp_path}", "m", "=x"):
        with pytest.raises(OSError, match="tokenizers"):
            async with running_router(settings(tokenizers=(given,))):
                pass


async def test_an_engine_that_takes_no_ids_is_sent_text_from_then_on(tmp_path: Path) -> None:
    engine = OpenAiEngine(owned_by="library", takes_ids=False)
    async with behind_router(engine, tokenizers=(f"fake-model={model_directory(tmp_path)}",)) as fleet:
        for _ in range(2):
            assert (await fleet.client.complete("hello", max_new_tokens=2)).text == letters(5, 2)
        chat = await fleet.client.complete([{"role": "user", "content": "hi"}], max_new_tokens=2)
        assert chat.text == letters(2, 2)
        assert [call.path for call in engine.calls] == ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
        with pytest.raises(InvalidRequest, match="send text"):
            await fleet.client.complete([1, 2, 3], max_new_tokens=2)


async def test_an_engine_with_chats_alone_answers_chats(tmp_path: Path) -> None:
    engine = OpenAiEngine(owned_by="library", has_completions=False)
    async with behind_router(engine, tokenizers=(f"fake-model={model_directory(tmp_path)}",)) as fleet:
        chat = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            assert (await fleet.client.complete(chat, max_new_tokens=2)).text == letters(2, 2)
        with pytest.raises(Unavailable, match="does not know"):
            await fleet.client.complete("text", max_new_tokens=2)


async def test_an_answer_goes_on_elsewhere_where_the_engine_tells_token_ids() -> None:
    broken, good = OpenAiEngine(dies_after=2), fake_worker("ours", max_context_tokens=4096)
    async with behind_router(broken, good, policy="round_robin", retry_ratio=1.0) as fleet:
        await until_served_by(fleet, broken)
        done = await fleet.client.complete("hello", max_new_tokens=5, temperature=0, resume=True)
        begun = letters(5, 2).encode()
        assert bytes(done.token_ids[:2]) == begun
        assert bytes(good.calls[-1].request.generated.packed[::4]) == begun


# Parameters.


async def test_parameters_are_sent_in_the_words_of_each_kind() -> None:
    asked: dict[str, Any] = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "seed": 2**40 + 7}
    expected = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "seed": 7}
    for owner, penalty in (
        ("vllm", "repetition_penalty"),
        ("sglang", "repetition_penalty"),
        ("llamacpp", "repeat_penalty"),
    ):
        engine = OpenAiEngine(owned_by=owner)
        async with behind_router(engine) as fleet:
            await fleet.client.complete("hello", max_new_tokens=2, stop=["zz"], frequency_penalty=0.5, **asked)
            body = engine.calls[0].body
            assert {name: body[name] for name in expected} == expected
            assert (body[penalty], body["stop"], body["frequency_penalty"]) == (1.1, ["zz"], 0.5)


async def test_what_an_engine_does_not_know_is_refused_with_its_name() -> None:
    async with behind_router(OpenAiEngine(owned_by="library")) as fleet:
        for name, value in (("top_k", 3), ("ignore_eos", True), ("min_new_tokens", 2), ("stop_token_ids", [3])):
            with pytest.raises(InvalidRequest, match=name) as refused:
                await fleet.client.complete("hello", max_new_tokens=4, **{name: value})
            assert refused.value.field == f"sampling.{name}"
        answer = await fleet.http("/v1/completions", {"prompt": "hello", "ignore_eos": True})
        assert (answer.status, answer.json["error"]["param"]) == (400, "ignore_eos")


async def test_requests_go_to_those_who_can_do_what_is_asked() -> None:
    ours, engine = fake_worker("ours", max_context_tokens=4096), OpenAiEngine(owned_by="library")
    async with behind_router(ours, engine, policy="round_robin") as fleet:
        for _ in range(4):
            done = await fleet.client.complete("hello", max_new_tokens=2, ignore_eos=True)
            assert done.started.worker_id == "ours"
        told = await fleet.client.explain("hello", ignore_eos=True)
        reasons = {candidate.worker_id: candidate.ineligible_reason for candidate in told.candidates}
        assert reasons == {"ours": "", engine.worker_id: "cannot do all that is asked for"}


async def test_schemas_are_sent_as_response_format() -> None:
    engine = OpenAiEngine(owned_by="library")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with behind_router(engine) as fleet:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        }
        assert (await fleet.http("/v1/chat/completions", body)).status == 200
        sent = engine.calls[0].body["response_format"]
        assert (sent["type"], sent["json_schema"]["schema"]) == ("json_schema", schema)


async def test_completions_and_an_engine_that_gives_only_one() -> None:
    engine = OpenAiEngine()
    async with behind_router(engine) as fleet:
        done = await fleet.client.complete("hello", n=3, max_new_tokens=4)
        assert [choice.text for choice in done.choices] == [letters(5 + index, 4) for index in range(3)]
        assert done.usage.completion_tokens == 12
        last = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
        engine.says = {0: last}
        with pytest.raises(InvalidRequest, match="one completion"):
            await fleet.client.complete("hello", n=2, max_new_tokens=4)


async def test_isolated_clients_and_engines_that_keep_caches_apart() -> None:
    knows, other = OpenAiEngine(owned_by="vllm"), OpenAiEngine(owned_by="library")
    async with behind_router(knows, other, policy="round_robin") as fleet:
        for _ in range(4):
            done = await fleet.client.complete("hello", max_new_tokens=2, cache_salt="tenant")
            assert done.started.worker_id == knows.worker_id
        assert {call.body["cache_salt"] for call in knows.calls} == {"tenant"}
        await knows.kill()
        await until(lambda: fleet.state(knows).ineligible_reason)
        with pytest.raises(Unavailable):
            await fleet.client.complete("hello", cache_salt="tenant")
    async with behind_router(OpenAiEngine(owned_by="library")) as fleet:
        with pytest.raises(InvalidRequest, match="keep the caches of clients apart"):
            await fleet.client.complete("hello", cache_salt="tenant")


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
        with pytest.raises(Unavailable, match="lost after 1 tokens"):
            await fleet.client.complete("hello", max_new_tokens=3)


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
        (500, {"error": "boom"}, Unavailable, "cannot be reached"),
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


async def test_refusals_are_no_fault_of_the_connection_and_crashes_are() -> None:
    """Behaviour 52."""
    engine = OpenAiEngine(refusal=(400, {"error": "no"}))
    async with behind_router(engine, max_retries=0, breaker_failures=3) as fleet:
        for _ in range(6):
            with pytest.raises(InvalidRequest):
                await fleet.client.complete("hello")
        assert fleet.state(engine).breaker.is_closed
        engine.refusal = (500, "boom")
        for _ in range(3):
            with pytest.raises(Unavailable):
                await fleet.client.complete("hello")
        assert not fleet.state(engine).breaker.is_closed


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
            await fleet.client.complete("hello", timeout_s=0.3)
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
        listed = engine.listings
        running = asyncio.create_task(fleet.client.complete("hello", max_new_tokens=2))
        updated_at_s = fleet.state(engine).updated_at_s
        await until(lambda: fleet.state(engine).updated_at_s != updated_at_s)
        assert engine.gate is not None
        engine.gate.set()
        await running
        assert engine.listings == listed


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
            assert plain.ineligible_reason == "never answered"
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


async def test_an_engine_is_drained_by_waiting() -> None:
    """Behaviour 54."""
    gate = asyncio.Event()
    engine = OpenAiEngine(gate=gate)
    async with behind_router(engine) as fleet:
        running = asyncio.create_task(fleet.client.complete("hello", max_new_tokens=3))
        await until(lambda: engine.running == 1)
        drained = asyncio.create_task(fleet.client.drain(engine.worker_id))
        await until(lambda: fleet.state(engine).ineligible_reason == "draining")
        gate.set()
        await drained
        assert (await running).text == letters(5, 3)
        await fleet.client.resume(engine.worker_id)
        assert (await fleet.client.complete("hello", max_new_tokens=1)).text
