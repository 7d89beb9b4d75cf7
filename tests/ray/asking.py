"""A client that knows two routers and asks all the time, one request after the other, until stdin closes.

`python -m tests.ray.asking ROUTER ROUTER CA CERT KEY`, with RADIXFLEET_API_KEY set. Each request is tried at one
router, then at the other, then at the first again. On stdout is one JSON object a request: who answered ("": nobody),
and the errors on the way.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from radixfleet.client import Client
from radixfleet.endpoint import Endpoint
from radixfleet.errors import RadixfleetError
from radixfleet.retry import RetryPolicy
from radixfleet.tls import ClientTls

_PAUSE_S = 0.1
_TIMEOUT_S = 30.0


async def ask(clients: list[tuple[str, Client]]) -> dict[str, object]:
    """One request."""
    errors: list[str] = []
    for router, client in clients:
        try:
            await client.complete("hello", max_new_tokens=2, ignore_eos=True, timeout_s=_TIMEOUT_S)
        except RadixfleetError as error:
            errors.append(f"{router}: {error}")
        else:
            return {"router": router, "errors": errors}
    return {"router": "", "errors": errors}


async def main(routers: list[str], tls: ClientTls) -> None:
    """Until stdin closes."""
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, closed.set)
    no_retry = RetryPolicy(retries=0)
    key = os.environ["RADIXFLEET_API_KEY"]
    first, second = (Endpoint(router, tls, key) for router in routers)
    async with Client(first, retry=no_retry) as one, Client(second, retry=no_retry) as two:
        turns = [(first.address, one), (second.address, two)]
        while not closed.is_set():
            print(json.dumps(await ask([*turns, turns[0]])), flush=True)
            turns.reverse()
            await asyncio.sleep(_PAUSE_S)


if __name__ == "__main__":
    _, router, other, *files = sys.argv
    asyncio.run(main([router, other], ClientTls(*files)))
