"""`radixfleet top` as an operator runs it: its own process, on a real terminal, against a real router."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from radixfleet.types import Load
from tests.support.fake_worker import FakeWorker
from tests.support.router_fixture import Fleet, fake_worker, running_fleet
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)

ENVIRONMENT = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"}
"""Shells that export COLUMNS do not change it when the window changes."""
TOP = (sys.executable, "-m", "deploy.cli", "top")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Terminal:
    """A pseudoterminal with `radixfleet top` on it."""

    process: asyncio.subprocess.Process
    controller: int
    shown: str = ""
    """Since the last `type` or `resize`, control sequences taken out."""
    raw: str = ""

    def read(self) -> None:
        try:
            data = os.read(self.controller, 65536)
        except OSError:  # the other side is closed
            asyncio.get_running_loop().remove_reader(self.controller)
            return
        self.raw += data.decode(errors="replace")
        self.shown += CONTROL.sub("", data.decode(errors="replace"))

    def type(self, keys: str) -> None:
        self.shown = ""
        os.write(self.controller, keys.encode())

    def resize(self, width: int, height: int) -> None:
        self.shown = ""
        fcntl.ioctl(self.controller, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    async def until(self, *texts: str) -> None:
        await until(lambda: all(text in self.shown for text in texts), f"on the screen: {texts}", timeout_s=90.0)


@asynccontextmanager
async def on_terminal(*arguments: str, width: int = 80, height: int = 24) -> AsyncIterator[Terminal]:
    controller, terminal = pty.openpty()
    fcntl.ioctl(controller, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    os.set_blocking(controller, False)
    process = await asyncio.create_subprocess_exec(
        *TOP,
        *arguments,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=ENVIRONMENT,
    )
    before = termios.tcgetattr(terminal)
    shown = Terminal(process, controller)
    asyncio.get_running_loop().add_reader(controller, shown.read)
    try:
        yield shown
        await asyncio.wait_for(process.wait(), 60.0)
        assert termios.tcgetattr(terminal)[3] & (termios.ECHO | termios.ICANON), "the terminal is as it was"
        assert before[3] == termios.tcgetattr(terminal)[3]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(controller)
        os.close(controller)
        os.close(terminal)


async def run(*arguments: str) -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *TOP, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    out, err = await asyncio.wait_for(process.communicate(), 120.0)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def busy(worker_id: str, running: int) -> FakeWorker:
    return fake_worker(worker_id, extra_load=Load(running_requests=running, kv_protected_tokens=100 * running))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with running_fleet([busy("w-one", 3), busy("w-two", 8)]) as running:
        yield running


async def test_keys_on_a_terminal(fleet):
    async with on_terminal("--endpoint", fleet.router.address) as top:
        await top.until("2 serving", "w-one", "w-two", "q quit")
        top.type("w")
        await top.until("s sort: by requests")
        assert top.shown.index("w-two") < top.shown.index("w-one")
        top.type("r")
        await top.until("by requests (reversed)")
        top.type("\x1b[B\r")
        await top.until("sketch", "w-two  127.0.0.1")
        top.type("\x1b")
        await top.until("w-one", "bubble")
        top.type("?")
        await top.until("order by bubble")
        top.type("q")
    assert top.process.returncode == 0
    assert "\x1b[?1049l" in top.raw, "the screen that was there before is back"


async def test_ctrl_c_quits_and_gives_the_terminal_back(fleet):
    async with on_terminal("--endpoint", fleet.router.address) as top:
        await top.until("w-one")
        top.type("\x03")
    assert top.process.returncode == 0


async def test_another_size_draws_another_screen(fleet):
    async with on_terminal("--endpoint", fleet.router.address) as top:
        await top.until("w-one")
        assert " model " not in top.shown
        top.resize(132, 30)
        await top.until("w-two", " model ")
        top.type("q")


async def test_a_router_that_restarts_is_found_again():
    worker = busy("w-one", 3)
    async with AsyncExitStack() as first:
        fleet = await first.enter_async_context(running_fleet([worker]))
        port = int(fleet.router.address.rpartition(":")[2])
        async with on_terminal("--endpoint", fleet.router.address) as top:
            await top.until("w-one")
            top.shown = ""
            await first.aclose()
            await top.until("No answer for", "w-one")  # what it said last stays
            async with running_fleet([worker], port=port):
                top.shown = ""
                await top.until("1 serving", "q quit")
                assert "No answer" not in top.shown[top.shown.rindex("radixfleet ") :]
                top.type("q")


async def test_once_prints_a_table_and_ends(fleet):
    code, out, err = await run("--once", "--endpoint", fleet.router.address, "--sort", "requests")
    assert (code, err) == (0, "")
    assert out.index("w-two") < out.index("w-one")
    assert "\x1b" not in out


async def test_once_as_json_is_one_object(fleet):
    code, out, _ = await run("--once", "--json", "--endpoint", fleet.router.address)
    assert code == 0
    seen = json.loads(out)
    assert seen["fleet"]["states"]["serving"] == 2
    assert [row["running"] for row in seen["workers"]] == [3, 8]
    assert seen["workers"][0]["kv"]["used"] == 300


async def test_without_a_terminal_one_table_follows_the_other(fleet):
    process = await asyncio.create_subprocess_exec(
        *(*TOP, "--endpoint", fleet.router.address, "--interval", "0.2"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    heads = 0
    async with asyncio.timeout(120):
        while heads < 3:
            line = (await process.stdout.readline()).decode()
            assert line, "it ended"
            heads += line.startswith("radixfleet ")
    process.terminate()
    await process.wait()


@pytest.mark.parametrize("options", [("--once",), (), ("--json",)], ids=["once", "in a pipe", "as JSON"])
async def test_nobody_there_is_an_error_with_its_own_code(options):
    code, out, err = await run(*options, "--endpoint", "127.0.0.1:9")
    assert (code, out) == (3, "")
    assert err.startswith("radixfleet: ")
    assert err.count("\n") == 2
    assert "Does a router or worker run there?" in err
