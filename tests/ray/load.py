"""A steady load on routers, and who was eligible when; one JSON object a line on stdout until stdin closes.

Runs as a process of its own inside the namespaces of the fleet: `python -m tests.ray.load ENDPOINT --requests-per-s 6`.
Requests come at random times whatever becomes of those before (open loop), from groups that share a long prefix. With
`--clients 6` so many clients ask one request after the other, each of which may take as long as it takes. Of several
endpoints each request begins with another one, and goes to the next when that fails before the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from random import Random

from radixfleet.answers import Finished, Started
from radixfleet.client import Client
from radixfleet.errors import RadixfleetError
from radixfleet.retry import RetryPolicy

GROUPS = 24
PREFIX_TOKENS = 1024
OWN_TOKENS = 64
NEW_TOKENS = 160
_POLL_S = 0.05
_TIMEOUT_S = 60.0
_PATIENCE_S = 3600.0


def tell(**values: object) -> None:
    """One line."""
    print(json.dumps(values), flush=True)


def prompt(random: Random) -> list[int]:
    """A group's prefix, and an end of its own."""
    group = random.randrange(GROUPS)
    prefix = Random(group)
    return [prefix.randrange(500) for _ in range(PREFIX_TOKENS)] + [random.randrange(500) for _ in range(OWN_TOKENS)]


async def request(clients: deque[Client], tokens: list[int], timeout_s: float) -> None:
    """One request and its outcome."""
    began_s, worker, cached, first_s = time.monotonic(), "", 0, None
    error = ""
    clients.rotate()
    for client in tuple(clients):
        error = ""
        try:
            options = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "timeout_s": timeout_s}
            async for event in client.generate(tokens, **options):  # type: ignore[arg-type]
                if isinstance(event, Started):
                    worker, cached = event.worker_id, event.cached_tokens
                elif first_s is None and not isinstance(event, Finished):
                    first_s = time.monotonic()
        except RadixfleetError as failure:
            error = f"{type(failure).__name__}: {failure}"
        if not error or first_s is not None:
            break
    tell(
        kind="request",
        began_s=began_s,
        first_s=first_s,
        ended_s=time.monotonic(),
        worker=worker,
        prompt_tokens=len(tokens),
        cached_tokens=cached,
        error=error,
    )


async def watch(clients: Sequence[Client]) -> None:
    """Tells whenever other workers are eligible, says the first router that answers."""
    last: list[str] | None = None
    while True:
        now: list[str] = []
        for client in clients:
            with suppress(RadixfleetError):
                workers = await client.list_workers(timeout_s=1.0)
                now = sorted(worker.worker_id for worker in workers if not worker.ineligible_reason)
                break
        if now != last:
            tell(kind="eligible", at_s=time.monotonic(), workers=now)
            last = now
        await asyncio.sleep(_POLL_S)


async def open_loop(clients: deque[Client], requests_per_s: float, closed: asyncio.Event) -> None:
    """At random times."""
    random = Random(7)
    async with asyncio.TaskGroup() as running:
        while not closed.is_set():
            running.create_task(request(clients, prompt(random), _TIMEOUT_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(random.expovariate(requests_per_s)):
                    await closed.wait()


async def closed_loop(clients: deque[Client], count: int, closed: asyncio.Event) -> None:
    """So many at a time."""

    async def ask(random: Random) -> None:
        while not closed.is_set():
            await request(clients, prompt(random), _PATIENCE_S)

    async with asyncio.TaskGroup() as running:
        for seed in range(count):
            running.create_task(ask(Random(seed)))


async def main(endpoints: list[str], requests_per_s: float, clients: int) -> None:
    """Until stdin closes; then the requests under way end."""
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, closed.set)
    no_retry = RetryPolicy(retries=0)
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(Client(each, retry=no_retry)) for each in (*endpoints, *endpoints)]
        callers, watchers = deque(made[: len(endpoints)]), made[len(endpoints) :]
        watching = asyncio.create_task(watch(watchers))
        await (closed_loop(callers, clients, closed) if clients else open_loop(callers, requests_per_s, closed))
        watching.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoints", nargs="+")
    parser.add_argument("--requests-per-s", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=0)
    asyncio.run(main(**vars(parser.parse_args())))
