"""Other people's routers before workers that do nothing, over HTTP, for `bench_router_path`."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.bench.peers.servers import free_port
from tests.bench.idle_http_worker import TOKENS
from tests.interop.engines import ENVIRONMENTS, WHEELS, environment, gateway_command, process
from tests.support.http_client import Connection, get, post

_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Server:
    """Something that speaks HTTP on this machine; `process`: what is measured, None for a worker itself."""

    port: int
    process: psutil.Process | None = None


@asynccontextmanager
async def running_peers(names: Sequence[str]) -> AsyncIterator[dict[str, Server]]:
    """Each of `names` before the same two workers; and one of those workers, as "http direct"."""
    pythons = {name: await asyncio.to_thread(environment, ENVIRONMENTS / name, (WHEELS[name],)) for name in names}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [free_port(), free_port()]
        for port in workers:
            command = [sys.executable, "-m", "tests.bench.idle_http_worker", str(port)]
            stack.enter_context(process(command, folder / f"{port}.log"))
            await _until_answers(port, "/health", folder / f"{port}.log")
        servers = {"http direct": Server(workers[0])}
        for name, python in pythons.items():
            port, log = free_port(), folder / f"{name}.log"
            urls = [f"http://127.0.0.1:{worker}" for worker in workers]
            child = stack.enter_context(process(gateway_command(name, python, port, urls), log))
            await _until_answers(port, "/v1/completions", log)
            servers[name] = Server(port, psutil.Process(child.pid))
        yield servers


async def _until_answers(port: int, path: str, log: Path) -> None:
    """Wait until what listens there takes requests; a POST where the path is one for requests."""
    body = {"model": "idle", "prompt": "hello", "max_tokens": TOKENS}
    try:
        async with asyncio.timeout(_START_S):
            while True:
                try:
                    answer = await (post(port, path, body) if path.startswith("/v1") else get(port, path))
                    if answer.status == 200:
                        return
                except (OSError, asyncio.IncompleteReadError):
                    pass
                await asyncio.sleep(0.2)
    except TimeoutError:
        tail = (await asyncio.to_thread(log.read_text, errors="replace"))[-2000:]
        raise SystemExit(f"nothing answers at {port}; its log ends:\n{tail}") from None


async def send(connection: Connection, text: str, *, streamed: bool) -> tuple[float, float]:
    """One request; seconds to the first bytes of the answer, and in all."""
    fields = {"model": "idle", "stream": streamed, "max_tokens": TOKENS, "prompt": text}
    body = json.dumps(fields, separators=(",", ":")).encode()
    began_s = time.perf_counter()
    await connection.send("POST", "/v1/completions", body)
    if not streamed:
        answer = await connection.answer()
        assert answer.status == 200, answer.body[:500]
        total_s = time.perf_counter() - began_s
        return total_s, total_s
    status, _ = await connection.head()
    assert status == 200, status
    first_s = 0.0
    while await connection.chunk():
        first_s = first_s or time.perf_counter() - began_s
    return first_s, time.perf_counter() - began_s
