"""The comparison with peers: servers start, freeze, and leave nothing behind, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.bench.peers.clients import session
from deploy.bench.peers.guard import descendants
from deploy.bench.peers.servers import Server, ServerFailed
from tests.support.ports import held_port
from tests.support.processes import survivors
from tests.support.waiting import until

PEER = (sys.executable, "-m", "tests.support.fake_peer")
STUBBORN = "its child ignores SIGTERM"

# As the benchmark does, in a process that a test can kill.
BENCH = """
import asyncio, sys
from pathlib import Path
from deploy.bench.peers.servers import Server
async def main():
    async with Server(sys.argv[3:], {}, int(sys.argv[1]), Path(sys.argv[2])):
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


def pid_in(file: Path) -> psutil.Process:
    return psutil.Process(int(file.read_text()))


async def test_a_server_is_ready_frozen_thawed_and_gone(tmp_path: Path, port: int) -> None:
    child = tmp_path / "child"
    command = [*PEER, "--port", str(port), "--child", str(child)]
    async with session() as http:
        async with Server(command, {}, port, tmp_path / "log") as server:
            await server.ready(http, lambda elapsed_s: None, 60.0)
            await until(child.exists, timeout_s=60.0)
            processes = descendants(os.getpid())
            assert pid_in(child) in processes
            stubborn = pid_in(child)
            server.freeze()
            await until(lambda: stubborn.status() == psutil.STATUS_STOPPED, timeout_s=60.0)
            server.thaw()
            await until(lambda: stubborn.status() != psutil.STATUS_STOPPED, timeout_s=60.0)
            async with http.get(f"http://127.0.0.1:{port}/health") as response:
                assert response.status == 200
        assert not survivors(processes), STUBBORN


async def test_a_frozen_server_ends_too(tmp_path: Path, port: int) -> None:
    async with session() as http, Server([*PEER, "--port", str(port)], {}, port, tmp_path / "log") as server:
        await server.ready(http, lambda elapsed_s: None, 60.0)
        processes = descendants(os.getpid())
        server.freeze()
    assert not survivors(processes)


async def test_one_that_does_not_start_is_told_with_its_last_lines(tmp_path: Path, port: int) -> None:
    program = "import sys; print('loading'); sys.exit('no such model: 7')"
    async with session() as http, Server([sys.executable, "-c", program], {}, port, tmp_path / "log") as server:
        with pytest.raises(ServerFailed, match=r"(?s)ended with exit code 1; the end of .*no such model: 7"):
            await server.ready(http, lambda elapsed_s: None, 60.0)


async def test_one_that_never_gets_ready_is_given_up(tmp_path: Path, port: int) -> None:
    program = "import time; print('compiling', flush=True); time.sleep(3600)"
    async with session() as http, Server([sys.executable, "-c", program], {}, port, tmp_path / "log") as server:
        with pytest.raises(ServerFailed, match="was not ready within"):
            await server.ready(http, lambda elapsed_s: None, 0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_nothing_is_left_of_a_benchmark_that_is_killed(tmp_path: Path, port: int, number: signal.Signals) -> None:
    child = tmp_path / "child"
    command = [*PEER, "--port", str(port), "--child", str(child)]
    bench = subprocess.Popen([sys.executable, "-c", BENCH, str(port), str(tmp_path / "log"), *command])
    try:
        await until(child.exists, timeout_s=60.0)
        processes = descendants(bench.pid)
        assert pid_in(child) in processes
    finally:
        bench.send_signal(number)
        bench.wait(60.0)
    await until(lambda: not survivors(processes), STUBBORN, timeout_s=60.0)


async def test_a_server_dies_with_its_guard(tmp_path: Path, port: int) -> None:
    async with session() as http, Server([*PEER, "--port", str(port)], {}, port, tmp_path / "log") as server:
        await server.ready(http, lambda elapsed_s: None, 60.0)
        guard = next(each for each in psutil.Process().children() if "deploy.bench.peers.guard" in each.cmdline())
        peer = guard.children()
        guard.kill()
        await until(lambda: not survivors(peer), timeout_s=60.0)
