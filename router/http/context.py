"""What a client's headers say of where its request belongs: a trace, and a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import structlog
from starlette.datastructures import Headers

from radixfleet.tracing import carried

_SESSION_HEADERS = ("x-session-id", "x-session-affinity")
_MAX_SESSION_CHARACTERS = 128
_NO_SESSION = nullcontext()


@contextmanager
def caller_context(headers: Headers) -> Iterator[None]:
    """For the time of a request: spans belong to the caller's trace (W3C traceparent), log lines name the session.

    A session is no reason to choose a worker: the next turn of a chat goes where its prefix is cached, by itself.
    """
    session = next((headers[name] for name in _SESSION_HEADERS if name in headers), "")[:_MAX_SESSION_CHARACTERS]
    bound = structlog.contextvars.bound_contextvars(session=session) if session else _NO_SESSION
    with carried(headers.items()), bound:
        yield
