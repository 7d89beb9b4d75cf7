"""OpenAI's own client before a guarded router: over TLS, with a key, without, and over its limits."""

from __future__ import annotations

import ssl
from pathlib import Path

import openai
import pytest

from tests.support.secured_fleet import KEY, WRONG, SecuredFleet, secured_fleet

MESSAGES = [{"role": "user", "content": "hello"}]


def client(fleet: SecuredFleet, key: str) -> openai.AsyncOpenAI:
    """With the client's certificate."""
    files = fleet.certificates
    assert files is not None
    trust = ssl.create_default_context(cafile=files.ca)
    trust.load_cert_chain(files.client.cert, files.client.key)
    url = f"https://127.0.0.1:{fleet.router.http_port}/v1"
    return openai.AsyncOpenAI(
        base_url=url, api_key=key, max_retries=0, http_client=openai.DefaultAsyncHttpxClient(verify=trust)
    )


async def ask(caller: openai.AsyncOpenAI) -> str:
    answer = await caller.chat.completions.create(
        model="sim-model", messages=MESSAGES, max_tokens=3, temperature=0, extra_body={"ignore_eos": True}
    )  # type: ignore[arg-type]
    return answer.choices[0].finish_reason


async def test_a_key_and_a_certificate_open_the_api_and_refusals_are_its_own_exceptions(tmp_path: Path) -> None:
    async with secured_fleet(tmp_path, mutual=True, max_client_requests_per_s=0.01) as fleet:
        async with client(fleet, KEY) as mine, client(fleet, WRONG) as stranger:
            assert await ask(mine) == "length"
            with pytest.raises(openai.AuthenticationError):
                await ask(stranger)
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(mine)
        assert int(caught.value.response.headers["retry-after"]) > 60
        files = fleet.certificates
        assert files is not None
        bare = openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=files.ca))
        url = f"https://127.0.0.1:{fleet.router.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=bare) as uncertified:
            with pytest.raises(openai.APIConnectionError):
                await ask(uncertified)
