"""A server that answers like an engine behind `/v1/completions` and computes nothing: for tests of the comparison.

In a test's own process by `serving`, or as a process: `python -m tests.support.fake_peer --port N`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web


class FakePeer:
    """Streams as many tokens as asked, less `lacking`. `counts`: it tells with each chunk how many there are."""

    def __init__(self, *, counts: bool = True, lacking: int = 0, error: str = "", status: int = 200) -> None:
        self.counts = counts
        self.lacking = lacking
        self.error = error
        self.status = status
        self.bodies: list[dict[str, Any]] = []
        self.connections: set[object] = set()
        """Those on which it was asked."""

    def application(self) -> web.Application:
        """To be run."""
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_post("/v1/completions", self._complete)
        return application

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.connections.add(request.transport)
        if self.status != 200:
            return web.Response(status=self.status, text="no room")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(_event({"choices": [{"index": 0, "text": ""}]}))
        prompt_tokens, new_tokens = len(body["prompt"]), body["max_tokens"] - self.lacking
        for index in range(new_tokens):
            chunk: dict[str, Any] = {"choices": [{"index": 0, "text": f" w{body['prompt'][index]}"}]}
            if self.counts:
                chunk["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": index + 1}
            await response.write(_event(chunk))
        if self.error:
            await response.write(_event({"error": {"message": self.error}}))
            return response
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


@asynccontextmanager
async def serving(peer: FakePeer) -> AsyncIterator[int]:
    """The port at which it listens."""
    runner = web.AppRunner(peer.application())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def main() -> None:
    """As a process. `--child FILE`: with a process below it that ignores SIGTERM and writes its id to the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--child", type=Path)
    parser.add_argument("--lacking", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.child is not None:
        program = "import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        program += "file = sys.argv[1]; open(file + '.new', 'w').write(str(os.getpid())); "
        program += "os.rename(file + '.new', file); signal.pause()"
        subprocess.Popen([sys.executable, "-c", program, str(arguments.child)])
    asyncio.run(_serve(FakePeer(lacking=arguments.lacking), arguments.port))


async def _serve(peer: FakePeer, port: int) -> None:
    runner = web.AppRunner(peer.application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
