"""What a token costs a worker's front, without gRPC: `python -m tests.bench.bench_front_tokens`.

From the engine's message, as it comes from its socket, to the frame of `Worker.Link` that is ready to be written: read,
made into text, looked through for a stop string, put into a message. Every message of the engine has a token for each
stream, as a step has. Printed is the CPU time a token of the process that does it, and how many callbacks its event
loop runs for it: tasks that wake, futures that are set.

With --against DIRECTORY, a checkout of another version, that is measured beside, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from pathlib import Path
from typing import Any

from radixfleet.clock import MonotonicClock
from radixfleet.telemetry import setup_logging
from radixfleet.text import Tokenizer
from radixfleet.v1 import inference_pb2, worker_pb2
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_engine import READY, FakeEngine
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.core import codec
from worker.core.messages import Admitted, Output, StepOutputs
from worker.servicer.grammars import Grammars
from worker.servicer.inference import InferenceServicer
from worker.servicer.intake import Intake
from worker.servicer.link import Links

STREAMS = (1, 8, 32, 128)
TOKENS = 6400
"""Of all streams together."""
ROUNDS = 5


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the callbacks that it is given."""

    calls = 0

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        """One more."""
        self.calls += 1
        return super().call_soon(callback, *args, context=context)


class Router:
    """The other end of a link, in memory."""

    def __init__(self, streams: int) -> None:
        sampling = inference_pb2.SamplingParams(max_new_tokens=900, ignore_eos=True, stop=["</answer>"])
        prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]))
        request = inference_pb2.GenerateRequest(prompt=prompt, sampling=sampling)
        self._starts = worker_pb2.RouterFrame()
        for number in range(streams):
            self._starts.starts.add(number=number, request=request, credit=1 << 30)
        self.tokens = 0

    async def frames(self) -> AsyncIterator[worker_pb2.RouterFrame]:
        """All requests at once, and then nothing."""
        yield self._starts
        await asyncio.Event().wait()

    async def write(self, frame: worker_pb2.WorkerFrame) -> None:
        """Take a frame as gRPC does: serialized, and done when a later turn of the loop says so."""
        frame.SerializeToString()
        self.tokens += sum(len(reply.response.delta.token_ids) for reply in frame.replies)
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(done.set_result, None)
        await done


async def measure(streams: int) -> tuple[float, float]:
    """CPU us a token, and callbacks a token."""
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker:
        engine.become_ready(READY)
        with ThreadPoolExecutor(1) as threads:
            tokenizer = Tokenizer(byte_spec())
            intake = Intake("sim-model", tokenizer, threads, Grammars(engine, None), default_max_new_tokens=16)
            servicer = InferenceServicer(worker.description, intake, worker.requests, worker.metrics, MonotonicClock())
            links, router = Links(getattr(servicer, "answer", servicer.running), MonotonicClock()), Router(streams)
            serving = asyncio.create_task(links.serve(router.frames(), router.write))
            await until(lambda: len(engine.submits) == streams)
            uids = [submit.uid for submit in engine.submits]
            engine._hear(StepOutputs([Admitted(uid, 0, 0.0) for uid in uids], [], []))
            spent = await steps(engine, uids, router)
            await links.close()
            await serving
    return spent


async def steps(engine: FakeEngine, uids: list[int], router: Router) -> tuple[float, float]:
    """See `measure`."""
    messages = [codec.encode(StepOutputs([], [Output(uid, 97 + at % 26) for uid in uids], [])) for at in range(26)]
    loop: Any = asyncio.get_running_loop()
    count = min(800, TOKENS // len(uids))
    for turns in (count // 10, count):  # the first ones warm up
        began_ns, calls, read = time.process_time_ns(), loop.calls, router.tokens
        for turn in range(turns):
            due = router.tokens + len(uids)
            engine._hear(codec.decode_engine_message(messages[turn % len(messages)]))
            while router.tokens < due:
                await asyncio.sleep(0)
                loop.calls -= 1
        tokens = router.tokens - read
        spent = (time.process_time_ns() - began_ns) / 1e3 / tokens, (loop.calls - calls) / tokens
    return spent


def child(streams: int) -> None:
    """One measurement, as JSON."""
    setup_logging("error", json=False)
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        print(json.dumps(runner.run(measure(streams))))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    versions = {"this": None, **({"other": arguments.against.resolve()} if arguments.against else {})}
    print("streams  front   CPU a token, us: median, least   callbacks a token")
    for streams in arguments.streams:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in versions}
        for _ in range(arguments.rounds):
            for name, path in versions.items():
                before = [f"{path / 'proto'}", f"{path}"] if path else []
                environment = os.environ | {"PYTHONPATH": ":".join([*before, str(Path.cwd())])}
                command = [sys.executable, __file__, "--child", str(streams)]
                output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
                found[name].append(tuple(json.loads(output.splitlines()[-1])))
        for name, each in found.items():
            us = [spent for spent, _ in each]
            print(f"{streams:7}  {name:6} {statistics.median(us):23.1f} {min(us):8.1f} {each[-1][1]:19.2f}", flush=True)


if __name__ == "__main__":
    main()
