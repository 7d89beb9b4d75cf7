"""A whole run: weights, servers, warm-up, turns. All that was started is gone when it ends, however it ends."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import aiohttp
import psutil
from tokenizers import Tokenizer

from deploy.bench.peers.catalog import SERVED_NAME, Peer, Task
from deploy.bench.peers.checkpoint import dtype_name
from deploy.bench.peers.clients import AsksGrpc, AsksHttp, session
from deploy.bench.peers.comparison import OURS, Contestant, alternate, warm_up
from deploy.bench.peers.guard import descendants
from deploy.bench.peers.questions import Questions, words_of
from deploy.bench.peers.servers import Server, ServerFailed, free_port
from deploy.options import to_arguments
from deploy.processes import Child, ChildSpec
from deploy.progress import Tell
from radixfleet.client import Client
from radixfleet.errors import RadixfleetError
from radixfleet.retry import RetryPolicy
from radixfleet.types import TokenArray, WorkerStatus
from worker.model.errors import ModelError
from worker.model.tokenizer_files import load_tokenizer_spec

_POLL_S = 0.1
_IDLE_S = 2.0
_MEMORY_BYTES = 3 << 30
_STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave."""

    contestants: Sequence[Contestant]
    """Ours first."""
    idle_share: float
    """Of one core, that our worker takes while it has nothing to do: it is not frozen while others are measured."""


class Absent:
    """In place of a server that could not be started."""

    def freeze(self) -> None:
        """Nothing."""

    def thaw(self) -> None:
        """Nothing."""

    def obituary(self, how: str) -> str:
        """Just that."""
        return how


class _Ours:
    """Ours is never frozen."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def freeze(self) -> None:
        """Nothing."""

    def thaw(self) -> None:
        """Nothing."""

    def obituary(self, how: str) -> str:
        """With the place of the log."""
        return f"{how}; see {self._child.log_path}"


async def compare_with_peers(
    peers: Mapping[str, Peer], task: Task, workloads: Sequence[Questions], rounds: int, run_dir: Path, tell: Tell
) -> Outcome:
    """Start all, take the turns, stop all. Logs go to `run_dir`. Raises WrongAnswer or ChildFailed when ours fails."""
    words = await asyncio.to_thread(_words, task.model)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(session())
        tell(f"{OURS}: loading")
        child = await Child.start(_our_worker(task), run_dir)
        stack.push_async_callback(child.stop, _STOP_S)
        client = await stack.enter_async_context(Client(await child.address(), retry=RetryPolicy(retries=0)))
        await _serving(client, child)
        ours = Contestant(
            OURS, f"radixfleet {version('radixfleet')}", dtype_name(task.dtype), AsksGrpc(client), _Ours(child)
        )
        contestants = [ours]
        for name, peer in peers.items():
            contestants.append(await _start(stack, http, name, peer, task, run_dir, tell))
        for contestant in contestants:
            tell(f"{contestant.name}: warming up")
            await warm_up(contestant, workloads[0].warm_up(), words)
        idle_share = await _share_of_a_core(child.pid)
        await alternate(contestants, workloads, words, rounds, tell)
        tell("stopping")
    return Outcome(contestants, idle_share)


def _words(model: Path) -> TokenArray:
    return words_of(Tokenizer.from_str(load_tokenizer_spec(model).tokenizer_json))


def _our_worker(task: Task) -> ChildSpec:
    options = {
        "model": str(task.model),
        "device": "cpu",
        "dtype": dtype_name(task.dtype),
        "threads": task.threads,
        "device_memory": _MEMORY_BYTES,
        "context_length": task.context_tokens,
        "max_running_requests": task.concurrency,
        "port": 0,
        "metrics_port": 0,
        "log_level": "warning",
    }
    return ChildSpec(OURS, ("worker", *to_arguments(options)), {})


async def _serving(client: Client, child: Child) -> None:
    """Wait for the model. Raises ChildFailed when the worker ends instead."""
    death = asyncio.create_task(child.died())
    try:
        while (await client.worker_info()).status is not WorkerStatus.SERVING:
            await asyncio.wait([death], timeout=_POLL_S)
            if death.done():
                raise death.result()
    except RadixfleetError:
        raise await death from None
    finally:
        death.cancel()


async def _start(
    stack: AsyncExitStack,
    http: aiohttp.ClientSession,
    name: str,
    peer: Peer,
    task: Task,
    run_dir: Path,
    tell: Tell,
) -> Contestant:
    """Loaded and frozen; or with its failure."""
    tell(f"{name}: loading")
    port, log = free_port(), run_dir / f"{name}.log"
    asks = AsksHttp(http, port, SERVED_NAME)
    try:
        launch = await asyncio.to_thread(peer.launch, peer.folder(task.cache), task, port)
    except (ModelError, OSError, subprocess.CalledProcessError) as error:
        return Contestant(name, peer.title, "", asks, Absent(), failure=str(error))
    server = await stack.enter_async_context(Server(launch.command, launch.variables, port, log))
    contestant = Contestant(name, peer.title, launch.dtype or dtype_name(task.dtype), asks, server, once=peer.once)
    try:
        await server.ready(http, lambda elapsed_s: tell(f"{name}: loading, {elapsed_s:.0f} s"))
    except ServerFailed as error:
        contestant.failure = str(error)
    server.freeze()
    return contestant


async def _share_of_a_core(pid: int) -> float:
    """What a process and all below it take now."""
    processes = [psutil.Process(pid), *descendants(pid)]
    before_s = _cpu_s(processes)
    await asyncio.sleep(_IDLE_S)
    return (_cpu_s(processes) - before_s) / _IDLE_S


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
