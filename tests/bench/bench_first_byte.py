"""From the engine's first token to its client: `python -m tests.bench.bench_first_byte`.

One request at a time on a machine that should be idle. Measured is the time from the engine's message, in the worker's
front, until the client's process has the Delta, on three ways:

    plain      a server of grpc.aio that writes a message it has: what gRPC, the kernel and the client take
    direct     the worker itself, as clients are sent by look-aside routing
    proxied    through a router, which then also sends what it held back: the metadata and Started
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from radixfleet.channel import listen, make_server, open_channel
from radixfleet.telemetry import setup_logging
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.bench.bench_proxied_tokens import started
from tests.bench.bench_router_path import until_serving
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.core import codec
from worker.core.messages import Admitted, Output, StepOutputs

REQUESTS = 200
_PREFILL_S = 0.005
_PROMPT = inference_pb2.GenerateRequest(
    prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=range(3, 100))),
    sampling=inference_pb2.SamplingParams(max_new_tokens=16, ignore_eos=True),
)


class MadeAt:
    """When a server's last token was made, for the bench's process to read: it answers one request at a time."""

    def __init__(self, address_file: Path) -> None:
        self._file = os.open(address_file.with_suffix(".made"), os.O_RDWR | os.O_CREAT)

    def note(self) -> None:
        """Now."""
        os.pwrite(self._file, time.monotonic_ns().to_bytes(8), 0)

    def read_ns(self) -> int:
        """What was noted last."""
        return int.from_bytes(os.pread(self._file, 8, 0))


class Plain(inference_pb2_grpc.InferenceServicer):
    """Sends a message a while after Started."""

    def __init__(self, made: MadeAt) -> None:
        self._made = made

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        """See the class."""
        await context.write(inference_pb2.GenerateResponse(started=inference_pb2.Started()))
        await asyncio.sleep(_PREFILL_S)
        self._made.note()
        await context.write(inference_pb2.GenerateResponse(delta=inference_pb2.Delta(token_ids=[97], text="a")))
        await asyncio.sleep(1.0)


async def serve(file: Path, *, plain: bool) -> None:
    """A server whose answers have one token."""
    made = MadeAt(file)
    if plain:
        server, _ = await make_server(["radixfleet.v1.Inference"])
        inference_pb2_grpc.add_InferenceServicer_to_server(Plain(made), server)
        port = listen(server, "127.0.0.1", 0)
        await server.start()
        await asyncio.to_thread(file.write_text, f"127.0.0.1:{port}\n")
        await server.wait_for_termination()
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False, log_level="error") as worker:
        engine.become_ready()
        await asyncio.to_thread(file.write_text, f"{worker.address}\n")
        while True:
            engine.heard.clear()
            await until(lambda: engine.submits, timeout_s=1e6)
            uid = engine.submits[0].uid
            engine._hear(StepOutputs([Admitted(uid, 0, 0.0)], [], []))
            message = codec.encode(StepOutputs([], [Output(uid, 97)], []))
            await asyncio.sleep(_PREFILL_S)
            made.note()
            engine._hear(codec.decode_engine_message(message))


async def first_byte_ns(stub: inference_pb2_grpc.InferenceStub) -> int:
    """When the client has the first token of a request."""
    call = stub.Generate(_PROMPT)
    async for response in call:
        if response.WhichOneof("event") == "delta":
            came_ns = time.monotonic_ns()
            call.cancel()
            return came_ns
    raise AssertionError("an answer without a token")


async def bench(requests: int) -> None:
    """In turns."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = ("tests.bench.bench_first_byte", "--serve")
        _, plain = await stack.enter_async_context(
            started(folder / "plain", *command, str(folder / "plain"), "--plain")
        )
        _, worker = await stack.enter_async_context(started(folder / "w", *command, str(folder / "w")))
        options = ("--metrics-port", "0", "--http-port", "-1", "--log-level", "error", "--workers", worker)
        router_command = ("router", "--port", "0", *options, "--address-file", str(folder / "r"))
        _, router = await stack.enter_async_context(started(folder / "r", *router_command))
        addresses = {
            "plain": (folder / "plain", plain),
            "direct": (folder / "w", worker),
            "proxied": (folder / "w", router),
        }
        stubs: dict[str, tuple[inference_pb2_grpc.InferenceStub, MadeAt]] = {}
        took_us: dict[str, list[float]] = {}
        for name, (file, address) in addresses.items():
            channel = await stack.enter_async_context(open_channel(address))
            stubs[name], took_us[name] = (inference_pb2_grpc.InferenceStub(channel), MadeAt(file)), []
        await until_serving(stubs["proxied"][0])
        for turn in range(requests + 10):
            for name, (stub, made) in stubs.items():
                came_ns = await first_byte_ns(stub)
                if turn >= 10:  # the first ones warm up
                    took_us[name].append((came_ns - made.read_ns()) / 1e3)
        print("way      first token at the client, us after the engine's message: p10, p50, p90")
        for name, each in took_us.items():
            tenths = statistics.quantiles(each, n=10)
            print(f"{name:8} {tenths[0]:55.0f} {statistics.median(each):6.0f} {tenths[-1]:6.0f}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        setup_logging("error", json=False)
        asyncio.run(serve(arguments.serve, plain=arguments.plain))
    else:
        asyncio.run(bench(arguments.requests))


if __name__ == "__main__":
    main()
