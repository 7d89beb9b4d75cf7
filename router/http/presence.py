"""Whether the client is still there: when it leaves, the work for it ends at once, before the first token too.

A client that ends its side alone cannot be told from one that left, until something is written to it, which may be
minutes later. So it is taken to have left, as nginx, Envoy and Go's server do; no common HTTP client does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection. Nobody is left to be told."""


@asynccontextmanager
async def client_present(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block when the client leaves; then it ends with ClientGone.

    For the time between the last byte of the request and the last byte of the answer, which must be sent behind the
    block: an ASGI server says "disconnect" also when the answer is complete.
    """
    task = asyncio.current_task()
    assert task is not None, "a request runs in a task"
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()
