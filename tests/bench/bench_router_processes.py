"""How throughput grows with a router's processes: `python -m tests.bench.bench_router_processes` (Linux, root).

Routers of 1, 2 and 4 processes before one worker. On a machine of few cores clients and routers would only take time
from each other, so each router process gets a small share of one core (a control group with a CPU quota), whatever else
runs: the router is then what bounds the throughput, as on a machine with a core for each of its processes. What the
processes share, which could keep them from growing (the port, the worker, the kernel), they share here as well.

Asked are choices (`Fleet.Explain`) by two client processes over many connections, which the kernel deals among the
router's processes. The routers are asked by turns; a ratio is of two in the same turn.

    python -m tests.bench.bench_router_processes                               # 1, 2 and 4 processes, 0.1 cores each
    python -m tests.bench.bench_router_processes --processes 1 8 --share 0.05
    python -m tests.bench.bench_router_processes --share 0                     # no quota: needs a core for each
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import psutil

from radixfleet.channel import open_channel
from radixfleet.convert import pack_tokens
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2
from tests.bench.bench_router_path import Process, cpu_s, process, router_process

ROUNDS = 5
CLIENTS = 2
CONNECTIONS = 16
"""Of each client, one request at a time on each."""
TURN_S = 3.0
_PERIOD_US = 20_000
_ROOT = Path("/sys/fs/cgroup")
_START_S = 60.0


@contextmanager
def limited(pids: Sequence[int], share: float) -> Iterator[None]:
    """Each of these processes gets so much of one core at most; 0: all that there is."""
    if not share:
        yield
        return
    is_v2 = (_ROOT / "cgroup.controllers").exists()
    root = _ROOT if is_v2 else _ROOT / "cpu"
    quota_us = int(share * _PERIOD_US)
    groups: list[Path] = []
    try:
        if is_v2:
            (root / "cgroup.subtree_control").write_text("+cpu")
        for pid in pids:
            group = root / f"radixfleet-bench-{pid}"
            group.mkdir()
            groups.append(group)
            if is_v2:
                (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        _remove(root, groups)
        raise SystemExit(f"no CPU quota can be set here ({error}): run as root, or with --share 0") from error
    try:
        yield
    finally:
        _remove(root, groups)


def _remove(root: Path, groups: Sequence[Path]) -> None:
    for group in groups:
        for pid in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(pid)
        group.rmdir()


async def serving_pids(router: psutil.Process, num_processes: int) -> list[int]:
    """Of the processes that serve: of one, the router itself; of more, those below it."""
    if num_processes == 1:
        return [router.pid]
    async with asyncio.timeout(_START_S):
        while len(children := router.children()) < num_processes:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.05)
    return [child.pid for child in children]


async def bench(counts: Sequence[int], share: float, characters: int, rounds: int) -> None:
    """Print choices a second by routers of so many processes."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = ("tests.bench.bench_router_path", "--serve-worker", "w0", "--address-file", str(folder / "w0"))
        _, worker = await stack.enter_async_context(process(folder / "w0", *command))
        routers: dict[int, Process] = {}
        for number in counts:
            file = folder / f"router-{number}"
            options = ("--processes", str(number)) if number > 1 else ()
            routers[number] = await stack.enter_async_context(router_process(file, [worker], *options))
            await choices(routers[number][1], characters, 0.5)
            stack.enter_context(limited(await serving_pids(routers[number][0], number), share))
        rates: dict[int, list[float]] = {number: [] for number in counts}
        cores: dict[int, list[float]] = {number: [] for number in counts}
        for turn in range(rounds):
            for number, (router, address) in routers.items():
                before_s, began_s = cpu_s(router), time.perf_counter()
                rates[number].append(await choices(address, characters, TURN_S))
                cores[number].append((cpu_s(router) - before_s) / (time.perf_counter() - began_s))
            print(f"round {turn + 1} of {rounds} done", file=sys.stderr)
        print(f"processes  choices/s  ratio to {counts[0]}  CPU of the router, in cores")
        for number in counts:
            ratio = statistics.median(own / first for own, first in zip(rates[number], rates[counts[0]], strict=True))
            rate, used = statistics.median(rates[number]), statistics.median(cores[number])
            print(f"{number:9} {rate:10.0f} {ratio:11.2f} {used:12.2f}")


async def choices(address: str, characters: int, seconds: float) -> float:
    """Answers a second to client processes."""
    command = ("-m", "tests.bench.bench_router_processes", "--ask", address, str(characters), str(seconds))
    clients = [
        await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        for _ in range(CLIENTS)
    ]
    answers = [await client.communicate() for client in clients]
    return sum(float(out) for out, _ in answers)


async def ask(address: str, characters: int, seconds: float) -> float:
    """A client: answers a second, over several connections, once all of them are open."""
    ids = np.random.default_rng(os.getpid()).integers(0, 255, characters // 4).astype(np.uint32)
    prompt = inference_pb2.Prompt(token_ids=pack_tokens(ids))
    request = fleet_pb2.ExplainRequest(request=inference_pb2.GenerateRequest(prompt=prompt))
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(address)) for _ in range(CONNECTIONS)]
        stubs = [fleet_pb2_grpc.FleetStub(channel) for channel in channels]
        await asyncio.gather(*(stub.Explain(request, wait_for_ready=True) for stub in stubs))
        answered, began_s = count(), time.perf_counter()

        async def client(stub: fleet_pb2_grpc.FleetStub) -> None:
            while time.perf_counter() - began_s < seconds:
                await stub.Explain(request)
                next(answered)

        await asyncio.gather(*(client(stub) for stub in stubs))
        return next(answered) / (time.perf_counter() - began_s)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4], help="of each router")
    parser.add_argument("--share", type=float, default=0.1, help="of one core for each process; 0: no limit")
    parser.add_argument("--characters", type=int, default=8_000, help="of a prompt, 4 a token")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        address, characters, seconds = arguments.ask
        print(asyncio.run(ask(address, int(characters), float(seconds))))
    else:
        asyncio.run(bench(arguments.processes, arguments.share, arguments.characters, arguments.rounds))


if __name__ == "__main__":
    main()
