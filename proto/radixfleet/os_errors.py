"""What the operating system says is wrong, in one line for an operator."""

from __future__ import annotations

import socket
from typing import Any


def reason_of(error: OSError) -> str:
    """The reason, with the file it is about, and without the number of the error."""
    # A socket says where it could not be bound, and so do we, in the form that the operator wrote.
    reason = (error.strerror or str(error)).partition(" (while attempting")[0]
    return reason if error.filename is None else f"{error.filename}: {reason}"


def why_not_bound(host: str, port: int, *, shared_port: bool = False) -> str | None:
    """Why nobody can listen there, found out by binding a socket for a moment; None: one can. May look up a name.

    gRPC writes the reason to its own log, and tells its caller none. It listens on what it can of a name's addresses,
    so one that is free is enough. `shared_port`: others may listen on the port, if they let it be shared.
    """
    option = socket.SO_REUSEPORT if shared_port else socket.SO_REUSEADDR
    reason = None
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            reason = _why_not_there((family, kind, protocol), option, where)
            if reason is None:
                return None
    except OSError as error:  # no such name
        return reason_of(error)
    return reason


def _why_not_there(kind: tuple[int, int, int], option: int, where: Any) -> str | None:
    try:
        with socket.socket(*kind) as probe:  # fails where the machine has no such addresses, as without IPv6
            probe.setsockopt(socket.SOL_SOCKET, option, 1)
            probe.bind(where)
    except OSError as error:
        return reason_of(error)
    return None
