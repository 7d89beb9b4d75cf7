"""What the router adds to a request, and what it costs: `python -m tests.bench.bench_router_path`.

A router process before worker processes that do nothing: they answer with 16 tokens at once, one a message or all in
one. Measured are the client's time to the first message and to the end, and the CPU time of the router's process, by
the way that requests take:

    direct      client -> worker: what gRPC and the worker themselves take
    calls       client -> router -> worker, a call for each request (--no-link)
    link        client -> router -> worker, one stream for all requests
    look-aside  client asks the router (Fleet.Route), then worker
    routed      the same, asked over one stream (Fleet.RouteStream)
    echo        the same as routed, from a server of grpc.aio that answers with a constant: the part that is not ours

A router also follows its workers, which costs it CPU by the second and not by the request: here each tells something
20 times a second, as busy ones do. What a second without requests takes is printed first. The slower the workers and
this client, the more of such seconds a request takes, so the last column is without them: what the request itself
costs, for the peers as for us.

Tried, and not worth it: writing answers from the task that reads, instead of waking one that writes (nothing);
GRPC_POLL_STRATEGY=poll and gRPC's experiments pollset_alternative and event_engine_callback_cq (no clear gain). What
does help is gRPC's older poller, GRPC_EXPERIMENTS=-event_engine_client,-event_engine_listener: one thread less between
a message and the event loop, and a quarter less CPU for "echo". It is not the router's default, because gRPC is about
to remove it, and then complains of the name.

With --peers smg sglang-router, beside them, over HTTP, before workers that do as little:

    http direct                client -> worker
    smg, sglang-router         client -> their router (cache_aware) -> worker

All of it runs at once, and the ways are asked in turns, a few requests at a time, so that what else happens on the
machine happens to all. With --ways, only those are taken; with --against DIRECTORY, a checkout of another version, its
router is asked too, by ways with a * behind their names. "Added" is a way's time less that of the direct way by the
same protocol. Three quarters of each prompt is shared by all. Everything shares this machine's cores, the client too:
what counts is one row beside another.
Prompts as text are tokenized by the demonstration model's tokenizer where that is here, else by one that makes a token
of each byte; the peers hash characters, so our prompts of token ids are what compares with them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio
import numpy as np
import psutil

from radixfleet.channel import open_channel
from radixfleet.convert import pack_tokens
from radixfleet.route_asker import RouteAsker
from radixfleet.text import Tokenizer, TokenizerSpec
from radixfleet.types import Capacity
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2
from tests.bench import router_peers
from tests.interop.engines import WHEELS
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_worker import Call, FakeWorker, Script
from tests.support.http_client import Connection
from worker.model.tokenizer_files import load_tokenizer_spec

LENGTHS = (500, 8_000, 64_000)
ROUNDS = 6
WAYS = ("calls", "link", "look-aside", "routed", "echo")
REQUESTS = {1: 30, 32: 128}
"""A round, by concurrency."""
WHOLE = "whole"
"""A request of this id is answered in one message."""
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
_START_S = 120.0
_IDLE_S = 3.0

Request: TypeAlias = inference_pb2.GenerateRequest
Process: TypeAlias = tuple[psutil.Process, str]
"""One that runs, and its address."""


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
        return Script(tokens=TOKENS, tokens_a_delta=TOKENS if call.request.request_id == WHOLE else 1)

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
    streamed: bool


@dataclass(slots=True)
class Row:
    """One way under one load, over all rounds."""

    way: str
    load: Load
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    router_cpu_s: float = 0.0
    idle_cpu_s: float = 0.0
    """What the router would have taken in that time without requests."""

    def p(self, share: float) -> float:
        """A percentile of the whole time, in ms."""
        return sorted(self.total_s)[int(share * (len(self.total_s) - 1))] * 1e3

    def line(self, direct: Row) -> str:
        """`direct`: the same without a router."""
        own_s = self.router_cpu_s - self.idle_cpu_s
        cpu = (
            ""
            if self is direct
            else " ".join(f"{s / len(self.total_s) * 1e6:8.0f}" for s in (self.router_cpu_s, own_s))
        )
        added = "" if self is direct else f"{self.p(0.5) - direct.p(0.5):8.2f} {self.p(0.99) - direct.p(0.99):8.2f}"
        load = self.load
        kind = "stream" if load.streamed else "whole"
        return (
            f"{load.form:5} {load.characters:6} {load.concurrency:8} {kind:6} {self.way:13} "
            f"{statistics.median(self.first_s) * 1e3:9.2f} {self.p(0.5):8.2f} {self.p(0.99):8.2f} {added:17} {cpu}"
        )


@dataclass(frozen=True, slots=True)
class Way:
    """One way that requests take."""

    name: str
    send: Callable[[Question, bool], Awaitable[tuple[float, float]]]
    """A question, and whether its answer is streamed; seconds to the first message, and in all."""
    direct: str
    """The way without a router."""
    process: psutil.Process | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as our protocol and as HTTP carry it."""

    prompt: inference_pb2.Prompt
    text: str


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
async def process(address_file: Path, *arguments: str, checkout: Path | None = None) -> AsyncIterator[Process]:
    """A process that writes its address to `address_file`; `checkout`: the code that it runs, if not this."""
    environment = os.environ | ({"PYTHONPATH": f"{checkout / 'proto'}:{checkout}"} if checkout else {})
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, env=environment, cwd=checkout)
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


def request_of(question: Question, streamed: bool) -> Request:
    """Of our protocol."""
    sampling = inference_pb2.SamplingParams(max_new_tokens=TOKENS)
    return Request(prompt=question.prompt, sampling=sampling, request_id="" if streamed else WHOLE)


def straight(stub: inference_pb2_grpc.InferenceStub) -> Callable[[Question, bool], Awaitable[tuple[float, float]]]:
    """By Generate."""

    async def send(question: Question, streamed: bool) -> tuple[float, float]:
        request = request_of(question, streamed)
        return await stream(stub, request, time.perf_counter())

    return send


def look_aside(
    route: Callable[[Request], Awaitable[fleet_pb2.RouteResponse]], workers: dict[str, inference_pb2_grpc.InferenceStub]
) -> Callable[[Question, bool], Awaitable[tuple[float, float]]]:
    """Ask the router, and then the worker."""

    async def send(question: Question, streamed: bool) -> tuple[float, float]:
        request = request_of(question, streamed)
        began_s = time.perf_counter()
        routed = await route(request)
        token_ids = routed.token_ids if routed.HasField("token_ids") else question.prompt.token_ids
        direct = Request(
            prompt=inference_pb2.Prompt(token_ids=token_ids),
            sampling=request.sampling,
            lease_id=routed.lease_id,
            request_id=request.request_id,
        )
        return await stream(workers[routed.address], direct, began_s)

    return send


def by_calls(fleet: fleet_pb2_grpc.FleetStub) -> Callable[[Request], Awaitable[fleet_pb2.RouteResponse]]:
    """Fleet.Route."""

    async def route(request: Request) -> fleet_pb2.RouteResponse:
        routed: fleet_pb2.RouteResponse = await fleet.Route(fleet_pb2.RouteRequest(request=request))
        return routed

    return route


def by_http(port: int) -> Callable[[Question, bool], Awaitable[tuple[float, float]]]:
    """On connections that are kept."""
    idle: list[Connection] = []

    async def send(question: Question, streamed: bool) -> tuple[float, float]:
        connection = idle.pop() if idle else Connection(*await asyncio.open_connection("127.0.0.1", port))
        times = await router_peers.send(connection, question.text, streamed=streamed)
        idle.append(connection)
        return times

    return send


async def measure(way: Way, questions: Sequence[Question], load: Load) -> list[tuple[float, float]]:
    """All questions, so many at a time."""
    waiting = iter(questions)
    times = []

    async def client() -> None:
        for question in waiting:
            times.append(await way.send(question, load.streamed))  # noqa: PERF401  shared by the clients

    await asyncio.gather(*(client() for _ in range(load.concurrency)))
    return times


async def bench(
    loads: Sequence[Load], wanted: Sequence[str], peers: Sequence[str], rounds: int, against: Path | None
) -> None:
    """Every load by every way, in turns."""
    tokenizer = Tokenizer(tokenizer_spec())
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways = await our_ways(stack, folder, wanted, against)
        if peers:
            for name, server in (await stack.enter_async_context(router_peers.running_peers(peers))).items():
                ways.append(Way(name, by_http(server.port), "http direct", server.process))
        idle = {way.name: await idle_share(way.process) for way in ways if way.process is not None}
        for name, share in idle.items():
            print(f"{name:13} without requests {share * 1e6:8.0f} us of CPU a second", flush=True)
        print("times in ms; CPU of the router in us, and without following its workers; the peers get prompts as text")
        print(
            "form   chars  at once answer way           first p50  all p50  all p99   added p50, p99     CPU  without"
        )
        for load in loads:
            await one_load(load, ways, idle, tokenizer, rounds)


async def idle_share(process: psutil.Process) -> float:
    """CPU time that it takes by the second while nobody asks anything."""
    before_s, began_s = cpu_s(process), time.perf_counter()
    await asyncio.sleep(_IDLE_S)
    return (cpu_s(process) - before_s) / (time.perf_counter() - began_s)


async def our_ways(stack: AsyncExitStack, folder: Path, wanted: Sequence[str], against: Path | None) -> list[Way]:
    """Two workers, and before them a router for each of the `wanted` ways that goes through one."""
    workers = {}
    for name in ("w0", "w1"):
        command = ("tests.bench.bench_router_path", "--serve-worker", name, "--address-file", str(folder / name))
        _, address = await stack.enter_async_context(process(folder / name, *command))
        workers[address] = inference_pb2_grpc.InferenceStub(await stack.enter_async_context(open_channel(address)))
    ways = [Way("direct", straight(next(iter(workers.values()))), "direct")]
    for name in wanted:
        if name == "echo":
            command = ("tests.bench.echo_router", str(folder / name), next(iter(workers)))
            router, address = await stack.enter_async_context(process(folder / name, *command))
            channel = await stack.enter_async_context(open_channel(address))
            ways.append(Way(name, our_way("routed", channel, workers, stack), "direct", process=router))
            continue
        for checkout in (None, against) if against else (None,):
            mark = "*" if checkout else ""
            switch = "--no-link" if name == "calls" else "--link"
            router, address = await stack.enter_async_context(
                router_process(folder / f"{name}{mark}", workers, switch, checkout=checkout)
            )
            channel = await stack.enter_async_context(open_channel(address))
            await until_serving(inference_pb2_grpc.InferenceStub(channel))
            ways.append(Way(name + mark, our_way(name, channel, workers, stack), "direct", process=router))
    return ways


def our_way(
    name: str, channel: grpc.aio.Channel, workers: dict[str, inference_pb2_grpc.InferenceStub], stack: AsyncExitStack
) -> Callable[[Question, bool], Awaitable[tuple[float, float]]]:
    """How it is sent to the router at `channel`."""
    fleet = fleet_pb2_grpc.FleetStub(channel)
    if name == "look-aside":
        return look_aside(by_calls(fleet), workers)
    if name == "routed":
        asker = RouteAsker(fleet)
        stack.push_async_callback(asker.close)
        return look_aside(asker.route, workers)
    return straight(inference_pb2_grpc.InferenceStub(channel))


def router_process(
    file: Path, workers: Iterable[str], *options: str, checkout: Path | None = None
) -> AbstractAsyncContextManager[Process]:
    """A router of ours."""
    command = ("router", "--port", "0", "--metrics-port", "0", "--http-port", "-1", "--log-level", "error", *options)
    workers_named = ("--workers", ",".join(workers), "--address-file", str(file))
    return process(file, *command, *workers_named, checkout=checkout)


async def one_load(
    load: Load, ways: Sequence[Way], idle: Mapping[str, float], tokenizer: Tokenizer, rounds: int
) -> None:
    """Warm up, then measure by turns. `idle`: the routers' `idle_share`."""
    count = REQUESTS[load.concurrency]
    rows = {way.name: Row(way.name, load) for way in ways}
    texts = prompts("text", load.characters, count * (rounds + 1), tokenizer)
    ids = prompts("ids", load.characters, count * (rounds + 1), tokenizer)
    for turn in range(rounds + 1):
        for way in ways:
            part = range(turn * count, (turn + 1) * count)
            # The workers take token ids alone: a router's ids for a text are as many.
            ours = ids if load.form == "ids" or way.name == "direct" else texts
            questions = [Question(ours[index], texts[index].text) for index in part]
            before_s, began_s = cpu_s(way.process), time.perf_counter()
            times = await measure(way, questions, load)
            spent_s, lasted_s = cpu_s(way.process) - before_s, time.perf_counter() - began_s
            if turn:
                rows[way.name].first_s += [first_s for first_s, _ in times]
                rows[way.name].total_s += [total_s for _, total_s in times]
                rows[way.name].router_cpu_s += spent_s
                rows[way.name].idle_cpu_s += idle.get(way.name, 0.0) * lasted_s
    for way in ways:
        print(rows[way.name].line(rows[way.direct]), flush=True)


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


def cpu_s(process: psutil.Process | None) -> float:
    """CPU time of the process and those that it started: their threads' times, for ticks of 10 ms are too coarse."""
    if process is None:
        return 0.0
    total_ns = 0
    for each in (process, *process.children(recursive=True)):
        for file in Path(f"/proc/{each.pid}/task").glob("*/schedstat"):
            total_ns += int(file.read_text().split()[0])
    return total_ns / 1e9


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=["ids", "text"], choices=["ids", "text"])
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--at-once", nargs="+", type=int, default=list(REQUESTS), choices=list(REQUESTS))
    parser.add_argument("--whole", action="store_true", help="also answers in one message")
    parser.add_argument("--peers", nargs="*", default=[], choices=list(WHEELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--against", type=Path, metavar="DIRECTORY")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--serve-worker", help=argparse.SUPPRESS)
    parser.add_argument("--address-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_worker:
        asyncio.run(serve_worker(arguments.serve_worker, arguments.address_file))
    else:
        shapes = product(
            arguments.forms, arguments.lengths, arguments.at_once, (True, False) if arguments.whole else (True,)
        )
        loads = [Load(*shape) for shape in shapes]
        asyncio.run(bench(loads, arguments.ways, arguments.peers, arguments.rounds, arguments.against))


if __name__ == "__main__":
    main()
