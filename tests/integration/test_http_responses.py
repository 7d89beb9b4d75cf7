"""OpenAI's Responses API on a router, by the `openai` package, with every answer held against its published shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel

from radixfleet.errors import Overloaded
from router.app import running_router
from router.http.openai import event_stream
from tests.support.fake_worker import Script
from tests.support.http_client import connected, get, post
from tests.support.http_fleet import http_fleet
from tests.support.router_fixture import fake_worker, running_fleet, settings
from tests.support.tiny_model import tiny_model
from tests.support.waiting import until
from tests.support.worker_fixture import torch_worker

PATH = "/v1/responses"
HI: Any = {"model": "fake-model", "input": "hi", "temperature": 0}


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@asynccontextmanager
async def client_of_a_real_model() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        torch_worker(tiny_model()) as worker,
        running_router(settings(workers=(worker.address,), http_port=0)) as router,
        client_of(router.http_port) as client,
    ):
        await until(lambda: not router.registry.workers[0].ineligible_reason, "the worker serves")
        yield client


async def test_a_response_whole_and_streamed_is_the_same_and_the_same_as_a_chat() -> None:
    asked: Any = {"model": "sim-model", "temperature": 0}
    async with http_fleet() as fleet, client_of(fleet.port) as client:
        chat = await client.chat.completions.create(
            **asked, max_tokens=12, messages=[{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
        )
        asked |= {"max_output_tokens": 12, "input": "hi", "instructions": "x"}
        whole = await client.responses.create(**asked)
        assert whole.output_text == chat.choices[0].message.content
        assert whole.status == "incomplete"
        assert whole.usage is not None
        assert chat.usage is not None
        assert whole.usage.input_tokens == chat.usage.prompt_tokens
        assert whole.usage.output_tokens == 12
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
            whole.output_text
        )
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == whole.output_text
        assert events[-1].response.usage == whole.usage
        async with client.responses.stream(**asked) as stream:  # what the package makes of the events
            async for _ in stream:
                pass


async def test_the_next_turn_finds_the_one_before_it_in_the_cache() -> None:
    turns: list[Any] = [{"role": "user", "content": "y" * 650}]
    async with http_fleet() as fleet, client_of(fleet.port) as client:
        first = await client.responses.create(model="sim-model", input=turns, max_output_tokens=64)
        turns += [*(item.to_dict() for item in first.output), {"role": "user", "content": "and?"}]
        second = await client.responses.create(
            model="sim-model", input=turns, max_output_tokens=2, prompt_cache_key="other"
        )
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= 640


class Place(BaseModel):
    """Short, whatever the model is."""

    city: Literal["Bern", "Basel"]


async def test_json_schemas_hold() -> None:
    async with client_of_a_real_model() as client:
        asked: Any = {"model": tiny_model().name, "input": "hi", "max_output_tokens": 100}
        answer = await client.responses.parse(**asked, text_format=Place)
        assert answer.output_parsed is not None
        assert answer.output_parsed.city in ("Bern", "Basel")
        wrong: Any = {"type": "json_schema", "name": "place", "schema": {"type": "nonsense"}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**asked, text={"format": wrong})
        assert caught.value.param == "text.format.schema"


async def test_a_demanded_call_is_made_and_what_it_returned_is_read() -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": Place.model_json_schema(), "strict": True}
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    async with client_of_a_real_model() as client:
        asked: Any = {"model": tiny_model().name, "input": turns, "tools": [tool], "max_output_tokens": 100}
        named: Any = {"type": "function", "name": "weather"}
        (call,) = (await client.responses.create(**asked, tool_choice=named)).output
        assert isinstance(call, ResponseFunctionToolCall)
        assert json.loads(call.arguments)["city"] in ("Bern", "Basel")
        one: Any = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
        async with client.responses.stream(**asked, **one) as stream:  # as the package puts it together
            events = [event async for event in stream]
        pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert len(pieces) > 2, "the arguments come as they are generated"
        assert pieces[-1].snapshot == "".join(event.delta for event in pieces)
        assert json.loads(pieces[-1].snapshot)["city"] in ("Bern", "Basel")
        assert events[-1].type == "response.completed"
        (same,) = (await client.responses.create(**asked, **one)).output
        assert isinstance(same, ResponseFunctionToolCall)
        assert same.arguments == pieces[-1].snapshot
        turns += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        assert (await client.responses.create(**asked, tool_choice="none")).output_text
        tool["parameters"] = {"type": "nonsense"}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**asked, tool_choice=named)
        assert caught.value.param == "tools"


async def test_a_response_without_a_limit_may_fill_the_context() -> None:
    worker = fake_worker("w0", max_context_tokens=1000)
    async with running_fleet([worker], http_port=0) as fleet, client_of(fleet.router.http_port) as client:
        await client.responses.create(**HI)
    assert worker.calls[0].request.sampling.max_new_tokens == 1000 - len("user: hi\nassistant: ")


async def test_errors_are_the_clients_own_kinds() -> None:
    async with http_fleet() as fleet, client_of(fleet.port) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="gpt-4", input="hi", stream=True)
        assert missing.value.code == "model_not_found"
        for field, value in (("max_output_tokens", 10**8), ("input", "x" * 70_000)):
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.responses.create(**HI | {"model": "sim-model", field: value})
            assert wrong.value.param == field
        with pytest.raises(openai.BadRequestError, match="nothing is stored here") as stored:
            await client.responses.create(model="sim-model", input="hi", previous_response_id="resp_1")
        assert stored.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")


async def test_events_have_their_type_for_a_name_and_nothing_follows_the_last() -> None:
    async with running_fleet(1, http_port=0) as fleet:
        answer = await post(fleet.router.http_port, PATH, {"input": "hi", "stream": True}, {"X-Request-ID": "mine-1"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, end = answer.body.decode().split("\n\n")
    assert end == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["id"] == "resp_mine-1"


async def test_what_fails_before_the_first_token_has_a_status() -> None:
    script = Script(error=Overloaded("the queue is full", retry_after_s=2.5))
    async with running_fleet([fake_worker("w0", script=lambda _: script)], http_port=0) as fleet:
        refused = await post(fleet.router.http_port, PATH, {"input": "hi", "stream": True})
        assert (refused.status, refused.headers["retry-after"]) == (429, "3")


async def test_a_failure_in_the_middle_of_a_stream_is_its_last_event() -> None:
    """Behaviour 53: never a quiet end."""
    script = Script(tokens=4, finish=False)
    async with (
        running_fleet([fake_worker("w0", script=lambda _: script)], http_port=0) as fleet,
        client_of(fleet.router.http_port) as client,
    ):
        *_, last = [event async for event in await client.responses.create(**HI, stream=True)]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"
        assert "was lost after 4 tokens" in last.response.error.message
        assert last.response.output_text == "xxxx"


async def test_a_failure_after_a_long_silence_is_told_in_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.05)
    start = asyncio.Event()
    script = Script(before_first_token=start, error=Overloaded("too much"), error_after=0)
    worker = fake_worker(script=lambda _: script)
    async with running_fleet([worker], http_port=0) as fleet, connected(fleet.router.http_port) as connection:
        await connection.send("POST", PATH, json.dumps({"input": "hi", "stream": True}).encode())
        assert (await connection.head())[0] == 200
        assert await connection.chunk() == b":\n\n"
        start.set()
        body = b""
        while part := await connection.chunk():
            body += part
        names = [line for line in body.split(b"\n") if line.startswith(b"event: ")]
        assert names == [b"event: response.created", b"event: response.in_progress", b"event: response.failed"]
        assert b"too much" in body


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_ends_its_request(*, stream: bool) -> None:
    """Behaviour 6."""
    worker = fake_worker("w0", script=lambda _: Script(before_first_token=asyncio.Event()))
    async with running_fleet([worker], http_port=0) as fleet:
        async with connected(fleet.router.http_port) as connection:
            await connection.send("POST", PATH, json.dumps({"input": "hi", "stream": stream}).encode())
            await until(lambda: worker.count("started") == 1, "the worker has it")
            connection.abort()
            await until(lambda: worker.count("cancelled") == 1, "the worker is told")
        await fleet.until_settled()


async def test_the_document_describes_requests_answers_and_events() -> None:
    async with running_fleet(0, http_port=0) as fleet:
        document = (await get(fleet.router.http_port, "/openapi.json")).json
    operation = document["paths"][PATH]["post"]
    described = operation["responses"]["200"]["content"]
    assert described["application/json"]["schema"]["$ref"].endswith("/Response")
    assert "ResponseCreated, " in described["text/event-stream"]["schema"]["description"]
    schemas = document["components"]["schemas"]
    assert {"input", "max_output_tokens", "top_k"} <= schemas["ResponsesRequest"]["properties"].keys()
    assert (
        schemas["OutputText"]["properties"]["logprobs"]["items"]["$ref"].removeprefix("#/components/schemas/")
        in schemas
    )
    assert not {"messages", "stream_options"} & schemas["ResponsesRequest"]["properties"].keys()
    assert schemas["ResponseCreated"]["properties"]["type"] == {"enum": ["response.created"]}
