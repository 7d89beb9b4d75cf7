"""What the router adds to a request, and what it costs: `python -m tests.bench.bench_router_path`.

A router process before worker processes that do nothing: they answer with 16 tokens, one a message, at once. Measured
are the client's time to the first message and to the end, and the CPU time of the router's process, by the way that
requests take:

    direct      client -> worker: what gRPC and the worker themselves take; the router's part is what is more than this
    calls       client -> router -> worker, a call for each request (--no-link)
    link        client -> router -> worker, one stream for all requests
    look-aside  client asks the router (Fleet.Route), then worker

Three quarters of each prompt is shared by all. Everything shares this machine's cores, the client too: what counts is
one row beside another. Prompts as text are tokenized by the demonstration model's tokenizer where that is here, else by
one that makes a token of each byte.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil

from radixfleet.channel import open_channel
from radixfleet.convert import pack_tokens
from radixfleet.text import Tokenizer, TokenizerSpec
from radixfleet.types import Capacity
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_worker import Call, FakeWorker, Script
from worker.model.tokenizer_files import load_tokenizer_spec

LENGTHS = (500, 8_000, 64_000)
CONCURRENCIES = (1, 32)
REQUESTS = {1: 150, 32: 600}
TOKENS = 16
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "some",
    "other",
    "animals",
    "do",
    "likewise",
]
_START_S = 30.0

Request: TypeAlias = inference_pb2.GenerateRequest
Send: TypeAlias = Callable[[Request], Awaitable[tuple[float, float]]]
"""Carries a request to its end; seconds to the first message, and in all."""


class _Nobody(list[Call]):
    """No record of calls, and so no load."""

    def append(self, item: Call) -> None:
        """Forget it."""


class IdleWorker(FakeWorker):
    """Has no cache; tells of leased requests in its heartbeats, of which there are 20 a second."""

    def __init__(self, worker_id: str) -> None:
        self._ended: list[str] = []
        super().__init__(
            tokenizer_spec(),
            worker_id,
            capacity=Capacity(1 << 30, 16, 4096, 8192),
            script=self._script,
            calls=_Nobody(),
        )

    def _script(self, call: Call) -> Script:
        if call.request.lease_id:
            self._ended.append(call.request.lease_id)
        return Script(tokens=TOKENS)

    def prefill(self, call: Call) -> None:
        """Compute nothing."""

    def update(self, **fields: Any) -> worker_pb2.StateUpdate:
        """With the leases that ended since the last one."""
        ended, self._ended = self._ended, []
        phase = worker_pb2.LeaseEvent.PHASE_ENDED
        events = [worker_pb2.LeaseEvent(lease_id=lease_id, phase=phase) for lease_id in ended]
        return super().update(lease_events=events, **fields)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent."""

    form: str
    characters: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    way: str
    load: Load
    first_s: Sequence[float]
    total_s: Sequence[float]
    router_cpu_s: float

    def __str__(self) -> str:
        first, total = sorted(self.first_s), sorted(self.total_s)
        p50, p99 = statistics.median(total), total[int(0.99 * (len(total) - 1))]
        cpu_us = self.router_cpu_s / len(total) * 1e6
        return (
            f"{self.load.form:5} {self.load.characters:6} {self.load.concurrency:7} {self.way:10} "
            f"{statistics.median(first) * 1e3:8.2f} {p50 * 1e3:8.2f} {p99 * 1e3:8.2f} {cpu_us:8.0f}"
        )


def tokenizer_spec() -> TokenizerSpec:
    """Of the demonstration model, where it has been fetched."""
    found = sorted((Path.home() / ".cache" / "radixfleet").rglob("*.gguf"))
    return load_tokenizer_spec(found[0]) if found else byte_spec()


async def serve_worker(worker_id: str, address_file: Path) -> None:
    """A worker that does nothing, until the process is ended."""
    worker = await IdleWorker(worker_id).start()
    await asyncio.to_thread(address_file.write_text, worker.address + "\n")
    await asyncio.Event().wait()


@asynccontextmanager
async def process(address_file: Path, *arguments: str) -> AsyncIterator[tuple[psutil.Process, str]]:
    """A process that writes its address to `address_file`."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments)
    try:
        async with asyncio.timeout(_START_S):
            while not (address := await asyncio.to_thread(_read, address_file)):  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)
        yield psutil.Process(child.pid), address
    finally:
        child.terminate()
        await child.wait()


def _read(path: Path) -> str:
    text = path.read_text() if path.exists() else ""
    return text.strip() if text.endswith("\n") else ""


def prompts(form: str, characters: int, count: int, tokenizer: Tokenizer) -> list[inference_pb2.Prompt]:
    """Texts, or the ids of as many characters at 4 a token."""
    rng = np.random.default_rng(characters)

    def words(size: int) -> str:
        chosen = rng.integers(0, len(WORDS), size // 4 + 1)
        return " ".join(WORDS[index] for index in chosen)[:size]

    if form == "text":
        shared = words(characters * 3 // 4)
        return [inference_pb2.Prompt(text=shared + words(characters // 4)) for _ in range(count)]
    common = rng.integers(0, tokenizer.vocab_size, characters // 4 * 3 // 4)
    made = []
    for _ in range(count):
        own = rng.integers(0, tokenizer.vocab_size, characters // 16)
        ids = np.concatenate([common, own]).astype(np.uint32)
        made.append(inference_pb2.Prompt(token_ids=pack_tokens(ids)))
    return made


async def stream(stub: inference_pb2_grpc.InferenceStub, request: Request, began_s: float) -> tuple[float, float]:
    """Read one answer to its end."""
    first_s = 0.0
    async for _ in stub.Generate(request):
        first_s = first_s or time.perf_counter() - began_s
    return first_s, time.perf_counter() - began_s


def straight(stub: inference_pb2_grpc.InferenceStub) -> Send:
    """By Generate."""
    return lambda request: stream(stub, request, time.perf_counter())


def look_aside(fleet: fleet_pb2_grpc.FleetStub, workers: dict[str, inference_pb2_grpc.InferenceStub]) -> Send:
    """By Route, and then from the worker."""

    async def send(request: Request) -> tuple[float, float]:
        began_s = time.perf_counter()
        route = await fleet.Route(fleet_pb2.RouteRequest(request=request))
        direct = Request(
            prompt=inference_pb2.Prompt(token_ids=route.token_ids), sampling=request.sampling, lease_id=route.lease_id
        )
        return await stream(workers[route.address], direct, began_s)

    return send


async def measure(send: Send, requests: Sequence[Request], concurrency: int) -> list[tuple[float, float]]:
    """All requests, so many at a time."""
    waiting = iter(requests)
    times = []

    async def client() -> None:
        for request in waiting:
            times.append(await send(request))  # noqa: PERF401  shared by the clients

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return times


async def bench(forms: Sequence[str], lengths: Sequence[int]) -> None:
    """Every way, form, length and number of clients; one router runs at a time."""
    tokenizer = Tokenizer(tokenizer_spec())
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {}
        for name in ("w0", "w1"):
            file = folder / name
            command = ("tests.bench.bench_router_path", "--serve-worker", name, "--address-file", str(file))
            _, address = await stack.enter_async_context(process(file, *command))
            channel = await stack.enter_async_context(open_channel(address))
            workers[address] = inference_pb2_grpc.InferenceStub(channel)
        loads = [
            Load(form, characters, concurrency)
            for form in forms
            for characters in lengths
            for concurrency in CONCURRENCIES
        ]
        rows += [
            await one_row("direct", straight(next(iter(workers.values()))), None, load, tokenizer) for load in loads
        ]
        for switch, ways in (("--no-link", ("calls",)), ("--link", ("link", "look-aside"))):
            file = folder / switch
            command = ("router", "--port", "0", "--metrics-port", "0", "--http-port", "-1", switch)
            command += ("--workers", ",".join(workers), "--address-file", str(file), "--log-level", "warning")
            async with process(file, *command) as (router, address), open_channel(address) as channel:
                inference = inference_pb2_grpc.InferenceStub(channel)
                await until_serving(inference)
                sends = {way: straight(inference) for way in ways}
                if "look-aside" in sends:
                    sends["look-aside"] = look_aside(fleet_pb2_grpc.FleetStub(channel), workers)
                rows += [await one_row(way, sends[way], router, load, tokenizer) for way in ways for load in loads]
    print("form   chars  at once way     first p50  all p50  all p99  router CPU, us a request  (times in ms)")
    for row in sorted(rows, key=lambda row: loads.index(row.load)):
        print(row)


async def until_serving(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Wait until the router has found a worker."""
    async with asyncio.timeout(_START_S):
        while True:
            try:
                await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
            except Exception:  # noqa: BLE001  not yet
                await asyncio.sleep(0.1)
            else:
                return


async def one_row(way: str, send: Send, router: psutil.Process | None, load: Load, tokenizer: Tokenizer) -> Row:
    """Warm up, then measure."""
    count = REQUESTS[load.concurrency]
    # The workers take token ids alone: a router's ids for a text are as many.
    form = "ids" if way == "direct" else load.form
    sampling = inference_pb2.SamplingParams(max_new_tokens=TOKENS)
    made = prompts(form, load.characters, count + load.concurrency, tokenizer)
    requests = [Request(prompt=prompt, sampling=sampling) for prompt in made]
    await measure(send, requests[: load.concurrency], load.concurrency)
    before_s = _cpu_s(router)
    times = await measure(send, requests[load.concurrency :], load.concurrency)
    cpu_s = _cpu_s(router) - before_s
    return Row(way, load, [first_s for first_s, _ in times], [total_s for _, total_s in times], cpu_s)


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else "")
    parser.add_argument("--forms", nargs="+", default=["ids", "text"], choices=["ids", "text"])
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--serve-worker", help=argparse.SUPPRESS)
    parser.add_argument("--address-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_worker:
        asyncio.run(serve_worker(arguments.serve_worker, arguments.address_file))
    else:
        asyncio.run(bench(arguments.forms, arguments.lengths))


if __name__ == "__main__":
    main()
