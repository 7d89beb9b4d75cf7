"""The console's pages and JSON, without a browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from yarl import URL

from radixfleet.keys import key_line
from router.app import running_router
from tests.support.fake_worker import Script
from tests.support.router_fixture import Fleet, fake_worker, running_fleet, settings
from tests.support.waiting import until

KEY, TOKEN = "rfk_a-client-of-this-test", "token-of-this-test-0123456789"
ORDER = {"X-Radixfleet-Console": "1"}


@dataclass
class Console:
    fleet: Fleet
    http: aiohttp.ClientSession

    async def get(self, path: str = "/console/api/fleet", **options: Any) -> Any:
        async with self.http.get(path, **options) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def post(self, path: str | URL, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self.http.post(path, json={} if body is None else body, headers=headers or {}) as response:
            return response.status, await response.json()


@asynccontextmanager
async def running_console(*arguments: Any, **settings: Any) -> AsyncIterator[Console]:
    async with running_fleet(*arguments, http_port=0, **settings) as fleet:
        base = f"http://127.0.0.1:{fleet.router.http_port}"
        async with aiohttp.ClientSession(base) as http:
            yield Console(fleet, http)


@pytest.fixture
async def console() -> AsyncIterator[Console]:
    async with running_console(2) as running:
        yield running


async def test_the_page_forbids_everything_from_elsewhere(console):
    async with console.http.get("/console") as response:
        text = await response.text()
        policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|style=", text), "nothing inline"
    assert not re.findall(r"https?://", text), "nothing from elsewhere"


async def test_every_file_that_the_page_names_is_served(console):
    wanted = {"/console"}
    done: set[str] = set()
    while wanted - done:
        path = (wanted - done).pop()
        async with console.http.get(path) as response:
            assert response.status == 200, path
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            text = await response.text()
        done.add(path)
        wanted.update(re.findall(r'(?:href|src)="(/console/[^"]+)"', text))
        wanted.update(f"/console/{name}" for name in re.findall(r'from "\./([^"]+)"', text))
    assert len(done) > 8


async def test_an_unchanged_file_is_not_sent_again(console):
    async with console.http.get("/console/console.js") as response:
        tag = response.headers["ETag"]
    async with console.http.get("/console/console.js", headers={"If-None-Match": tag}) as response:
        assert response.status == 304


async def test_the_root_leads_to_the_console(console):
    async with console.http.get("/", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (307, "/console")


async def test_the_feed_has_the_rows_that_top_has(console):
    feed = await console.get()
    assert [row["worker"] for row in feed["workers"]] == ["w0", "w1"]
    assert feed["fleet"]["states"]["serving"] == 2
    assert feed["workers"][0]["kv"]["total"] > 0
    assert len(feed["trends"]) == 2


async def test_prompt_tokens_and_hot_prefixes_show_up(console):
    prompt = "a system prompt that everybody shares " * 20
    for number in range(3):
        await console.fleet.client.complete(f"{prompt} {number}", max_new_tokens=2)

    async def counted() -> Any:
        feed = await console.get()
        return feed if feed["fleet"]["prompt_tokens"]["asked"] and feed["hottest"] else None

    feed = await until_some(counted)
    tokens = feed["fleet"]["prompt_tokens"]
    assert tokens["asked"] >= tokens["reachable"] >= tokens["predicted"] > 0
    assert feed["fleet"]["split"]["hit"] > 0
    hot = feed["hottest"][0]
    assert hot["saved_tokens"] >= hot["tokens"] > 0
    assert set(hot["workers"]) <= {"w0", "w1"}
    assert hot["text"] == "", "what users wrote is not shown unless the operator wants it"


async def test_how_prompts_begin_is_shown_where_the_operator_wants_it():
    async with running_console(1, console_prompts=True) as console:
        for number in range(2):
            await console.fleet.client.complete("You are a helpful assistant. " * 20 + str(number), max_new_tokens=2)

        async def told() -> Any:
            return (await console.get())["hottest"]

        assert (await until_some(told))[0]["text"].startswith("You are a helpful assistant.")


async def test_points_come_once(console):
    async def two() -> Any:
        points = (await console.get())["points"]
        return points if len(points) >= 2 else None

    points = await until_some(two)
    assert points == sorted(points, key=lambda point: point["at_s"])
    later = await console.get(params={"since": points[0]["at_s"]})
    assert all(point["at_s"] > points[0]["at_s"] for point in later["points"])


async def test_explain_says_what_the_command_says(console):
    status, told = await console.post("/console/api/explain", {"text": "hello world"})
    assert status == 200
    asked = await console.fleet.client.explain("hello world")
    assert told["prompt_tokens"] == asked.prompt_tokens
    assert told["policy"] == asked.policy
    assert {candidate["worker_id"] for candidate in told["candidates"]} == {"w0", "w1"}


async def test_explain_takes_a_chat(console):
    status, told = await console.post("/console/api/explain", {"messages": [{"role": "user", "content": "hello"}]})
    assert status == 200
    assert told["prompt_tokens"] > len("hello")


@pytest.mark.parametrize(
    ("order", "field"),
    [
        ({}, "text"),
        ({"text": "a", "messages": [{"role": "user", "content": "b"}]}, "text"),
        ({"text": 5}, "text"),
        ({"text": "a", "colour": "b"}, None),
        ({"text": "a", "model": "nobody"}, None),
    ],
)
async def test_a_wrong_order_is_refused_with_the_fields_name(console, order, field):
    status, told = await console.post("/console/api/explain", order)
    assert status in (400, 404)
    assert told["error"]["message"]
    if field:
        assert told["error"]["param"] == field


async def test_drain_and_resume(console):
    status, told = await console.post("/console/api/workers/w0/drain", headers=ORDER)
    assert (status, told["state"]) == (200, "drained")
    await console.fleet.until_eligible("w1")
    assert next(row for row in (await fresh(console))["workers"] if row["worker"] == "w0")["state"] == "draining"
    status, told = await console.post("/console/api/workers/w0/resume", headers=ORDER)
    assert (status, told["state"]) == (200, "serving")
    await console.fleet.until_eligible("w0", "w1")


async def test_workers_whose_names_hold_slashes_and_signs_take_orders():
    """As those of engines do that are told by their model: openai@host:8000#org/model."""
    async with running_console([fake_worker("a/b%41#c")]) as console:
        for order, state in (("drain", "drained"), ("resume", "serving")):
            path = URL(f"/console/api/workers/a%2Fb%2541%23c/{order}", encoded=True)
            status, told = await console.post(path, headers=ORDER)
            assert (status, told.get("state")) == (200, state)


async def test_a_drain_needs_no_body(console):
    """As the README writes it: curl -X POST sends none."""
    path = "/console/api/workers/w0/drain"
    async with console.http.post(path, headers=ORDER, skip_auto_headers=("Content-Type",)) as response:
        assert (response.status, (await response.json())["state"]) == (200, "drained")


async def test_a_drain_that_takes_long_is_answered_at_once():
    finish, drained = asyncio.Event(), asyncio.Event()
    worker = fake_worker("w0", script=lambda _: Script(before_finish=finish), drain_gate=drained)
    async with running_console([worker]) as console:
        answer = asyncio.create_task(console.fleet.client.complete("hello", max_new_tokens=2))
        await until(lambda: worker.running == 1)
        status, told = await console.post("/console/api/workers/w0/drain", {"grace_s": 30.0}, ORDER)
        assert (status, told["state"]) == (202, "draining")
        assert worker.drains == [30.0]
        finish.set()
        drained.set()
        await answer


@pytest.mark.parametrize("order", ["drain", "resume"])
async def test_an_order_without_the_header_is_refused(console, order):
    status, told = await console.post(f"/console/api/workers/w0/{order}")
    assert status == 403
    assert "X-Radixfleet-Console" in told["error"]["message"]
    assert sorted(console.fleet.eligible()) == ["w0", "w1"]


async def test_an_order_of_another_sites_page_is_refused(console):
    headers = {**ORDER, "Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    status, _ = await console.post("/console/api/workers/w0/drain", headers=headers)
    assert status == 403
    assert sorted(console.fleet.eligible()) == ["w0", "w1"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/console/api/workers/nobody/drain", {}, 404),
        ("/console/api/workers/nobody/resume", {}, 404),
        ("/console/api/workers/w0/drain", {"grace_s": -1}, 400),
        ("/console/api/workers/w0/drain", {"grace": 1}, 400),
    ],
)
async def test_wrong_orders(console, path, body, expected):
    status, told = await console.post(path, body, ORDER)
    assert status == expected
    assert told["error"]["message"]


async def test_doors_with_keys():
    """A client's key looks and explains; only the admin token drains."""
    values = settings(http_port=0, api_keys=(key_line("bob", KEY),), admin_token=TOKEN)
    async with running_router(values) as router, aiohttp.ClientSession(f"http://127.0.0.1:{router.http_port}") as http:
        drain = "/console/api/workers/w0/drain"
        seen = {}
        for name, key in (("nobody", None), ("bob", KEY), ("admin", TOKEN)):
            headers = ORDER | ({"Authorization": f"Bearer {key}"} if key else {})
            seen[name] = [
                await status(http.get("/console", headers=headers)),
                await status(http.get("/console/api/fleet", headers=headers)),
                await status(http.post("/console/api/explain", json={"text": "a"}, headers=headers)),
                await status(http.post(drain, json={}, headers=headers)),
            ]
        # There is no worker: what gets as far as that is told so.
        assert seen == {"nobody": [401] * 4, "bob": [200, 200, 503, 403], "admin": [200, 200, 503, 404]}


async def fresh(console: Console) -> Any:
    """A feed that was made after now."""
    before = (await console.get())["now_s"]

    async def newer() -> Any:
        feed = await console.get()
        return feed if feed["now_s"] > before else None

    return await until_some(newer)


async def status(asking: Any) -> int:
    async with asking as response:
        await response.read()
        return int(response.status)


async def until_some(ask: Any) -> Any:
    """The first answer that is not empty."""
    async with asyncio.timeout(20):
        while not (answer := await ask()):  # noqa: ASYNC110  only asking tells
            await asyncio.sleep(0.02)
        return answer
