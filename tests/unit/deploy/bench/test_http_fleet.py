"""How fleets behind OpenAI's HTTP are named on the command line, and what is found there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from deploy.bench.fleet import UnfitWorkload
from deploy.bench.http_fleet import HttpFleet, survey_http
from loadtest.callers import CallFailed
from tests.support.fake_inference import FakeInference
from tests.support.fake_inference import serving as grpc_serving

BEHIND = {"vocab_size": 100, "kv_tokens": 4096, "num_workers": 2}


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("http://h:1", "h:1", "http://h:1"),
        ("ours=https://h:1/v1", "ours", "https://h:1/v1"),
        ("http://h:1/path?a=b", "h:1", "http://h:1/path?a=b"),
    ],
)
def test_a_fleet_has_the_name_that_it_is_given_or_its_address(text: str, name: str, url: str) -> None:
    fleet = HttpFleet.named(text, "k")
    assert (fleet.name, fleet.url, fleet.key) == (name, url, "k")


@pytest.mark.parametrize("text", ["", "h:1", "ours=h:1", "ftp://h:1", "ours=http://"])
def test_what_is_no_url_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=http://HOST:PORT"):
        HttpFleet.named(text)


@asynccontextmanager
async def serving(answer: object, status: int = 200) -> AsyncIterator[HttpFleet]:
    """A server that lists its models, for who shows the key."""

    async def models(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer k"
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield HttpFleet.named(f"theirs=http://{host}:{port}", "k")
    finally:
        await runner.cleanup()


async def test_the_only_model_is_taken_with_the_context_that_is_told() -> None:
    async with serving({"data": [{"id": "m", "max_model_len": 2048}]}) as fleet:
        target, served = await survey_http(fleet, "", **BEHIND)
    assert (target.policy, target.max_context_tokens, target.vocab_size, len(target.workers)) == (
        "theirs",
        2048,
        100,
        2,
    )
    assert served.name == "m"


async def test_of_several_models_one_must_be_named() -> None:
    async with serving({"data": [{"id": "a"}, {"id": "b"}]}) as fleet:
        with pytest.raises(UnfitWorkload, match="theirs serves a, b: name one with --model"):
            await survey_http(fleet, "", **BEHIND)
        target, served = await survey_http(fleet, "b", **BEHIND)
    assert served.name == "b"
    assert target.max_context_tokens > 100_000, "not told: no bound"


async def test_the_port_of_grpc_is_named_as_such() -> None:
    async with grpc_serving(FakeInference()) as address:
        with pytest.raises(CallFailed) as caught:
            await survey_http(HttpFleet.named(f"http://{address}"), "", **BEHIND)
    assert str(caught.value) == f"UNAVAILABLE: http://{address} does not speak HTTP/1.1: is it the port of gRPC?"


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"error": {"message": "who are you?"}}, 401, "401: who are you?"),
        ({"models": []}, 200, "lists no models"),
        ([], 200, "lists no models"),
    ],
)
async def test_a_server_that_is_another_one_is_an_error(answer: object, status: int, words: str) -> None:
    async with serving(answer, status) as fleet:
        with pytest.raises(CallFailed, match=words):
            await survey_http(fleet, "", **BEHIND)
