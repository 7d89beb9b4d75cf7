"""A port that nobody else gets. One that is free now may be taken by any other process before it is used."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that the system gives to no one while the block lasts, and on which nobody listens.

    A server may: it asks for this port by number and, as all servers do here, with SO_REUSEADDR.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
