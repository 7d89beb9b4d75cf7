"""The HTTP port and the metrics ports, tried without a key, with wrong ones, and with those that open them."""

from __future__ import annotations

import base64
import json

import pytest

from radixfleet.keys import key_line
from tests.support.http_client import Answer, connected
from tests.support.router_fixture import running_fleet
from tests.support.secured_fleet import KEY, TOKEN, WRONG, secured_fleet

CHAT = json.dumps({"model": "sim-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
LOOKING = ["/", "/console", "/console/api/fleet", "/v1/models", "/metrics", "/openapi.json", "/no-such-path"]
WORKING = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/console/api/explain",
]
CHANGING = [
    "/console/api/workers/worker-0/resume",
    "/console/api/workers/worker-0/drain",
    "/no-such-path",
    "/metrics",
]
CONSOLE = {"X-Radixfleet-Console": "1"}
HTML = {"Accept": "text/html,*/*"}


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def ask(port: int, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"{}") -> int:
    """The status. An answer that goes on for ever is not read."""
    async with connected(port) as connection:
        await connection.send(method, path, b"" if method == "GET" else body, headers)
        return (await connection.head())[0]


async def answer(port: int, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Answer:
    async with connected(port) as connection:
        await connection.send(method, path, body, headers)
        return await connection.answer()


async def test_health_is_open() -> None:
    async with secured_fleet(None) as fleet:
        assert await ask(fleet.router.http_port, "GET", "/health") == 200


async def test_looking_needs_a_key() -> None:
    async with secured_fleet(None) as fleet:
        for path in LOOKING:
            for key in (None, WRONG):
                assert await ask(fleet.router.http_port, "GET", path, bearer(key)) == 401, path
            for key in (KEY, TOKEN):
                assert await ask(fleet.router.http_port, "GET", path, bearer(key)) in (200, 307, 404), path


async def test_working_needs_a_key() -> None:
    async with secured_fleet(None) as fleet:
        for path in WORKING:
            for key in (None, WRONG):
                assert await ask(fleet.router.http_port, "POST", path, bearer(key), CHAT) == 401, path
            for key in (KEY, TOKEN):
                assert await ask(fleet.router.http_port, "POST", path, bearer(key), CHAT) not in (401, 403), path


async def test_changing_needs_the_admin_token() -> None:
    async with secured_fleet(None) as fleet:
        for path in CHANGING:
            for key, status in ((None, 401), (WRONG, 401), (KEY, 403)):
                assert await ask(fleet.router.http_port, "POST", path, bearer(key)) == status, path
            status = await ask(fleet.router.http_port, "POST", path, bearer(TOKEN) | CONSOLE)
            assert status not in (401, 403), path


async def test_a_refusal_is_an_error_object_of_openai() -> None:
    async with secured_fleet(None) as fleet:
        port = fleet.router.http_port
        refused = await answer(port, "POST", "/v1/chat/completions", bearer(WRONG), CHAT)
        assert refused.error["type"] == "authentication_error"
        assert refused.error["code"] == "unauthenticated"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert WRONG not in refused.body.decode()
        denied = await answer(port, "POST", CHANGING[0], bearer(KEY), b"{}")
        assert (denied.error["type"], denied.error["code"]) == ("permission_error", "permission_denied")


async def test_a_browser_asks_its_user_for_the_key_and_sends_it_as_a_password() -> None:
    async with secured_fleet(None) as fleet:
        port = fleet.router.http_port
        refused = await answer(port, "GET", "/console", HTML)
        assert refused.status == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        basic = "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode()
        assert await ask(port, "GET", "/console", {"Authorization": basic}) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1"},
    ],
)
@pytest.mark.parametrize("path", [CHANGING[0], "/v1/chat/completions"])
async def test_pages_of_other_sites_change_nothing_even_where_no_key_is_needed(
    headers: dict[str, str], path: str
) -> None:
    """A browser on the operator's machine reaches 127.0.0.1, whatever page is open in it."""
    async with running_fleet(1, http_port=0) as fleet:
        assert await ask(fleet.router.http_port, "POST", path, headers, CHAT) == 403
        assert fleet.eligible() == ["w0"]


async def test_a_name_that_resolves_to_this_machine_is_no_way_in_either() -> None:
    """DNS rebinding: for the browser, the page and this router are one site then."""
    async with running_fleet(1, http_port=0) as fleet:
        port = fleet.router.http_port
        rebound = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
        assert await ask(port, "POST", CHANGING[0], rebound) == 403
        own = {"Host": f"127.0.0.1:{port}", "Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}
        assert await ask(port, "POST", "/console/api/explain", own) not in (401, 403)


async def test_metrics_ports_need_a_key() -> None:
    async with secured_fleet(None) as fleet:
        for port in (fleet.router.metrics_port, fleet.workers[0].metrics_port):
            for path in ("/metrics", "/sd", "/"):
                for key, statuses in ((None, (401,)), (WRONG, (401,)), (KEY, (200, 404)), (TOKEN, (200, 404))):
                    assert await ask(port, "GET", path, bearer(key)) in statuses, (path, key)


async def test_a_client_that_asks_too_often_hears_when_to_come_again() -> None:
    keys = (key_line("alice", KEY), key_line("bob", "rfk_bobs-own"))
    async with secured_fleet(None, api_keys=keys, max_client_requests_per_s=0.01) as fleet:
        port = fleet.router.http_port
        first = await answer(port, "POST", "/v1/chat/completions", bearer(KEY), CHAT)
        second = await answer(port, "POST", "/v1/chat/completions", bearer(KEY), CHAT)
        assert (first.status, second.status) == (200, 429)
        assert 30 <= int(second.headers["retry-after"]) <= 100
        assert second.error["type"] == "rate_limit_error"
        # Looking goes on; so do others, and the fleet's own.
        assert await ask(port, "GET", "/v1/models", bearer(KEY)) == 200
        for key in ("rfk_bobs-own", TOKEN, TOKEN):
            assert await ask(port, "POST", "/v1/chat/completions", bearer(key), CHAT) == 200
