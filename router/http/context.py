"""What a client's headers say of where its request belongs: a trace, and a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import structlog
from opentelemetry import context, propagate
from starlette.datastructures import Headers

_SESSION_HEADERS = ("x-session-id", "x-session-affinity")
_MAX_SESSION_CHARACTERS = 128


@contextmanager
def caller_context(headers: Headers) -> Iterator[None]:
    """For the time of a request: spans belong to the caller's trace (W3C traceparent), log lines name the session.

    A session is no reason to choose a worker: the next turn of a chat goes where its prefix is cached, by itself.
    """
    with ExitStack() as stack:
        if "traceparent" in headers:
            token = context.attach(propagate.extract(dict(headers)))
            stack.callback(context.detach, token)
        session = next((headers[name] for name in _SESSION_HEADERS if name in headers), "")
        if session:
            bound = structlog.contextvars.bound_contextvars(session=session[:_MAX_SESSION_CHARACTERS])
            stack.enter_context(bound)
        yield
