"""The guard of the HTTP port, as plain ASGI around all routes: keys, limits, and what browsers must not do.

    GET /health                          Door.OPEN
    everything else that only looks      Door.CLIENT
    POST and its like under `_WORK`      Door.CLIENT, counted against the client's limits, and again by `count_more`
    any other POST and its like          Door.ADMIN, so that what is added is closed until it stands here

A key comes as `Authorization: Bearer KEY`, or as the password of Basic authentication, which browsers ask their user
for and then send by themselves, even where a page of another site makes the request. So a request that changes
something and says that it comes from another site is refused; and on a router without keys, one that a browser sends
to a name and not to an address (a page may have its name resolve to 127.0.0.1).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from contextlib import ExitStack
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from radixfleet.errors import PermissionDenied, RadixfleetError, Unauthenticated
from radixfleet.guard import Door, Guard, key_of, remember
from router.http.errors import error_response
from router.http.incoming import IncomingBody, Room

CONSOLE_HEADER = "X-Radixfleet-Console"
"""Of what the console's page asks for, but for looking; with the value 1."""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_HEALTH = "/health"
_WORK = ("/v1/", "/tokenize", "/detokenize", "/console/api/explain")
MAX_INCOMING_BYTES = 256 * 1024**2
_MORE = "radixfleet.count_more"


def door_of(method: str, path: str) -> Door:
    """The door of the router's own paths."""
    if method in _SAFE:
        return Door.OPEN if path == _HEALTH else Door.CLIENT
    return Door.CLIENT if path.startswith(_WORK) else Door.ADMIN


class HttpGuard:
    """An ASGI application that passes on what `guard` admits."""

    def __init__(self, app: ASGIApp, guard: Guard, max_incoming_bytes: int = MAX_INCOMING_BYTES) -> None:
        """`max_incoming_bytes`: of all bodies that are not whole."""
        self._app = app
        self._guard = guard
        self._room = Room(max_incoming_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        door = door_of(scope["method"], scope["path"])
        with ExitStack() as visit:
            try:
                caller = self._guard.admit(door, key_of(headers.get("authorization")))
                if scope["method"] not in _SAFE:
                    _refuse_other_sites(headers, is_open=self._guard.is_open)
                    if door is Door.CLIENT:
                        visit.enter_context(self._guard.visit(caller, _host(scope)))
            except RadixfleetError as error:
                await _refuse(error, headers, scope, receive, send)
                return
            remember(caller)
            scope[_MORE] = lambda count: visit.enter_context(self._guard.visit_more(caller, _host(scope), count))
            body = IncomingBody(receive, self._room)
            visit.callback(body.close)
            await self._app(scope, body, send)


def count_more(scope: Scope, count: int) -> None:
    """The request comes to so many more: they count against its client's limits, too, until it ends.

    Raises Overloaded or InvalidRequest.
    """
    if count:
        scope[_MORE](count)


async def _refuse(
    error: RadixfleetError, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
) -> None:
    if isinstance(error, Unauthenticated) and "authorization" in headers and CONSOLE_HEADER.lower() in headers:
        # An admin token that was mistyped in the console: at 401 a browser forgets the key that shows the page.
        error = PermissionDenied(str(error))
    response = error_response(error)
    if isinstance(error, Unauthenticated):
        is_page = "text/html" in headers.get("accept", "")
        response.headers["WWW-Authenticate"] = 'Basic realm="radixfleet", charset="UTF-8"' if is_page else "Bearer"
    # The body was not read: what is left of it on this connection is no request.
    if scope["method"] not in _SAFE:
        response.headers["Connection"] = "close"
    await response(scope, receive, send)


def _refuse_other_sites(headers: Mapping[str, str], *, is_open: bool) -> None:
    """Raises PermissionDenied for what a page of another site makes a browser send. Programs send no such headers."""
    origin, host = headers.get("origin"), headers.get("host", "")
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") or (
        origin is not None and origin.partition("://")[2] != host
    ):
        raise PermissionDenied("pages of other sites may not do this")
    if origin is not None and is_open and not _is_address(host):
        raise PermissionDenied(f"from a browser, this needs an admin token set, or an address and not the name {host}")


def _is_address(host: str) -> bool:
    """Whether a Host header is no name that somebody else could make lead here."""
    try:
        hostname = urlsplit(f"//{host}").hostname or ""
        if hostname != "localhost":
            ipaddress.ip_address(hostname)
    except ValueError:
        return False
    return True


def _host(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "unknown"
