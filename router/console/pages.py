"""The console's files, read once, and the headers they go out with.

The policy of the pages: nothing from elsewhere, no script or style outside the files, no frame around them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

_KINDS: Mapping[str, str] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> Sequence[BaseRoute]:
    """/console and its files; / leads there."""
    pages = {name: _Page(name, data) for name, data in _read().items()}
    index = pages.pop("index.html")
    statics = [Route(f"/console/{name}", page.answer) for name, page in pages.items()]
    return [
        Route("/", _to_console),
        Route("/console", index.answer),
        Route("/console/", _to_console),
        *statics,
    ]


async def _to_console(_: Request) -> Response:
    return RedirectResponse("/console", 307)


class _Page:
    def __init__(self, name: str, data: bytes) -> None:
        self._data = data
        self._kind = _KINDS[name.rpartition(".")[2]]
        self._tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'

    async def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self._tag}
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        return Response(self._data, headers=headers, media_type=self._kind)


def _read() -> dict[str, bytes]:
    folder = files("router.console") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _KINDS}
