"""What a proxied token costs the router: `python -m tests.bench.bench_proxied_tokens`.

A router process before one worker process whose "engine" makes a token for every running request each `--step-ms`, as
an engine does, and sends it at once. Printed is the CPU time of the router's process for each token of all requests,
by how many run at once, less what it takes when it is idle. The start of a request costs besides (see
`bench_router_path`); 64 tokens share it here.

With --against DIRECTORY, a checkout of another version, its router is measured beside, in turns, on the same load.
With --step-ms 0 the worker sends as fast as it can, and what is printed besides is what the router then carries.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from radixfleet.channel import open_channel
from radixfleet.types import Capacity
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.bench.bench_router_path import cpu_s, tokenizer_spec, until_serving
from tests.support.fake_worker import Call, FakeWorker, Script

TOKENS = 64
STREAMS = (1, 8, 32, 128)
ROUNDS = 5
IDLE_S = 2.0


class _Nobody(list[Call]):
    """No record of calls, and so no load."""

    def append(self, item: Call) -> None:
        """Forget it."""


class Steps(asyncio.Event):
    """A token for everybody, each so many seconds; 0: at once."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s
        self._next = asyncio.Event()

    async def wait(self) -> Literal[True]:
        """Until the next step."""
        if self._step_s:
            await self._next.wait()
        return True

    async def run(self) -> None:
        """Step, for ever."""
        while True:
            await asyncio.sleep(self._step_s or 1.0)
            reached, self._next = self._next, asyncio.Event()
            reached.set()


async def serve_worker(step_s: float, file: Path) -> None:
    """Until the process is ended."""
    steps = Steps(step_s)
    worker = FakeWorker(
        tokenizer_spec(),
        capacity=Capacity(1 << 30, 16, 4096, 8192),
        script=lambda _: Script(tokens=TOKENS, before_token=steps),
        calls=_Nobody(),
    )
    await worker.start()
    await asyncio.to_thread(file.write_text, worker.address + "\n")
    await steps.run()


@asynccontextmanager
async def started(file: Path, *command: str, path: Path | None = None) -> AsyncIterator[tuple[psutil.Process, str]]:
    """A process that writes its address to `file`; `path`: of the checkout that it runs from."""
    environment = os.environ | ({"PYTHONPATH": f"{path / 'proto'}:{path}"} if path else {})
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, env=environment, cwd=path)
    try:
        async with asyncio.timeout(120):
            while not (file.exists() and file.read_text().endswith("\n")):  # noqa: ASYNC110, ASYNC240  another process
                await asyncio.sleep(0.05)
        yield psutil.Process(child.pid), file.read_text().strip()  # noqa: ASYNC240  a few bytes
    finally:
        child.terminate()
        await child.wait()


@dataclass(slots=True)
class Measured:
    """One router with so many streams."""

    cpu_us: list[float] = field(default_factory=list)
    """A token, by round."""
    tokens_per_s: list[float] = field(default_factory=list)
    messages: int = 0
    tokens: int = 0


async def stream(stub: inference_pb2_grpc.InferenceStub) -> tuple[int, int]:
    """One request; its messages with tokens, and its tokens."""
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=range(100)))
    messages = tokens = 0
    async for response in stub.Generate(inference_pb2.GenerateRequest(prompt=prompt)):
        messages += response.WhichOneof("event") == "delta"
        tokens += len(response.delta.token_ids)
    return messages, tokens


async def idle_share(process: psutil.Process) -> float:
    """CPU seconds a second of a router that has nothing to do but to hear the worker's heartbeats."""
    before_s, began_s = cpu_s(process), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    return (cpu_s(process) - before_s) / (time.perf_counter() - began_s)


async def measure(
    process: psutil.Process, stub: inference_pb2_grpc.InferenceStub, streams: int, idle: float, found: Measured
) -> None:
    """One round."""
    before_s, began_s = cpu_s(process), time.perf_counter()
    counts = await asyncio.gather(*(stream(stub) for _ in range(streams)))
    took_s = time.perf_counter() - began_s
    spent_s = cpu_s(process) - before_s - idle * took_s
    tokens = sum(count for _, count in counts)
    assert tokens == streams * TOKENS, tokens
    found.cpu_us.append(spent_s / tokens * 1e6)
    found.tokens_per_s.append(tokens / took_s)
    found.messages += sum(count for count, _ in counts)
    found.tokens += tokens


async def bench(streams: Sequence[int], against: Path | None, step_ms: float, rounds: int) -> None:
    """In turns."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        serve = ("tests.bench.bench_proxied_tokens", "--serve-worker", str(folder / "w"), "--step-ms", str(step_ms))
        _, worker = await stack.enter_async_context(started(folder / "w", *serve))
        routers = {}
        for name, path in {"this": None, **({"other": against} if against else {})}.items():
            command = ("router", "--port", "0", "--metrics-port", "0", "--http-port", "-1", "--log-level", "error")
            options = ("--workers", worker, "--address-file", str(folder / name))
            process, address = await stack.enter_async_context(started(folder / name, *command, *options, path=path))
            stub = inference_pb2_grpc.InferenceStub(await stack.enter_async_context(open_channel(address)))
            await until_serving(stub)
            routers[name] = process, stub, await idle_share(process)
        print("streams  router  CPU a token, us: median, least   tokens a message   tokens/s")
        for count in streams:
            results = {name: Measured() for name in routers}
            for turn in range(rounds + 1):
                for name, (process, stub, idle) in routers.items():
                    await measure(process, stub, count, idle, results[name] if turn else Measured())
            for name, found in results.items():
                print(
                    f"{count:7}  {name:6} {statistics.median(found.cpu_us):22.1f} {min(found.cpu_us):8.1f} "
                    f"{found.tokens / found.messages:18.2f} {statistics.median(found.tokens_per_s):10.0f}",
                    flush=True,
                )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--serve-worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_worker:
        asyncio.run(serve_worker(arguments.step_ms / 1e3, arguments.serve_worker))
    else:
        asyncio.run(bench(arguments.streams, arguments.against, arguments.step_ms, arguments.rounds))


if __name__ == "__main__":
    main()
