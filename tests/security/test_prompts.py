"""What a client may send as a prompt, and what it may learn of others' prompts."""

from __future__ import annotations

import pytest

from radixfleet.client import Client
from radixfleet.endpoint import Endpoint
from radixfleet.errors import InvalidRequest
from radixfleet.keys import key_line
from tests.support.router_fixture import NO_RETRY, running_fleet
from tests.support.secured_fleet import KEY, TOKEN, secured_fleet

BOB = "rfk_bobs-own"
KEYS = (key_line("alice", KEY), key_line("bob", BOB))
PROMPT = "the same long system prompt for everybody " * 8


async def test_prompts_are_refused_beyond_the_limit_whatever_their_form() -> None:
    async with running_fleet(1, max_prompt_tokens=20) as fleet:
        await fleet.client.complete("x" * 15)
        for prompt in ("x" * 25, list(range(21)), [{"role": "user", "content": "x" * 25}], "x" * 5_000_000):
            with pytest.raises(InvalidRequest, match="20"):
                await fleet.client.complete(prompt)
            with pytest.raises(InvalidRequest, match="20"):
                await fleet.client.tokenize(prompt)
        assert len(fleet.workers[0].calls) == 1


async def cached(endpoint: Endpoint, **options: str) -> int:
    """Tokens of the prompt that were found in the cache."""
    async with Client(endpoint, retry=NO_RETRY) as client:
        done = await client.complete(PROMPT, max_new_tokens=1, **options)  # type: ignore[arg-type]
        return done.usage.cached_tokens


async def test_clients_share_prefixes_unless_they_are_kept_apart() -> None:
    async with secured_fleet(None, api_keys=KEYS) as fleet:
        assert await cached(fleet.router_endpoint(KEY)) == 0
        assert await cached(fleet.router_endpoint(BOB)) > 0


async def test_kept_apart_no_client_finds_anothers_prefixes_by_any_way_or_salt() -> None:
    """Neither by the hit rate nor by what Explain tells of it: both would show what others have sent."""
    async with secured_fleet(None, api_keys=KEYS, isolate_clients=True) as fleet:
        assert await cached(fleet.router_endpoint(KEY)) == 0
        assert await cached(fleet.router_endpoint(KEY)) > 0
        for salt in ("", "alice", "alice\n", "\nalice"):
            assert await cached(fleet.router_endpoint(BOB), cache_salt=salt) == 0
        async with Client(fleet.router_endpoint("rfk_bobs-own")) as bob, Client(fleet.router_endpoint(KEY)) as alice:
            matched = [
                (await client.explain(PROMPT, cache_salt="carol")).candidates[0].matched_tokens
                for client in (bob, alice)
            ]
            assert matched == [0, 0]
            assert (await alice.explain(PROMPT)).candidates[0].matched_tokens > 0
        assert await cached(fleet.router_endpoint(TOKEN)) == 0


async def test_kept_apart_a_client_that_goes_to_the_worker_itself_finds_its_own() -> None:
    async with secured_fleet(None, api_keys=KEYS, isolate_clients=True) as fleet:
        assert await cached(fleet.router_endpoint(KEY)) == 0
        assert await cached(fleet.worker_endpoint(KEY)) > 0
