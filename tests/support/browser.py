"""A headless Chromium, driven over the DevTools protocol: as much of it as the console's tests need.

async with browser(tmp_path) as chromium, chromium.page(width=360) as page:
    await page.goto(url)
    await page.until("document.title === 'Radixfleet'")
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_POLL_S = 0.05
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
_TEXTS = {"Enter": "\r", " ": " "}


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        """What the page's own console complained of: exceptions, refused loads, violated policies."""
        self._password = ""
        self._tasks: set[asyncio.Task[object]] = set()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, to this tab."""
        return await self._browser.call(method, self._session, **parameters)

    async def goto(self, url: str) -> None:
        """Load an address."""
        answer = await self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what it resolves to."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description", answer))
        return answer["result"].get("value")

    async def until(self, condition: str, *, timeout_s: float = 40.0) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.evaluate(f"Boolean({condition})"):  # noqa: ASYNC110  another process's condition
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"waited {timeout_s} s in vain for {condition}; the page says:\n{text}") from None

    async def text(self, selector: str) -> str:
        """What an element says."""
        text = await self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText")
        assert isinstance(text, str), f"there is no {selector}"
        return text

    async def press(self, key: str) -> None:
        """A key of the keyboard."""
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        text = {"text": _TEXTS[key]} if key in _TEXTS else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def type(self, text: str) -> None:
        """Into the element that has the focus."""
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        """Where the middle of an element is."""
        place = await self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        mouse = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type="mousePressed", **mouse)
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", **mouse)

    async def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        """The window, or the phone's screen."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=mobile, deviceScaleFactor=1.0
        )

    async def scheme(self, name: str) -> None:
        """dark or light."""
        feature = {"name": "prefers-color-scheme", "value": name}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """As PNG; with `whole` all of the page."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))  # noqa: ASYNC240  nothing else waits in a test

    def hear(self, method: str, parameters: dict[str, Any]) -> None:
        """An event of this tab."""
        if method == "Runtime.exceptionThrown":
            self.problems.append(parameters["exceptionDetails"].get("text", "exception"))
        elif method == "Fetch.authRequired":
            self._soon(self._authenticate(parameters["requestId"]))
        elif method == "Fetch.requestPaused":
            self._soon(self.call("Fetch.continueRequest", requestId=parameters["requestId"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")

    async def log_in(self, password: str) -> None:
        """Answer the browser's question for a name and password with this, once for each request that asks."""
        self._password = password
        await self.call("Fetch.enable", handleAuthRequests=True)

    async def _authenticate(self, request: str) -> None:
        answer = {"response": "ProvideCredentials", "username": "anybody", "password": self._password}
        await self.call("Fetch.continueWithAuth", requestId=request, authChallengeResponse=answer)

    def _soon(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Browser:
    """A running Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        return await asyncio.wait_for(answer, 30.0)

    async def listen(self) -> None:
        """Take in what it says, until it ends."""
        async for received in self._socket:
            message = json.loads(received.data)
            if "id" in message:
                waiting = self._waiting.pop(message["id"])
                if "error" in message:
                    waiting.set_exception(AssertionError(message["error"]))
                elif not waiting.done():
                    waiting.set_result(message["result"])
            elif page := self._pages.get(message.get("sessionId", "")):
                page.hear(message["method"], message["params"])

    @asynccontextmanager
    async def page(self, width: int = 1280, height: int = 900) -> AsyncIterator[Page]:
        """A new tab, of its own profile; closed when the block is left."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        await page.size(width, height)
        try:
            yield page
        finally:
            await self.call("Target.disposeBrowserContext", browserContextId=context)


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    """A Chromium with a fresh profile under `folder`; ended when the block is left."""
    assert CHROMIUM is not None, "no Chromium is installed"
    profile = folder / "chromium"
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port, path = await _devtools(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0) as socket:
                running = Browser(socket)
                listening = asyncio.create_task(running.listen())
                yield running
                await socket.send_json({"id": 0, "method": "Browser.close"})
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
    finally:
        try:
            await asyncio.wait_for(process.wait(), 5.0)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _devtools(file: Path) -> tuple[str, str]:
    """Where it listens: it writes that down when it does."""
    async with asyncio.timeout(60.0):
        while not (file.exists() and file.read_text().count("\n")):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(_POLL_S)
    port, path = file.read_text().splitlines()[:2]  # noqa: ASYNC240
    return port, path
