"""The `openai` package against a router and simulated workers, with every answer held against its published shape.

Two values that OpenAI itself sends are not in the shape that the package has for them, so answers with them are read
without that check: the finish_reason of a completion's stream before its end, and the probability of a prompt's first
token, both null.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import openai
import pytest

from router.app import running_router
from tests.support.fake_worker import Script
from tests.support.http_fleet import HttpFleet, http_fleet
from tests.support.router_fixture import fake_worker, running_fleet, settings
from tests.support.tiny_model import tiny_model
from tests.support.waiting import until
from tests.support.worker_fixture import torch_worker

T = TypeVar("T")

HI: Any = [{"role": "user", "content": "hi"}]
PROMPT_TOKENS = len("user: hi\nassistant: ")


@asynccontextmanager
async def fleet_and_client(
    *, strict: bool = True, **values: Any
) -> AsyncIterator[tuple[HttpFleet, openai.AsyncOpenAI]]:
    async with (
        http_fleet(**values) as fleet,
        openai.AsyncOpenAI(
            base_url=fleet.url, api_key="none", max_retries=0, _strict_response_validation=strict
        ) as client,
    ):
        yield fleet, client


async def in_thread(fleet: HttpFleet, work: Callable[[openai.OpenAI], T]) -> T:
    """With the synchronous client."""

    def run() -> T:
        with openai.OpenAI(
            base_url=fleet.url, api_key="none", max_retries=0, _strict_response_validation=True
        ) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_models_are_listed_and_described() -> None:
    async with fleet_and_client() as (fleet, client):
        models = (await client.models.list()).data
        assert [model.id for model in models] == ["sim-model"]
        one = await client.models.retrieve("sim-model")
        assert one.model_extra == {
            "root": "sim-model",
            "max_model_len": fleet.router.registry.workers[0].max_context_tokens,
        }
        with pytest.raises(openai.NotFoundError, match="served are sim-model"):
            await client.models.retrieve("gpt-4")


async def test_a_chat_whole_and_streamed_is_the_same() -> None:
    async with fleet_and_client() as (_, client):
        whole = await client.chat.completions.create(model="sim-model", messages=HI, max_tokens=12, temperature=0)
        choice = whole.choices[0]
        assert choice.finish_reason == "length"
        assert choice.message.role == "assistant"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
            PROMPT_TOKENS,
            12,
            PROMPT_TOKENS + 12,
        )
        stream = await client.chat.completions.create(
            model="sim-model",
            messages=HI,
            max_completion_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        first, *middle, last, usage = chunks
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == choice.message.content
        assert last.choices[0].finish_reason == "length"
        assert usage.choices == []
        assert usage.usage is not None
        assert usage.usage.completion_tokens == 12
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_synchronous_client_streams_and_reads_whole_answers() -> None:
    async with http_fleet() as fleet:

        def both(client: openai.OpenAI) -> tuple[str | None, str]:
            asked: Any = {"model": "sim-model", "messages": HI, "max_tokens": 8, "temperature": 0}
            whole = client.chat.completions.create(**asked)
            stream = client.chat.completions.create(**asked, stream=True)
            return whole.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        whole, streamed = await in_thread(fleet, both)
        assert whole == streamed


async def test_what_was_cached_is_told() -> None:
    async with fleet_and_client(num_workers=2) as (_, client):
        for cached in (0, 640):
            answer = await client.completions.create(model="sim-model", prompt="y" * 650, max_tokens=2)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == cached


async def test_salts_keep_tenants_apart() -> None:
    async with fleet_and_client() as (_, client):
        for salt, cached in (("a", 0), ("b", 0), ("a", 640)):
            answer = await client.completions.create(
                model="sim-model", prompt="y" * 650, max_tokens=2, extra_body={"cache_salt": salt}
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == cached


async def test_several_prompts_have_n_choices_each_and_one_usage() -> None:
    """Behaviour 43."""
    async with fleet_and_client(num_workers=2, strict=False) as (_, client):
        answer = await client.completions.create(
            model="sim-model", prompt=["a", "bb", "ccc"], n=2, max_tokens=3, echo=True, seed=5
        )
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text.rstrip()[0] for choice in answer.choices] == list("aabbcc")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 6
        assert answer.usage.completion_tokens == 18
        stream = await client.completions.create(
            model="sim-model",
            prompt=["a", "bb", "ccc"],
            n=2,
            max_tokens=3,
            echo=True,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts = dict.fromkeys(range(6), "")
        usages = []
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usages += [chunk.usage] if chunk.usage else []
        assert list(texts.values()) == [choice.text for choice in answer.choices]
        assert usages == [answer.usage]


async def test_ids_and_text_are_the_same_prompt() -> None:
    async with fleet_and_client() as (_, client):
        forms: list[Any] = ["abc", list(b"abc"), ["abc"], [list(b"abc")]]
        answers = [
            await client.completions.create(model="sim-model", prompt=form, max_tokens=6, temperature=0)
            for form in forms
        ]
        assert len({answer.choices[0].text for answer in answers}) == 1


async def test_log_probabilities_in_both_forms() -> None:
    async with fleet_and_client(strict=False) as (_, client):
        chat = await client.chat.completions.create(
            model="sim-model", messages=HI, max_tokens=5, logprobs=True, top_logprobs=3, temperature=0
        )
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in logprobs.content] == [3] * 5
        done = await client.completions.create(
            model="sim-model", prompt="abc", max_tokens=5, logprobs=2, echo=True, temperature=0
        )
        lists = done.choices[0].logprobs
        assert lists is not None
        assert lists.tokens is not None
        assert lists.tokens[:3] == ["a", "b", "c"]
        assert lists.token_logprobs is not None
        assert lists.token_logprobs[0] is None
        assert len(lists.token_logprobs) == len(lists.tokens) == 8
        assert lists.text_offset is not None
        assert lists.text_offset[:4] == [0, 1, 2, 3]
        stream = await client.chat.completions.create(
            model="sim-model", messages=HI, max_tokens=5, logprobs=True, stream=True, temperature=0
        )
        entries = [
            entry
            async for chunk in stream
            for entry in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
        ]
        assert len(entries) == 5


async def test_only_the_prompts_probabilities() -> None:
    """How evaluation harnesses score a text."""
    async with fleet_and_client(strict=False) as (_, client):
        scored = await client.completions.create(model="sim-model", prompt="abcd", max_tokens=0, echo=True, logprobs=0)
        choice = scored.choices[0]
        assert choice.text == "abcd"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == 4
        assert scored.usage is not None
        assert scored.usage.completion_tokens == 0


@asynccontextmanager
async def client_of_a_real_model() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        torch_worker(tiny_model()) as worker,
        running_router(settings(workers=(worker.address,), http_port=0)) as router,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{router.http_port}/v1",
            api_key="none",
            max_retries=0,
            _strict_response_validation=True,
        ) as client,
    ):
        await until(lambda: not router.registry.workers[0].ineligible_reason, "the worker serves")
        yield client


PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Basel"]}},
    "required": ["city"],
    "additionalProperties": False,
}


async def test_json_schemas_hold() -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    async with client_of_a_real_model() as client:
        asked: Any = {"model": tiny_model().name, "messages": HI, "max_tokens": 100, "response_format": wanted}
        answer = await client.chat.completions.create(**asked)
        assert json.loads(answer.choices[0].message.content or "")["city"] in ("Bern", "Basel")
        wanted["json_schema"]["schema"] = {"type": "nonsense"}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**asked)
        assert caught.value.param == "response_format.json_schema.schema"


async def test_a_demanded_call_is_made() -> None:
    function: Any = {"name": "weather", "parameters": PLACE}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {"model": tiny_model().name, "messages": HI, "tools": [{"type": "function", "function": function}]}
    async with client_of_a_real_model() as client:
        answer = await client.chat.completions.create(**asked, tool_choice=named)
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Bern", "Basel")

        one: Any = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
        (same,) = (await client.chat.completions.create(**asked, **one)).choices[0].message.tool_calls or []
        assert same.type == "function"
        async with client.chat.completions.stream(**asked, **one) as stream:  # as the package puts it together
            pieces = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = (await stream.get_final_completion()).choices[0]
        assert len(pieces) > 2, "the arguments come as they are generated"
        assert json.loads(pieces[-1].arguments)["city"] in ("Bern", "Basel")
        (streamed,) = final.message.tool_calls or []
        assert (streamed.function.name, streamed.function.arguments) == ("weather", pieces[-1].arguments)
        assert streamed.function.arguments == same.function.arguments, "token for token as in the whole answer"
        assert (final.finish_reason, final.message.content or "") == ("tool_calls", "")

        function["parameters"] = {"type": "nonsense"}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**asked, tool_choice=named)
        assert caught.value.param == "tools"


async def test_stop_strings_and_seeds() -> None:
    async with fleet_and_client() as (_, client):
        answers = [
            await client.completions.create(model="sim-model", prompt="abc", max_tokens=30, seed=seed)
            for seed in (1, 1, 2)
        ]
        first, same, other = (answer.choices[0].text for answer in answers)
        assert first == same != other
        stop = next(character for character in first[5:] if character.isprintable() and character.isascii())
        cut = await client.completions.create(model="sim-model", prompt="abc", max_tokens=30, seed=1, stop=[stop])
        assert cut.choices[0].text == first[: first.index(stop)]
        assert cut.choices[0].finish_reason == "stop"


async def test_a_chat_without_a_limit_may_fill_the_context() -> None:
    worker = fake_worker("w0", max_context_tokens=1000)
    async with running_fleet([worker], http_port=0) as fleet:
        url = f"http://127.0.0.1:{fleet.router.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await client.chat.completions.create(model="fake-model", messages=HI)
            await client.completions.create(model="fake-model", prompt="hi")
    limits = [call.request.sampling.max_new_tokens for call in worker.calls]
    assert limits == [1000 - PROMPT_TOKENS, 16]


async def test_errors_are_the_clients_own_kinds() -> None:
    async with fleet_and_client() as (_, client):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4", messages=HI)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model="sim-model", messages=HI, max_tokens=10**8)
        assert wrong.value.param == "max_tokens"
        assert "max_tokens" in wrong.value.message
        with pytest.raises(openai.BadRequestError) as absent:
            await client.completions.create(model="sim-model", prompt=[])
        assert absent.value.param == "prompt"
        assert absent.value.request_id


async def test_a_failure_in_the_middle_of_a_stream_is_raised() -> None:
    """Behaviour 53: never a quiet end."""
    script = Script(tokens=4, finish=False)
    async with running_fleet([fake_worker("w0", script=lambda _: script)], http_port=0) as fleet:
        url = f"http://127.0.0.1:{fleet.router.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model="fake-model", messages=HI, stream=True)
            text = ""
            with pytest.raises(openai.APIError, match="was lost after 4 tokens:"):  # noqa: PT012  it is raised within
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            assert text == "xxxx"
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="fake-model", messages=HI)
            assert caught.value.status_code == 503
