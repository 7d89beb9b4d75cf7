"""How a client learns that a server accepts a stream, before it writes to it.

When a client writes while the server's refusal is on its way, gRPC reports the failed write and loses the status of the
refusal. Initial metadata arrive with a refusal, too, so their arrival alone says nothing. Therefore a server that
accepts a stream marks its initial metadata, and the client writes nothing before it has seen the mark.
"""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

_KEY = "radixfleet-accepted"
ACCEPTED: Final = ((_KEY, "true"),)
"""The initial metadata of a stream that is served."""


async def is_accepted(call: grpc.aio.StreamStreamCall[Any, Any]) -> bool:
    """Wait for the server's initial metadata. False: the stream is refused, and the call's status says why."""
    return _KEY in await call.initial_metadata()
