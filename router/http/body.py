"""Bodies of requests: read up to a limit, and decoded strictly. What is refused is refused with the field's name.

msgspec refuses what is not JSON (NaN, numbers beyond double precision, lone surrogates), and values of other types than
were declared, without guessing ("1" is no number). Where a name comes twice in an object, the last one counts.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive

from radixfleet.errors import InvalidRequest
from radixfleet.settings import format_bytes
from router.http.errors import TooLarge
from router.http.presence import ClientGone

BodyT = TypeVar("BodyT")

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SEARCHED_BYTES = 256 * 1024
"""Where the text of a larger body is bad nobody says: reading it once more, in Python, would stop the event loop."""


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """The whole body. Raises TooLarge, ClientGone when the client leaves before its end, 415 for what is no plain JSON.

    A browser sends JSON to other sites only after it has asked them; that is why the type must be right.
    """
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HTTPException(415, f"send JSON, and say so: Content-Type: application/json (got {kind!r})")
    packed = headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        raise HTTPException(415, f"send the body as it is: Content-Encoding {packed!r} is not read")
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def parse(body: bytes, kind: type[BodyT]) -> BodyT:
    """The body as a value of `kind`. Raises InvalidRequest."""
    if not body:
        raise InvalidRequest("the body is empty: send a JSON object")
    try:
        body.decode()  # in fields that nobody reads, msgspec does not look at it
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = (_PATH.search(text), _MISSING.search(text))
        field = ".".join(match[1] for match in found if match and match[1]).replace("[...]", "")
        text = text.replace("`$.", "`") if field else f"the body must be a JSON object: {text}"
        raise InvalidRequest(text, field=field) from None
    except RecursionError:
        raise InvalidRequest("the body is not served: it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        bad = _bad_text(body) if len(body) <= _SEARCHED_BYTES else None
        if bad is not None:
            raise InvalidRequest(f"{bad} is not Unicode: invalid UTF-8, or a lone surrogate", field=bad) from None
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def _bad_text(body: bytes) -> str | None:
    """Path of the first text that UTF-8 cannot carry; None where there is none, or where the body is no JSON at all."""
    try:
        value = json.loads(body.decode("utf-8", "surrogateescape"))
        return _first_bad(value, "")
    except (ValueError, RecursionError):
        return None


def _first_bad(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return path or "the body" if _SURROGATE.search(value) else None
    if isinstance(value, dict):
        if any(_SURROGATE.search(name) for name in value):
            return path or "the body"
        below = ((item, f"{path}.{name}" if path else name) for name, item in value.items())
    elif isinstance(value, list):
        below = ((item, f"{path}[{index}]") for index, item in enumerate(value))
    else:
        return None
    return next((bad for item, name in below if (bad := _first_bad(item, name)) is not None), None)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {format_bytes(max_bytes)} (the router's --max-message-bytes)")
