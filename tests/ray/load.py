"""A steady load on a router, and who was eligible when; one JSON object a line on stdout until stdin closes.

Runs as a process of its own inside the namespaces of the fleet: `python -m tests.ray.load ENDPOINT REQUESTS_PER_S`.
Requests come at random times whatever becomes of those before (open loop), from groups that share a long prefix.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
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


def tell(**values: object) -> None:
    """One line."""
    print(json.dumps(values), flush=True)


def prompt(random: Random) -> list[int]:
    """A group's prefix, and an end of its own."""
    group = random.randrange(GROUPS)
    prefix = Random(group)
    return [prefix.randrange(500) for _ in range(PREFIX_TOKENS)] + [random.randrange(500) for _ in range(OWN_TOKENS)]


async def request(client: Client, tokens: list[int]) -> None:
    """One request and its outcome."""
    began_s, worker, cached, first_s = time.monotonic(), "", 0, None
    error = ""
    try:
        options = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "timeout_s": _TIMEOUT_S}
        async for event in client.generate(tokens, **options):  # type: ignore[arg-type]
            if isinstance(event, Started):
                worker, cached = event.worker_id, event.cached_tokens
            elif first_s is None and not isinstance(event, Finished):
                first_s = time.monotonic()
    except RadixfleetError as failure:
        error = f"{type(failure).__name__}: {failure}"
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


async def watch(client: Client) -> None:
    """Tells whenever other workers are eligible."""
    last: list[str] | None = None
    while True:
        now: list[str] = []
        with suppress(RadixfleetError):
            workers = await client.list_workers(timeout_s=1.0)
            now = sorted(worker.worker_id for worker in workers if not worker.ineligible_reason)
        if now != last:
            tell(kind="eligible", at_s=time.monotonic(), workers=now)
            last = now
        await asyncio.sleep(_POLL_S)


async def main(endpoint: str, requests_per_s: float) -> None:
    """Until stdin closes; then the requests under way end."""
    random = Random(7)
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    loop.add_reader(sys.stdin, closed.set)
    no_retry = RetryPolicy(retries=0)
    async with Client(endpoint, retry=no_retry) as client, Client(endpoint, retry=no_retry) as watcher:
        watching = asyncio.create_task(watch(watcher))
        running: set[asyncio.Task[None]] = set()
        while not closed.is_set():
            task = asyncio.create_task(request(client, prompt(random)))
            running.add(task)
            task.add_done_callback(running.discard)
            with suppress(TimeoutError):
                async with asyncio.timeout(random.expovariate(requests_per_s)):
                    await closed.wait()
        await asyncio.gather(*running)
        watching.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
