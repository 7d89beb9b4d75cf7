"""Completions of OpenAI's HTTP, as other people's servers stream them, well and badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from loadtest.callers import CallFailed, Ended, NewTokens, Placed, Said
from loadtest.http_caller import HttpCaller, ServedModel, served_models
from loadtest.tokens import Run, TokenSource
from loadtest.workloads import Arrival

ARRIVAL = Arrival(0.0, (Run(0, 20),), 3, 1, TokenSource(100, 0))


@asynccontextmanager
async def answering(text: str) -> AsyncIterator[str]:
    """The URL of a server that answers so, whatever it is asked."""
    body = text.encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def said(*events: str) -> list[Said]:
    """By a caller that hears these events."""
    body = "".join(f"data: {event}\n\n" for event in events)
    async with answering(body) as url, aiohttp.ClientSession() as session:
        return [each async for each in HttpCaller(session, url, model="m").call(ARRIVAL)]


async def test_a_server_that_counts() -> None:
    heard = await said(
        '{"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}',
        '{"choices": [{"text": "a b"}], "usage": {"completion_tokens": 2}}',
        '{"choices": [{"text": " c", "finish_reason": "length"}], "usage": {"completion_tokens": 3}}',
        '{"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": 3,'
        ' "prompt_tokens_details": {"cached_tokens": 16}}}',
        "[DONE]",
    )
    assert heard[0] == Placed("", 0)
    assert [each.count for each in heard if isinstance(each, NewTokens)] == [2, 1]
    assert heard[-1] == Ended(3, cached_tokens=16, prompt_tokens=21)


async def test_a_usage_that_counts_nothing_erases_nothing() -> None:
    heard = await said(
        '{"choices": [{"text": "a b", "finish_reason": "stop"}],'
        ' "usage": {"prompt_tokens": 9, "completion_tokens": 2}}',
        '{"choices": [], "usage": {}}',
    )
    assert heard[-1] == Ended(2, cached_tokens=0, prompt_tokens=9)


async def test_a_server_that_counts_nothing_streams_a_token_an_event() -> None:
    heard = await said('{"choices": [{"text": "a"}]}', '{"choices": [{"text": "b", "finish_reason": "stop"}]}')
    assert [each.count for each in heard if isinstance(each, NewTokens)] == [1, 1]
    assert heard[-1] == Ended(2, cached_tokens=0)


@pytest.mark.parametrize(
    "event",
    [
        "nonsense",
        "[1]",
        '{"choices": 3}',
        '{"choices": [1]}',
        '{"choices": [{"text": 5}]}',
        '{"usage": "much"}',
        '{"choices": [{"text": "a"}], "usage": {"completion_tokens": "many"}}',
        '{"usage": {"prompt_tokens_details": 1}}',
        '{"error": {"code": "busy", "message": "no room"}}',
        '{"choices": [{"text": "a"}]}',
    ],
)
async def test_an_answer_that_is_none_fails_its_request_alone(event: str) -> None:
    """And not the load test."""
    with pytest.raises(CallFailed):
        await said(event)


@pytest.mark.parametrize(
    "listed",
    ["nonsense", "[]", '{"data": 1}', '{"data": [{"id": 7}]}', '{"data": [{"id": "m", "max_model_len": ""}]}'],
)
async def test_a_list_of_models_that_is_none_is_told(listed: str) -> None:
    async with answering(listed) as url, aiohttp.ClientSession() as session:
        with pytest.raises(CallFailed, match="lists no models"):
            await served_models(session, url)


async def test_a_list_of_models() -> None:
    listed = '{"data": [{"id": "m", "max_model_len": 99}, {"id": "n"}]}'
    async with answering(listed) as url, aiohttp.ClientSession() as session:
        assert await served_models(session, url) == [ServedModel("m", 99), ServedModel("n", None)]
