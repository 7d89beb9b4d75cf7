"""What following its workers costs a router: `python -m tests.bench.bench_following`.

CPU of the router's process by the second, while nobody asks it anything and each worker tells something 20 times a
second, as one that computes does. The workers are in one process, and do nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from radixfleet.channel import open_channel
from radixfleet.v1 import inference_pb2_grpc
from tests.bench.bench_router_path import IdleWorker, idle_share, process, router_process, until_serving

ROUNDS = 3


async def serve_workers(count: int, address_file: Path) -> None:
    """So many, until the process is ended; their addresses with commas between."""
    workers = [await IdleWorker(f"w{index}").start() for index in range(count)]
    addresses = ",".join(worker.address for worker in workers)
    await asyncio.to_thread(address_file.write_text, addresses + "\n")
    await asyncio.Event().wait()


async def bench(counts: list[int]) -> None:
    """A line for each number of workers."""
    for count in counts:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            command = ("tests.bench.bench_following", "--serve", str(count), "--address-file", str(folder / "workers"))
            _, addresses = await stack.enter_async_context(process(folder / "workers", *command))
            router = router_process(folder / "router", addresses.split(","), "--link")
            child, address = await stack.enter_async_context(router)
            channel = await stack.enter_async_context(open_channel(address))
            await until_serving(inference_pb2_grpc.InferenceStub(channel))
            await idle_share(child)  # the first seconds are those of the connections
            share = statistics.median([await idle_share(child) for _ in range(ROUNDS)])
            print(f"{count:4} workers: {share * 1e3:6.1f} ms of CPU a second", flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 16, 64])
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve_workers(arguments.serve, arguments.address_file))
    else:
        asyncio.run(bench(arguments.workers))


if __name__ == "__main__":
    main()
