"""What OpenAI's HTTP costs a router over gRPC: `python -m tests.bench.bench_http_path`.

One router process before worker processes that do nothing: they answer with 16 tokens, one a message, at once. The same
prompts, as text, go through it by gRPC (one call each, on one connection) and by HTTP (connections that are kept, one
for each client), streamed and whole, in rounds by turns. Measured are the CPU time of the router's process a request,
and the client's time to the first bytes and to the end; clients share this machine's cores, so what counts is one row
beside another. The last column is the CPU time over that of gRPC, the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import psutil

from radixfleet.channel import open_channel
from radixfleet.text import Tokenizer
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.bench.bench_router_path import TOKENS, process, prompts, tokenizer_spec, until_serving
from tests.support.http_client import Connection

Send: TypeAlias = Callable[[str], Awaitable[tuple[float, float]]]
"""Carries a prompt to the end of its answer; seconds to the first bytes of it, and in all."""
_MODEL = "fake-model"


@dataclass(slots=True)
class Row:
    """One way, over all rounds."""

    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Of the router, a request; one value a round."""


def by_grpc(stub: inference_pb2_grpc.InferenceStub) -> Send:
    """By Generate."""

    async def send(text: str) -> tuple[float, float]:
        began_s, first_s = time.perf_counter(), 0.0
        sampling = inference_pb2.SamplingParams(max_new_tokens=TOKENS)
        request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text=text), sampling=sampling)
        async for _ in stub.Generate(request):
            first_s = first_s or time.perf_counter() - began_s
        return first_s, time.perf_counter() - began_s

    return send


def by_http(connections: asyncio.Queue[Connection], *, stream: bool) -> Send:
    """By POST /v1/completions."""

    async def send(text: str) -> tuple[float, float]:
        body = json.dumps({"model": _MODEL, "prompt": text, "max_tokens": TOKENS, "stream": stream}).encode()
        connection = await connections.get()
        began_s = time.perf_counter()
        await connection.send("POST", "/v1/completions", body)
        if stream:
            status, _ = await connection.head()
            assert status == 200
            await connection.chunk()
            first_s = time.perf_counter() - began_s
            while await connection.chunk():
                pass
        else:
            assert (await connection.answer()).status == 200
            first_s = time.perf_counter() - began_s
        connections.put_nowait(connection)
        return first_s, time.perf_counter() - began_s

    return send


async def measure(row: Row, send: Send, texts: Sequence[str], at_once: int, router: psutil.Process) -> None:
    """One round."""
    waiting = iter(texts)

    async def client() -> None:
        for text in waiting:
            first_s, total_s = await send(text)
            row.first_s.append(first_s)
            row.total_s.append(total_s)

    before = router.cpu_times()
    await asyncio.gather(*(client() for _ in range(at_once)))
    after = router.cpu_times()
    row.cpu_s.append((after.user + after.system - before.user - before.system) / len(texts))


async def bench(characters: int, at_once: int, requests: int, rounds: int) -> None:
    """All ways, by turns."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = []
        for name in ("w0", "w1"):
            command = ("tests.bench.bench_router_path", "--serve-worker", name, "--address-file", str(folder / name))
            _, address = await stack.enter_async_context(process(folder / name, *command))
            workers.append(address)
        command = ("router", "--port", "0", "--metrics-port", "0", "--http-port", "0", "--log-level", "warning")
        command += ("--workers", ",".join(workers), "--address-file", str(folder / "router"))
        router, address = await stack.enter_async_context(process(folder / "router", *command))
        channel = await stack.enter_async_context(open_channel(address))
        stub = inference_pb2_grpc.InferenceStub(channel)
        await until_serving(stub)
        http = (folder / "router.http").read_text().strip()
        connections: asyncio.Queue[Connection] = asyncio.Queue()
        for _ in range(at_once):
            reader, writer = await asyncio.open_connection(*http.rsplit(":", 1))
            stack.callback(writer.close)
            connections.put_nowait(Connection(reader, writer))
        ways = {
            "grpc": by_grpc(stub),
            "http stream": by_http(connections, stream=True),
            "http whole": by_http(connections, stream=False),
        }
        made = prompts("text", characters, requests, Tokenizer(tokenizer_spec()))
        texts = [prompt.text for prompt in made]
        rows = {way: Row() for way in ways}
        for send in ways.values():  # warm up
            await measure(Row(), send, texts[: 2 * at_once], at_once, router)
        for _ in range(rounds):
            for way, send in ways.items():
                await measure(rows[way], send, texts, at_once, router)
    print(f"{characters} characters, {at_once} at once, {rounds} rounds of {requests} requests, {TOKENS} tokens each")
    print("way          first p50  all p50  all p99 (ms)  router CPU, us a request  over gRPC")
    for way, row in rows.items():
        total = sorted(row.total_s)
        ratio = statistics.median(mine / base for mine, base in zip(row.cpu_s, rows["grpc"].cpu_s, strict=True))
        print(
            f"{way:12} {statistics.median(row.first_s) * 1e3:9.2f} {statistics.median(total) * 1e3:8.2f} "
            f"{total[int(0.99 * (len(total) - 1))] * 1e3:8.2f} {statistics.median(row.cpu_s) * 1e6:24.0f} {ratio:15.2f}"
        )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--characters", type=int, default=2_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--requests", type=int, default=300, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    asyncio.run(bench(arguments.characters, arguments.at_once, arguments.requests, arguments.rounds))


if __name__ == "__main__":
    main()
