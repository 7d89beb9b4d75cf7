"""Errors as HTTP answers, in the form of OpenAI's: the one table from the tree in `radixfleet.errors` to HTTP.

{"error": {"message": "...", "type": "invalid_request_error", "param": "max_tokens", "code": "invalid_request"}}
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import structlog
from starlette.responses import Response

from radixfleet import errors
from radixfleet.errors import RadixfleetError

_log = structlog.get_logger("radixfleet.router.http")


class TooLarge(errors.InvalidRequest):
    """The body has more bytes than are taken."""


class TooSlow(errors.InvalidRequest):
    """The body did not come in time."""


@dataclass(frozen=True, slots=True)
class _Kind:
    status: int
    type: str


_KINDS: Mapping[type[RadixfleetError], _Kind] = {
    TooLarge: _Kind(413, "invalid_request_error"),
    TooSlow: _Kind(408, "invalid_request_error"),
    errors.InvalidRequest: _Kind(400, "invalid_request_error"),
    errors.UnknownModel: _Kind(404, "not_found_error"),
    errors.UnknownWorker: _Kind(404, "not_found_error"),
    errors.Unauthenticated: _Kind(401, "authentication_error"),
    errors.PermissionDenied: _Kind(403, "permission_error"),
    errors.Overloaded: _Kind(429, "rate_limit_error"),
    errors.Unavailable: _Kind(503, "service_unavailable_error"),
    errors.DeadlineExceeded: _Kind(504, "timeout_error"),
    errors.Cancelled: _Kind(499, "cancelled_error"),
    errors.InternalError: _Kind(500, "server_error"),
}


class ErrorBody(msgspec.Struct):
    """What is wrong, and what to change."""

    message: str
    type: str
    param: str | None = None
    """The field at fault."""
    code: str | None = None
    """A constant that programs can compare."""


class ErrorAnswer(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorBody


def status_of(error: RadixfleetError) -> int:
    """The HTTP status of an error."""
    return _kind(error).status


def error_answer(error: RadixfleetError) -> ErrorAnswer:
    """The body that tells it."""
    param = error.field if isinstance(error, errors.InvalidRequest) else ""
    return ErrorAnswer(ErrorBody(str(error), _kind(error).type, param or None, code_of(error)))


def code_of(error: RadixfleetError) -> str:
    """Its reason, as OpenAI's API spells such constants."""
    return "model_not_found" if isinstance(error, errors.UnknownModel) else error.reason.lower()


def error_response(error: RadixfleetError) -> Response:
    """The whole answer, with Retry-After where trying again can help."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["Retry-After-Ms"] = str(max(1, round(error.retry_after_s * 1000)))
    if isinstance(error, TooSlow):  # what is left of the body is not waited for
        headers["Connection"] = "close"
    return json_response(error_answer(error), status_of(error), headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A struct, or plain values, as JSON."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), media_type="application/json")


def our_fault(error: BaseException, path: str) -> errors.InternalError:
    """What the client hears of a fault of ours, which is logged under the same number."""
    incident = secrets.token_hex(4)
    _log.error("request failed by a fault of ours", path=path, incident=incident, exc_info=error)
    return errors.InternalError(f"internal error (incident {incident} in the server's log)")


def _kind(error: RadixfleetError) -> _Kind:
    return next(_KINDS[kind] for kind in type(error).__mro__ if kind in _KINDS)
