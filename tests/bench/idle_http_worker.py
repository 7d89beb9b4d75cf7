"""A worker that does nothing, behind the HTTP that routers speak: `python -m tests.bench.idle_http_worker PORT`.

It answers `/v1/completions` with 16 tokens at once, streamed one an event or whole, and what a router asks about a
worker. It reads no more of a request than it must, so that what is measured is the router.
"""

from __future__ import annotations

import asyncio
import json
import sys

TOKENS = 16
_FACTS = json.dumps(
    {
        "model_path": "idle",
        "served_model_name": "idle",
        "model_id": "idle",
        "is_generation": True,
        "tp_size": 1,
        "dp_size": 1,
        "max_total_num_tokens": 1 << 24,
        "max_running_requests": 4096,
        "object": "list",
        "data": [{"id": "idle", "object": "model", "owned_by": "nobody", "max_model_len": 1 << 24}],
    }
).encode()


def _event(**fields: object) -> bytes:
    body = {"id": "1", "object": "text_completion", "created": 1, "model": "idle", **fields}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _choice(text: str, reason: str | None = None) -> list[dict[str, object]]:
    return [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]


_USAGE = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS + 1}
_WHOLE = _event(choices=_choice(" word" * TOKENS, "length"), usage=_USAGE)[6:]
_EVENTS = [_event(choices=_choice(" word", "length" if last else None)) for last in [False] * (TOKENS - 1) + [True]]


class IdleHttp(asyncio.Protocol):
    """One connection; one request after the other."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to answer."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end])
            length = _content_length(head)
            if len(self._received) < end + 4 + length:
                return
            body = bytes(self._received[end + 4 : end + 4 + length])
            del self._received[: end + 4 + length]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None, "connected"
        if not head.startswith(b"POST"):
            self._transport.write(_whole(_FACTS))
        elif b'"stream":true' in body[-200:].replace(b" ", b"") or b'"stream":true' in body[:200].replace(b" ", b""):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for event in _EVENTS:
                self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            self._transport.write(_whole(_WHOLE))


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(IdleHttp, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
