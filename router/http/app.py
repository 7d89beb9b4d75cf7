"""The HTTP application: lists of routes put together, and what holds for all of them.

    faults become answers -> guard (keys, limits) -> routes -> endpoint

An endpoint raises a RadixfleetError and the client gets its status and error object. Anything else is our fault: logged
once, with the traceback, and the client hears "internal error" and a number to find it by.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Router
from starlette.types import Message, Receive, Scope, Send

from radixfleet.errors import RadixfleetError
from radixfleet.guard import Guard
from router.http.errors import ErrorAnswer, ErrorBody, error_response, json_response, our_fault
from router.http.guard import MAX_INCOMING_BYTES, HttpGuard
from router.http.presence import ClientGone
from router.http.request_id import name_request


class HttpApp:
    """All `routes` in one application; the first that matches a path serves it, to those whom `guard` admits."""

    def __init__(self, routes: Sequence[BaseRoute], guard: Guard, max_incoming_bytes: int = MAX_INCOMING_BYTES) -> None:
        """`max_incoming_bytes`: of all bodies that are not whole."""
        self._app = HttpGuard(Router(routes, redirect_slashes=False), guard, max_incoming_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        scope["app"] = self  # only then do the routes raise, where they do not serve a path or method
        request_id = name_request(scope).encode("latin-1")
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except ClientGone:
            return
        except Exception as error:
            if has_begun:  # there is no way left to tell but to break off
                raise
            await _answer(error, scope)(scope, receive, sending)


def _answer(error: Exception, scope: Scope) -> Response:
    if isinstance(error, RadixfleetError):
        return error_response(error)
    if isinstance(error, HTTPException):
        return _not_served(error, scope)
    return error_response(our_fault(error, scope["path"]))


def _not_served(error: HTTPException, scope: Scope) -> Response:
    """No such path, or not by this method."""
    phrase = HTTPStatus(error.status_code).phrase
    text = f"{scope['method']} {scope['path']}: {phrase.lower()}; /openapi.json says what is served"
    if error.detail != phrase:  # somebody said more
        text = error.detail
    code = "not_found" if error.status_code == HTTPStatus.NOT_FOUND else "not_allowed"
    return json_response(
        ErrorAnswer(ErrorBody(text, "invalid_request_error", code=code)), error.status_code, error.headers
    )
