"""HTTP to one engine: requests that are watched while they wait, and what goes wrong as errors of ours.

aiohttp does the speaking. An engine that is stalled, and not dead, closes no connection; so who waits for it looks
every now and then whether anything at all was heard of it lately.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import msgspec

from radixfleet.clock import Clock
from radixfleet.errors import DeadlineExceeded, InvalidRequest, Overloaded, RadixfleetError, Unavailable
from radixfleet.tls import ClientTls
from router.dialects.http_events import error_message
from router.dialects.speaker import Faulty, Unreachable
from router.worker_address import EngineAddress

_LOOK_S = 5.0
_SILENT_S = 30.0
"""Like gRPC's keepalive between router and worker."""
_KEEP_ALIVE_S = 2.0
"""Servers hang up on idle connections, uvicorn after 5 s; a request must not meet one that is just being closed."""
_MAX_ERROR_BYTES = 64 * 1024
_MAX_ANSWER_BYTES = 64 * 1024**2

_LARGE_BYTES = 1024**2
"""From here on aiohttp wants a file, which it sends in pieces, so that others get their turns."""

T = TypeVar("T")


class HttpConnection:
    """On the event loop only."""

    def __init__(
        self,
        address: EngineAddress,
        clock: Clock,
        *,
        connect_timeout_s: float,
        api_key: Callable[[], str | None],
        tls: ClientTls | None = None,
    ) -> None:
        """`tls`: CAs that sign certificates beside the machine's, and what is shown to engines that ask for one."""
        self.address = address
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._api_key = api_key
        self._tls = tls
        self._opened: aiohttp.ClientSession | None = None
        self.heard_at_s = clock.now()
        """When the engine last said anything."""
        self.was_refused = False
        """A connection was refused, or broke: the engine may be another one now. For whoever asks to reset."""

    @property
    def is_silent(self) -> bool:
        """Nothing was heard of the engine for longer than it may take."""
        return self._clock.now() - self.heard_at_s > _SILENT_S

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises Unreachable."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session().get(
                    url, headers=self._authorization(), ssl=self._trust(), allow_redirects=False
                ) as response,
            ):
                body = await _beginning(response, _MAX_ANSWER_BYTES)
                self._heard()
                return response.status, body
        except TimeoutError as error:
            raise Unreachable(f"{self.address.host} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._broken(error) from error

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], ends_at_s: float | None
    ) -> aiohttp.ClientResponse:
        """An answer with a status of 200, still to be read and to be closed. Raises RadixfleetError, Unreachable.

        `ends_at_s`: by the event loop's clock; None: never.
        """
        data = msgspec.json.encode(body)
        response = await self._watched(self._sent(path, data, headers), ends_at_s)
        if response.status == 200:
            return response
        try:
            told = await self._watched(_beginning(response, _MAX_ERROR_BYTES), ends_at_s)
        finally:
            response.close()
        raise _refusal(response.status, told, response.headers, self.address)

    async def read(self, response: aiohttp.ClientResponse, ends_at_s: float | None) -> AsyncGenerator[bytes, None]:
        """The body, as it comes: the next piece is taken from the engine when it is asked for."""
        while data := await self._watched(response.content.readany(), ends_at_s):
            yield data

    async def whole(self, response: aiohttp.ClientResponse, ends_at_s: float | None) -> bytes:
        """The body. Raises Faulty for one that is too long."""
        parts, size = [], 0
        async for data in self.read(response, ends_at_s):
            parts.append(data)
            size += len(data)
            if size > _MAX_ANSWER_BYTES:
                raise Faulty(f"it sent an answer of more than {_MAX_ANSWER_BYTES} bytes")
        return b"".join(parts)

    async def close(self) -> None:
        """Every connection."""
        if self._opened is not None:
            await self._opened.close()

    def _authorization(self) -> dict[str, str]:
        key = self._api_key()
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def _trust(self) -> ssl.SSLContext | bool:
        """True: as aiohttp does by itself, by the machine's CAs."""
        return self._tls.watched_context.current() if self._tls and self.address.base.startswith("https:") else True

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            )
        return self._opened

    async def _sent(self, path: str, data: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        return await self._session().post(
            f"{self.address.base}{path}",
            data=data if len(data) < _LARGE_BYTES else io.BytesIO(data),
            headers={"Content-Type": "application/json", **self._authorization(), **headers},
            ssl=self._trust(),
            allow_redirects=False,
        )

    async def _watched(self, work: Coroutine[Any, Any, T], ends_at_s: float | None) -> T:
        """Its result, unless the deadline passes or the engine has fallen silent before."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                left_s = _LOOK_S if ends_at_s is None else min(_LOOK_S, ends_at_s - loop.time())
                if left_s <= 0:
                    raise DeadlineExceeded("the deadline passed before the answer was there")
                await asyncio.wait({task}, timeout=left_s)
                if not task.done() and self.is_silent:
                    raise Unreachable(f"nothing was heard of it for {_SILENT_S:.0f} s")
            result = task.result()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._broken(error) from error
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, aiohttp.ClientError, OSError, ValueError):
                    await task
        self._heard()
        return result

    def _heard(self) -> None:
        self.heard_at_s = self._clock.now()

    def _broken(self, error: Exception) -> Unreachable:
        if isinstance(error, aiohttp.ClientConnectionError | OSError):
            self.was_refused = True
        return Unreachable(str(error) or type(error).__name__)


async def _beginning(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """So much of a body, however many pieces it comes in: `read(n)` gives the first of them."""
    body = bytearray()
    while len(body) < max_bytes and (piece := await response.content.read(max_bytes - len(body))):
        body += piece
    return bytes(body)


def _refusal(
    status: int, body: bytes, headers: Mapping[str, str], address: EngineAddress
) -> RadixfleetError | Unreachable:
    """What a status other than 200 means."""
    told = error_message(body, f"status {status}")
    if status >= 500 and status != HTTPStatus.SERVICE_UNAVAILABLE:
        return Faulty(f"it answered with status {status}: {told}")
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return Overloaded(f"the engine is busy: {told}", retry_after_s=_retry_after_s(headers))
    if status in _NOT_BY_THE_REQUEST:
        problem = _NOT_BY_THE_REQUEST[HTTPStatus(status)]
        return Unavailable(f"the engine at {address.host} {problem}: {told}", retry_after_s=_retry_after_s(headers))
    if status < 400:
        where = headers.get("Location", "elsewhere")
        return Unavailable(f"the engine at {address.host} sends requests to {where}: give that address")
    return InvalidRequest(told)


_NOT_BY_THE_REQUEST = {
    HTTPStatus.UNAUTHORIZED: "wants another key than --engine-api-key",
    HTTPStatus.FORBIDDEN: "wants another key than --engine-api-key",
    HTTPStatus.NOT_FOUND: "does not know the model or the path",
    HTTPStatus.REQUEST_TIMEOUT: "did not wait for the request",
    HTTPStatus.SERVICE_UNAVAILABLE: "is not ready",
}


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return min(60.0, max(0.1, float(headers.get("Retry-After", "1"))))
    except ValueError:
        return 1.0
