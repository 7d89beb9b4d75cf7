"""An engine of another project that speaks nothing but OpenAI's HTTP, on a real port, with nothing behind it.

What it "generates" is the alphabet, a letter an event, from the letter on that the prompt's length gives. It can be
slow, busy, broken, gone, or dumb in all the ways in which such servers are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from router.http.server import HttpServer


def letters(first: int, count: int) -> str:
    """ "abc...", going round, from the letter with this number on."""
    return "".join(chr(97 + (first + position) % 26) for position in range(count))


@dataclass(eq=False)
class HttpCall:
    """One request for an answer."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    state: str = "running"
    """running, then finished, cancelled, failed."""
    cached: int = 0
    tokens_sent: int = 0

    @property
    def prompt(self) -> Any:
        """Text, token ids, or the text of the last message."""
        return self.body["prompt"] if "prompt" in self.body else self.body["messages"][-1]["content"]


@dataclass(eq=False)
class OpenAiEngine:
    """See the module. Change fields while it runs."""

    model: str = "fake-model"
    owned_by: str = "vllm"
    others: list[dict[str, Any]] = field(default_factory=list)
    """More entries of its list of models."""
    max_model_len: int | None = 4096
    meta: Any = None
    """What llama.cpp tells of a model in its list, and engines of others in forms of their own."""
    takes_ids: bool = True
    has_completions: bool = True
    has_health: bool = True
    health: int = 200
    streams: bool = True
    """False: it answers in one piece, whatever is asked."""
    usage: Literal["none", "plain", "cached"] = "cached"
    says_done: bool = True
    is_endless: bool = False
    """It streams its first letter for ever."""
    gate: asyncio.Event | None = None
    """Answers wait here before their last letter."""
    before_headers: asyncio.Event | None = None
    """They wait here before they say anything at all."""
    padding_bytes: int = 0
    """In a field of each event that nobody knows."""
    dies_after: int | None = None
    """Letters, and then the connection breaks off."""
    says: dict[int, bytes] = field(default_factory=dict)
    """In the place of the letter with this number."""
    refusal: tuple[int, Any] | None = None
    reason: str | None = "length"
    api_key: str | None = None
    thought: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)
    stop_reason: Any = None
    calls: list[HttpCall] = field(default_factory=list)
    listings: int = 0
    address: str = ""
    _server: HttpServer | None = None
    _seen: list[Any] = field(default_factory=list)

    async def start(self, port: int = 0) -> OpenAiEngine:
        """Listen."""
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )
        self._server = HttpServer(app, "127.0.0.1", port)
        self._server.start()
        self.address = f"http://127.0.0.1:{self._server.port}"
        return self

    @property
    def port(self) -> int:
        """It listens on, or did."""
        return int(self.address.rsplit(":", 1)[1])

    @property
    def worker_id(self) -> str:
        """As the router calls it."""
        return f"openai@{self.address.removeprefix('http://')}"

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return sum(call.state == "running" for call in self.calls)

    async def kill(self) -> None:
        """Every connection breaks off and the port is closed."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()

    async def restart(self) -> None:
        """Another process at the same address: nothing is cached."""
        port = self.port
        await self.kill()
        self._seen.clear()
        await self.start(port)

    def cached(self, prompt: Any) -> int:
        """Tokens (letters, or ids) of the longest beginning that it has computed before, in blocks of 16."""
        best = max((_shared(prompt, seen) for seen in self._seen if type(seen) is type(prompt)), default=0)
        return best // 16 * 16

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("", self.health if self.has_health else 404)

    async def _models(self, request: Request) -> Response:
        self.listings += 1
        if self._is_locked(request):
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        entry = {"id": self.model, "object": "model", "owned_by": self.owned_by}
        if self.max_model_len is not None:
            entry |= {"max_model_len": self.max_model_len}
        if self.meta is not None:
            entry |= {"meta": self.meta}
        return JSONResponse({"object": "list", "data": [entry, *self.others]})

    def _is_locked(self, request: Request) -> bool:
        return self.api_key is not None and request.headers.get("authorization") != f"Bearer {self.api_key}"

    async def _completions(self, request: Request) -> Response:
        if not self.has_completions:
            return JSONResponse({"detail": "Not Found"}, 404)
        body = json.loads(await request.body())
        if isinstance(body["prompt"], list) and not self.takes_ids:
            return JSONResponse({"error": {"message": "prompt must be a string", "type": "invalid"}}, 400)
        return await self._answer(request, body)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, json.loads(await request.body()))

    async def _answer(self, request: Request, body: dict[str, Any]) -> Response:
        call = HttpCall(request.url.path, body, dict(request.headers))
        self.calls.append(call)
        if self._is_locked(request):
            call.state = "failed"
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        if self.before_headers is not None:
            await _gate_or_gone(self.before_headers, call, request)
            if call.state == "cancelled":
                return Response()
        if self.refusal is not None:
            call.state = "failed"
            status, told = self.refusal
            return JSONResponse(told, status, headers={"Retry-After": "2"})
        call.cached = self.cached(call.prompt)
        self._seen.append(call.prompt)
        if not self.streams:
            pieces = [piece async for piece in self._pieces(call)]
            call.state = "finished"
            return JSONResponse(self._whole(call, pieces))
        return StreamingResponse(self._stream(call, request), media_type="text/event-stream")

    async def _pieces(self, call: HttpCall) -> AsyncIterator[tuple[int, str, bool]]:
        """(completion, letter, whether it is the last)."""
        count = int(call.body.get("max_tokens", 4))
        for index in range(int(call.body.get("n", 1))):
            for position, letter in enumerate(letters(len(call.prompt) + index, count)):
                yield index, letter, position == count - 1

    async def _stream(self, call: HttpCall, request: Request) -> AsyncIterator[bytes]:
        """Events."""
        try:
            if self.thought:
                yield self._event(call, {"index": 0, "delta": {"reasoning_content": self.thought}})
            async for number, (index, letter, is_last) in _numbered(self._pieces(call)):
                if is_last and self.gate is not None:
                    await self.gate.wait()
                if number == self.dies_after:
                    call.state = "failed"
                    raise ConnectionAbortedError("as the test wants it")
                if number in self.says:
                    yield self.says[number]
                    continue
                yield self._event(call, self._choice(call, index, letter, is_last=is_last and not self.is_endless))
                call.tokens_sent += 1
                while self.is_endless:
                    await asyncio.sleep(0)
                    yield self._event(call, self._choice(call, index, letter, is_last=False))
            if self.usage != "none":
                yield self._event(call, None)
            if self.says_done:
                yield b"data: [DONE]\n\n"
            call.state = "finished"
        except (asyncio.CancelledError, GeneratorExit):
            call.state = "cancelled"
            raise

    def _choice(self, call: HttpCall, index: int, letter: str, *, is_last: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": self.reason if is_last else None}
        if is_last and self.stop_reason is not None:
            choice["stop_reason"] = self.stop_reason
        if call.body.get("return_token_ids") and self.owned_by == "vllm":
            choice["token_ids"] = [ord(letter)]
        if call.body.get("logprobs") is not None:
            tops = {f"token_id:{ord(letter)}": -1.0, "token_id:5": -0.5}
            choice["logprobs"] = {
                "tokens": [f"token_id:{ord(letter)}"],
                "token_logprobs": [-1.0],
                "top_logprobs": [tops],
            }
        if "messages" not in call.body:
            return choice | {"text": letter}
        delta: dict[str, Any] = {"role": "assistant", "content": letter}
        if is_last and self.tool_calls:
            delta["tool_calls"] = [
                {"index": number, "id": f"c{number}", "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(self.tool_calls)
            ]
        return choice | {"delta": delta}

    def _event(self, call: HttpCall, choice: dict[str, Any] | None) -> bytes:
        event: dict[str, Any] = {"id": "x", "model": self.model, "choices": [] if choice is None else [choice]}
        if self.padding_bytes:
            event["padding"] = "x" * self.padding_bytes
        if choice is None:
            event["usage"] = self._usage(call)
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def _usage(self, call: HttpCall) -> dict[str, Any]:
        completion = int(call.body.get("max_tokens", 4)) * int(call.body.get("n", 1))
        usage: dict[str, Any] = {"prompt_tokens": len(call.prompt), "completion_tokens": completion}
        # As vLLM and SGLang do: nothing is said of nothing.
        if self.usage == "cached" and call.cached:
            usage["prompt_tokens_details"] = {"cached_tokens": call.cached}
        return usage

    def _whole(self, call: HttpCall, pieces: list[tuple[int, str, bool]]) -> dict[str, Any]:
        choices = []
        for index in sorted({piece[0] for piece in pieces}):
            text = "".join(letter for number, letter, _ in pieces if number == index)
            content = {"message": {"content": text}} if "messages" in call.body else {"text": text}
            choices.append({"index": index, "finish_reason": self.reason, **content})
        return {"choices": choices, "usage": self._usage(call)}


def _shared(one: Any, other: Any) -> int:
    """Length of the beginning that two texts, or lists, have in common."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


async def _numbered(pieces: AsyncIterator[tuple[int, str, bool]]) -> AsyncIterator[tuple[int, tuple[int, str, bool]]]:
    number = 0
    async for piece in pieces:
        yield number, piece
        number += 1


async def _gate_or_gone(gate: asyncio.Event, call: HttpCall, request: Request) -> None:
    """Wait for the gate; note when the client leaves before."""
    opened = asyncio.ensure_future(gate.wait())
    left = asyncio.ensure_future(request.receive())  # the body was read: what comes now is that the client leaves
    try:
        await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            call.state = "cancelled"
    finally:
        opened.cancel()
        left.cancel()
