"""How a server says that it reads a stream, before anything is sent on it.

A message that meets a refusal on its way makes gRPC's client forget what was refused, and the first metadata of a call
come with a refusal as well, a moment before its status. So the server marks its metadata, and the client waits for it.
"""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

_KEY = "radixfleet-accepted"
ACCEPTED: Final = ((_KEY, "true"),)
"""The initial metadata of a stream that is served."""


async def is_accepted(call: grpc.aio.StreamStreamCall[Any, Any]) -> bool:
    """Wait for the server's word; False: it lets nobody in, and the call's status tells why."""
    return _KEY in await call.initial_metadata()
