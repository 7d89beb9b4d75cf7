"""X-Request-ID: the client's name for a request, or one made up here; logged, and sent back with every answer."""

from __future__ import annotations

import secrets

from starlette.types import Scope

_KEY = "radixfleet.request_id"


def name_request(scope: Scope) -> str:
    """Give a request its id; once, before anything else."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    request_id = given.decode("latin-1").strip() or secrets.token_hex(8)
    scope[_KEY] = request_id
    return request_id


def request_id_of(scope: Scope) -> str:
    """The id that a request was given."""
    request_id: str = scope[_KEY]
    return request_id
