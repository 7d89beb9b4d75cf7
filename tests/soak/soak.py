"""Ten minutes of mixed load on a whole fleet, with failures; at the end all pools are empty and memory is flat.

    make soak                         # or SOAK_MINUTES=3 make soak
    python -m tests.soak.soak --minutes 3

A router and two workers, each of three processes, serve a tiny model with a KV pool that is too small for the load. A
dozen clients complete, leave, expire, abort, dawdle and send nonsense, through the router and directly. In the first
six tenths, engines and runners are killed, of each worker in turn; all the time, steps run out of memory, break or give
NaN (tests/soak/faults). Prints a line every half minute, then a verdict; the exit code is 0 only if all of this held:

    injected   there were steps of each kind of failure
    outcomes   nothing but what `clients.EXPECTED` allows; every act ended
    healed     at the end all processes of both workers live, and a request is answered on each
    empty      no request runs or waits, no KV is protected, no booking is left at the router
    flat       no process grew by more than a tenth and 16 MiB in the last three tenths
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import click
import psutil

from deploy.local_fleet import LocalFleet, LocalSpec
from radixfleet.answers import Completion
from radixfleet.client import Client
from radixfleet.errors import RadixfleetError
from radixfleet.types import WorkerStatus
from tests.soak.clients import Soaker, is_injected
from tests.support.tiny_model import tiny_model

NUM_WORKERS, NUM_CLIENTS = 2, 12
KILLS_UNTIL, MEMORY_FROM = 0.6, 0.7
KILL_EVERY_S = 32.0
"""Each worker is hit every second time. One whose processes die within a minute, five times in a row, gives up and
ends, as it should: that is not tested here."""
TELL_EVERY_S = 30.0
_TRIES = 5
MAY_GROW, MAY_GROW_BYTES = 0.1, 16 << 20
SETTLE_S = 60.0
FAULTS = Path(__file__).with_name("faults")


class Verdict:
    """What held and what did not."""

    def __init__(self) -> None:
        self.failed = False

    def say(self, what: str, problems: list[str]) -> None:
        """One line, and the problems below it."""
        print(f"{'FAIL' if problems else 'ok':5}{what}", flush=True)
        for problem in problems[:20]:
            print(f"     - {problem}", flush=True)
        self.failed |= bool(problems)


class Progress:
    """Says what happens, each thing once."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> None:
        if text != self._last:
            print(text, flush=True)
        self._last = text


def roles(fleet: LocalFleet) -> dict[str, psutil.Process]:
    """Every process of the fleet, by what it is."""
    processes = {}
    for child in fleet.children:
        with suppress(psutil.Error):  # between its end and its restart
            front = psutil.Process(child.pid)
            processes[child.spec.name] = front
            for part in front.children():
                module = next((word for word in part.cmdline() if word.startswith("worker.engine.")), None)
                if module is not None:
                    processes[f"{child.spec.name} {module.removeprefix('worker.engine.')}"] = part
    return processes


def resident(fleet: LocalFleet) -> dict[str, int]:
    """Memory of each process, in bytes."""
    return {name: process.memory_info().rss for name, process in roles(fleet).items()}


async def kill_now_and_then(fleet: LocalFleet, client: Client, random: Random, until_s: float) -> int:
    """Kill an engine or a runner every `KILL_EVERY_S`, once all have healed from the last; how many were."""
    killed = 0
    while asyncio.get_running_loop().time() + KILL_EVERY_S < until_s:
        await asyncio.sleep(KILL_EVERY_S)
        if not all(entry.status is WorkerStatus.SERVING for entry in await client.list_workers()):
            continue
        worker = f"worker-{killed % NUM_WORKERS} "
        victims = [process for name, process in roles(fleet).items() if name.startswith(worker)]
        if victims:
            with suppress(psutil.NoSuchProcess):
                random.choice(victims).kill()
                killed += 1
    return killed


async def tell(soaker: Soaker, length_s: float) -> None:
    """How far it is, every `TELL_EVERY_S`."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        acts, faults = soaker.outcomes.total(), len(soaker.faults)
        print(f"{time.monotonic() - began_s:.0f} of {length_s:.0f} s: {acts} acts, {faults} faults", flush=True)


async def leftovers(client: Client) -> list[str]:
    """What is still running, waiting, held or booked, and workers that are gone."""
    entries = await client.list_workers()
    found = [] if len(entries) == NUM_WORKERS else [f"{len(entries)} workers of {NUM_WORKERS}"]
    for entry in entries:
        load = entry.load
        if not entry.connected or entry.status is not WorkerStatus.SERVING:
            found.append(f"{entry.worker_id} is {entry.status}, connected: {entry.connected}")
        if load.running_requests or load.waiting_requests or load.outstanding_prompt_tokens or load.kv_protected_tokens:
            found.append(f"{entry.worker_id} has {load}")
        if entry.booked_requests or entry.booked_prompt_tokens:
            found.append(f"the router has {entry.booked_requests} bookings for {entry.worker_id}")
    return found


async def settled(client: Client) -> list[str]:
    """What is left over, once nothing is or `SETTLE_S` are over."""
    deadline_s = time.monotonic() + SETTLE_S
    while (found := await leftovers(client)) and time.monotonic() < deadline_s:  # noqa: ASYNC110 - a server is asked
        await asyncio.sleep(0.5)
    return found


async def ailing(fleet: LocalFleet, workers: dict[str, str]) -> list[str]:
    """Processes that are gone, and workers that do not answer any more."""
    problems = [f"{name} has not all of its processes" for name in workers if len(_parts(fleet, name)) != 3]
    for worker_id, address in workers.items():
        async with Client(address, timeout_s=30) as client:
            try:
                done = await _answer(client)
            except RadixfleetError as error:
                problems.append(f"{worker_id} does not answer: {error}")
                continue
            if len(done.token_ids) != 5:
                problems.append(f"{worker_id} gave {len(done.token_ids)} tokens of 5")
    return problems


async def _answer(client: Client) -> Completion:
    """Of several tries: steps still fail now and then. Raises RadixfleetError."""
    for _ in range(_TRIES - 1):
        try:
            return await client.complete([7, 8, 9], max_new_tokens=5, ignore_eos=True)
        except RadixfleetError as error:
            if not is_injected(error):
                raise
    return await client.complete([7, 8, 9], max_new_tokens=5, ignore_eos=True)


def _parts(fleet: LocalFleet, worker_id: str) -> list[str]:
    return [name for name in roles(fleet) if name.split()[0] == worker_id]


def growth(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Processes that grew."""
    return [
        f"{name}: {before[name] >> 20} MiB, then {size >> 20} MiB"
        for name, size in after.items()
        if name in before and size > before[name] * (1 + MAY_GROW) + MAY_GROW_BYTES
    ]


def injected(directory: Path) -> Counter[str]:
    """Steps that were made to fail, by how."""
    return Counter(line for file in directory.iterdir() for line in file.read_text().splitlines())


async def soak(fleet: LocalFleet, faults: Path, minutes: float, seed: int) -> bool:
    """The load, then the verdict; whether all held. `faults`: where failing steps are noted."""
    loop = asyncio.get_running_loop()
    began_s, length_s = loop.time(), minutes * 60
    async with Client(fleet.endpoint, timeout_s=20) as client:
        workers = {str(entry.worker_id): entry.address for entry in await client.list_workers()}
        soaker = Soaker(fleet.endpoint, workers, seed)
        load = [asyncio.create_task(soaker.run(began_s + length_s)) for _ in range(NUM_CLIENTS)]
        telling = asyncio.create_task(tell(soaker, length_s))
        killed = await kill_now_and_then(fleet, client, Random(seed), began_s + KILLS_UNTIL * length_s)
        await asyncio.sleep(began_s + MEMORY_FROM * length_s - loop.time())
        before = resident(fleet)
        await asyncio.gather(*load)
        telling.cancel()
        left_over = await settled(client)
        after = resident(fleet)
        verdict = Verdict()
        failures = injected(faults)
        missing = [f"no step with: {kind}" for kind in ("out of memory", "error", "nan") if not failures[kind]]
        verdict.say(f"injected: {', '.join(f'{count} {kind}' for kind, count in failures.items())}", missing)
        outcomes = ", ".join(f"{count} {name}" for name, count in soaker.outcomes.most_common())
        verdict.say(f"outcomes: {outcomes}; {killed} processes killed", soaker.faults)
        verdict.say("healed", await ailing(fleet, workers))
        verdict.say("empty", left_over)
        sizes = ", ".join(f"{name} {size >> 20}" for name, size in after.items())
        verdict.say(f"flat (MiB: {sizes})", growth(before, after))
    return not verdict.failed


async def run(minutes: float, seed: int) -> bool:
    """A fleet of its own, and the soak on it."""
    worker_options = {
        "model": str(tiny_model(max_context=4096)),
        "device": "cpu",
        "dtype": "float32",
        "device_memory": 256 << 20,
        "max_total_tokens": 6_000,
        "max_running_requests": 16,
        "threads": 1,
        "log_level": "warning",
    }
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        router_options = {"host": "127.0.0.1", "port": 0, "metrics_port": 0, "http_port": -1, "log_level": "warning"}
        faults = Path(directory) / "faults"
        faults.mkdir()
        os.environ["SOAK_FAULTS"] = str(faults)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        spec = LocalSpec(NUM_WORKERS, router_options, worker_options, Path(directory))
        async with LocalFleet(spec, Progress()) as fleet:
            return await soak(fleet, faults, minutes, seed)


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.5), default=10.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def main(minutes: float, seed: int) -> None:
    """Run the soak and print its verdict."""
    held = asyncio.run(run(minutes, seed))
    print("soak passed" if held else "soak FAILED")
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
