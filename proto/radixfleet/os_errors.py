"""What the operating system says is wrong, in one line for an operator."""

from __future__ import annotations

import socket


def reason_of(error: OSError) -> str:
    """The reason, with the file it is about, and without the number of the error."""
    # A socket says where it could not be bound, and so do we, in the form that the operator wrote.
    reason = (error.strerror or str(error)).partition(" (while attempting")[0]
    return reason if error.filename is None else f"{error.filename}: {reason}"


def why_not_bound(host: str, port: int) -> str:
    """Why nobody can listen there, found out by another try: gRPC tells its own log alone. May look up a name."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError as error:
        return reason_of(error)
    return "no reason is told"
