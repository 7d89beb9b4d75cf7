"""The web console in a real browser, on a router with two simulated workers. Screenshots go to $ARTEFACTS, if set."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from radixfleet.client import Client
from radixfleet.endpoint import Endpoint
from radixfleet.keys import key_line
from router.app import Router, running_router
from tests.support.browser import CHROMIUM, Browser, Page, browser
from tests.support.router_fixture import settings
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
]

KEY, TOKEN = "rfk_a-client-of-this-test", "token-of-this-test-0123456789"
SHARED = "You are a helpful assistant who answers in one short sentence. " * 12
CALM = {"http_port": 0, "heartbeat_timeout_s": 20.0}
"""A browser beside it takes all the machine for a moment."""
ROWS = "document.querySelectorAll('#worker-rows tr').length"


@dataclass
class Console:
    router: Router
    client: Client
    page: Page
    artefacts: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}/console"

    async def open(self) -> None:
        await self.page.goto(self.url)
        await self.page.until(f"{ROWS} === {len(self.router.registry.workers)}")

    async def traffic(self, requests: int = 6) -> None:
        for number in range(requests):
            await self.client.complete(f"{SHARED}{number}", max_new_tokens=8, ignore_eos=True)

    async def picture(self, name: str) -> None:
        file = self.artefacts / f"console-{name}.png"
        await self.page.screenshot(file, whole=True)
        assert file.read_bytes().startswith(b"\x89PNG")

    def states(self) -> dict[str, str]:
        return {worker.worker_id: worker.effective_status.value for worker in self.router.registry.workers}

    async def overflow(self) -> list[str]:
        """What sticks out of the screen to the right."""
        return await self.page.evaluate(
            "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1"
            " && getComputedStyle(e).clipPath === 'none').map((e) => e.outerHTML.slice(0, 120))"
        )

    async def cut(self) -> list[str]:
        """Text in the table of workers that is longer than what holds it shows."""
        return await self.page.evaluate(
            "[...document.querySelectorAll('#worker-table :is(td, th, small, b, span)')].filter((e) =>"
            " getComputedStyle(e).clipPath === 'none' && getComputedStyle(e).overflowX !== 'visible'"
            " && e.scrollWidth > e.clientWidth + 1"
            " && e.textContent.trim()).map((e) => e.outerHTML.slice(0, 120))"
        )


@asynccontextmanager
async def running_console(
    chromium: Browser,
    folder: Path,
    names: tuple[str, ...] = ("w0", "w1"),
    *,
    key: str | None = None,
    **values: Any,
) -> AsyncIterator[Console]:
    artefacts = Path(os.environ.get("ARTEFACTS", folder))
    artefacts.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  nothing else waits in a test
    async with AsyncExitStack() as stack:
        own = {"admin_token": values["admin_token"]} if "admin_token" in values else {}
        workers = [await stack.enter_async_context(sim_worker(worker_id=name, **own)) for name in names]
        addresses = tuple(worker.address for worker in workers)
        router = await stack.enter_async_context(running_router(settings(**CALM, workers=addresses, **values)))
        await until(lambda: sum(not worker.ineligible_reason for worker in router.registry.workers) == len(names))
        client = await stack.enter_async_context(Client(Endpoint(router.address, key=key), timeout_s=60.0))
        page = await stack.enter_async_context(chromium.page())
        yield Console(router, client, page, artefacts)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium(tmp_path_factory) -> AsyncIterator[Browser]:
    async with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def console(chromium, tmp_path) -> AsyncIterator[Console]:
    async with running_console(chromium, tmp_path) as running:
        await running.open()
        yield running
        assert running.page.problems == []


async def test_the_page_shows_the_fleet_and_follows_it(console):
    page = console.page
    assert await page.text("#states") == "2 serving"
    assert await page.text("#hit") == "–"
    await console.traffic()
    await page.until("document.querySelector('#hit').textContent.endsWith('%')")
    await page.until("document.querySelectorAll('#hot-rows tr').length > 0")
    await page.until("document.querySelector('#hit-chart .line.hit').getAttribute('d').includes('L')")
    await page.until("document.querySelector('#speed-chart svg').getAttribute('aria-label').includes('tokens/s')")
    assert "cached" in await page.text("#split-legend")
    await console.picture("desktop")
    await page.scheme("light")
    await console.picture("light")


async def test_rows_keep_their_nodes_from_one_second_to_the_next(console):
    """What has the focus, or is being read, does not go away under the user."""
    page = console.page
    await page.evaluate("document.querySelector('#worker-rows button').focus()")
    before = await page.evaluate("window.first = document.querySelector('#worker-rows tr'); document.title")
    assert before == "Radixfleet"
    out = await page.text("#out")
    await console.traffic(8)
    await page.until(f"document.querySelector('#out').innerText !== {out!r}")
    assert await page.evaluate("window.first === document.querySelector('#worker-rows tr')")
    assert await page.evaluate("document.activeElement === document.querySelector('#worker-rows button')")


async def test_draining_asks_first(console):
    page = console.page
    await page.click("#worker-rows tr:first-child button")
    await page.until("document.querySelector('#confirm').open")
    assert "Drain w0?" in await page.text("#confirm")
    await console.picture("confirm")
    await page.click("#confirm-no")
    await page.until("!document.querySelector('#confirm').open")
    assert console.states() == {"w0": "serving", "w1": "serving"}

    await page.click("#worker-rows tr:first-child button")
    await page.click("#confirm-yes")
    await page.until("document.querySelector('#worker-rows .badge').textContent === 'draining'")
    assert console.states() == {"w0": "draining", "w1": "serving"}
    await page.until("document.querySelector('#worker-rows button').textContent === 'Resume'")

    await page.click("#worker-rows tr:first-child button")
    await page.click("#confirm-yes")
    await page.until("document.querySelector('#worker-rows .badge').textContent === 'serving'")
    assert console.states() == {"w0": "serving", "w1": "serving"}


async def test_where_a_prompt_would_go(console):
    page = console.page
    await console.traffic(3)
    await page.evaluate("document.querySelector('#prompt').focus()")
    await page.type(f"{SHARED} and another question")
    await page.click("#explain button[type=submit]")
    await page.until("document.querySelectorAll('.candidates tbody tr').length === 2")
    expected = await console.client.explain(f"{SHARED} and another question")
    assert await page.text(".verdict b") == expected.worker_id
    assert f"{expected.prompt_tokens} tokens" in await page.text(".verdict")
    assert await page.text("tr.chosen b") == expected.worker_id
    await console.picture("explained")


async def test_a_refusal_is_told(console):
    page = console.page
    for worker in console.router.registry.workers:
        console.router.registry.remove(worker)
    await page.until("!document.querySelector('#no-workers').hidden")
    await page.evaluate("document.querySelector('#prompt').focus()")
    await page.type("hello")
    await page.click("#explain button[type=submit]")
    await page.until("document.querySelector('#explained .problem')")
    console.page.problems.clear()  # the browser lists the 503 as a problem


async def test_all_of_it_by_keyboard(console):
    page = console.page
    await page.press("Tab")
    assert await page.evaluate("document.activeElement.className") == "skip"
    await page.press("Enter")
    await page.until("document.activeElement.id === 'workers'")
    await page.press("Tab")
    assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == "Drain w0"
    await page.press("Enter")
    await page.until("document.querySelector('#confirm').open")
    assert await page.evaluate("document.activeElement.id") == "confirm-no"
    await page.press("Escape")
    await page.until("!document.querySelector('#confirm').open")
    assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == "Drain w0"
    await page.press("Enter")
    await page.until("document.querySelector('#confirm').open")
    await page.press("Tab")
    assert await page.evaluate("document.activeElement.id") == "confirm-yes"
    await page.press("Enter")
    await page.until("document.querySelector('#worker-rows .badge').textContent === 'draining'")
    assert console.states()["w0"] == "draining"


async def test_everything_has_a_name_for_screen_readers(console):
    nameless = await console.page.evaluate(
        "[...document.querySelectorAll('button, input, textarea, select, [role=img]')].filter((e) =>"
        " !e.closest('[hidden]') && !(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim()))"
        ".map((e) => e.outerHTML)"
    )
    assert nameless == []
    headings = await console.page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((e) => e.tagName)")
    assert headings[0] == "H1"
    assert headings.count("H1") == 1
    assert await console.page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize("width", [360, 768, 1090, 1280, 1300])
async def test_nothing_sticks_out_or_is_cut_at_any_width(chromium, tmp_path, width):
    names = ("w0", "worker-with-a-name-as-long-as-those-that-clusters-make-up-7f9c64b5d8-x2vlq")
    async with running_console(chromium, tmp_path, names, console_prompts=True) as console:
        await console.page.size(width, 780, mobile=width < 500)
        await console.open()
        await console.traffic(4)
        await console.page.until("document.querySelectorAll('#hot-rows tr').length > 0")
        await console.page.evaluate("document.querySelector('#prompt').focus()")
        await console.page.type("x" * 300)
        await console.page.click("#explain button[type=submit]")
        await console.page.until("document.querySelector('.candidates')")
        assert await console.overflow() == []
        assert await console.cut() == []
        assert await console.page.evaluate("document.documentElement.scrollWidth") <= width
        await console.picture(f"{width}")
        await console.page.click("#worker-rows button")
        await console.page.until("document.querySelector('#confirm').open")
        assert await console.overflow() == []


async def test_what_users_wrote_is_text_and_nothing_else(chromium, tmp_path):
    attack = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>" * 3
    async with running_console(chromium, tmp_path, console_prompts=True) as console:
        await console.open()
        for _ in range(2):
            await console.client.complete(attack, max_new_tokens=2)
        await console.page.until("document.querySelector('#hot-rows .text')?.textContent.startsWith('<img')")
        assert await console.page.evaluate("document.querySelectorAll('#hot-rows img, #hot-rows script').length") == 0
        assert await console.page.evaluate("document.title") == "Radixfleet"


async def test_a_router_that_goes_is_told_and_found_again(chromium, tmp_path):
    async with running_console(chromium, tmp_path) as console:
        await console.open()
        assert console.router.http is not None
        await console.router.http.close()
        await console.page.until("!document.querySelector('#banner').hidden")
        assert "does not answer" in await console.page.text("#banner")
        assert await console.page.evaluate(ROWS) == 2, "what it said last stays"
        await console.picture("no-answer")


async def test_the_admin_token_is_asked_for_where_it_is_needed(chromium, tmp_path):
    """A client's key, asked for by the browser itself, shows the fleet; draining asks for the admin token."""
    keys = (key_line("bob", KEY),)
    async with running_console(chromium, tmp_path, key=KEY, api_keys=keys, admin_token=TOKEN) as console:
        await console.page.log_in(KEY)
        await console.open()
        await console.page.click("#worker-rows button")
        await console.page.click("#confirm-yes")
        await console.page.until("!document.querySelector('#token-field').hidden")
        assert console.states()["w0"] == "serving"
        await console.page.until("document.activeElement.id === 'token'")
        await console.picture("token")
        await console.page.type(TOKEN)
        await console.page.press("Enter")
        await console.page.until("document.querySelector('#worker-rows .badge').textContent === 'draining'")
        assert await console.page.evaluate("document.cookie") == ""
        assert await console.page.evaluate("localStorage.length + sessionStorage.length") == 0


async def test_a_token_that_the_router_does_not_know_is_forgotten(chromium, tmp_path):
    """It stayed, and went out with every question after it; and the browser forgot the key that shows the page."""
    keys = (key_line("bob", KEY),)
    async with running_console(chromium, tmp_path, key=KEY, api_keys=keys, admin_token=TOKEN) as console:
        page = console.page
        await page.log_in(KEY)
        await console.open()
        await page.click("#worker-rows button")
        await page.click("#confirm-yes")
        await page.until("document.activeElement.id === 'token'")
        await page.type("no-such-token-0123456789")
        await page.press("Enter")
        await page.until("document.querySelector('#confirm-problem').textContent.includes('not known')")
        await page.click("#confirm-no")
        await page.evaluate("document.querySelector('#prompt').focus()")
        await page.type("hello")
        await page.click("#explain button[type=submit]")
        await page.until("document.querySelector('#explained').childElementCount > 0")
        assert await page.evaluate("document.querySelectorAll('.candidates').length") == 1
        assert await page.text("#live-text") == "live"


async def test_what_did_not_carry_the_token_does_not_forget_it(chromium, tmp_path):
    """A look that a proxy refused did, and so did an order with an older token that was refused late."""
    async with running_console(chromium, tmp_path) as console:
        await console.open()
        sent = await console.page.evaluate("""(async () => {
            const api = await import("/console/api.js"), sent = [], refuse = [];
            window.fetch = (_path, { headers }) => new Promise((resolve) => {
                sent.push(headers?.Authorization ?? "");
                refuse.push(() => resolve(new Response("", { status: 403 })));
            });
            const refused = async (asked, index) => { refuse[index](); await asked.catch(() => {}); };
            // The page's own looks are among those that wait.
            const ask = (send) => { const index = sent.length; return [send(), index]; };
            api.useToken("old");
            const late = ask(() => api.drain("w0"));
            api.useToken("new");
            await refused(...late);
            await refused(...ask(() => api.fleet(null)));
            const last = ask(() => api.drain("w0"));
            await refused(...last);
            const after = ask(() => api.drain("w0"));
            return [sent[late[1]], sent[last[1]], sent[after[1]]];
        })()""")
        assert sent == ["Bearer old", "Bearer new", ""]
