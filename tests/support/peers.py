"""Workers of every dialect as fakes with the same levers, each with the link that the router would use to it.

What they answer is of their own making; how long, when, and how it goes wrong is told by `Levers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc

from radixfleet.channel import open_channel
from radixfleet.clock import MonotonicClock
from radixfleet.errors import InvalidRequest
from radixfleet.v1 import inference_pb2
from router.dialects.engine import EngineSpeaker
from router.dialects.http_engine import HttpSpeaker
from router.dialects.words import SglangWords, VllmWords
from router.dispatch.link import CallLink, FailureKind, WorkerLink
from router.dispatch.link_stream import StreamLink
from router.dispatch.link_translated import TranslatedLink
from router.worker_address import engine_address
from router.workers.tokenizers import TokenizerStore
from tests.support.fake_worker import Call, FakeWorker, Script
from tests.support.foreign_engine import ForeignEngine
from tests.support.openai_engine import OpenAiEngine
from tests.support.router_fixture import fake_worker
from tests.support.router_parts import Parts

CONTEXT_TOKENS = 1 << 21
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Levers:
    """What happens to requests."""

    before_start: asyncio.Event | None = None
    """Requests wait here before the peer says anything."""
    before_end: asyncio.Event | None = None
    """Answers wait here when they are all but over."""
    refuses: str = ""
    """What it says to every request; empty: it takes them."""
    breaks_off: bool = False
    """Answers end without their end."""
    message_bytes: int = 1
    """So large is each token's message, about."""


class Peer(Protocol):
    """One fake behind its dialect."""

    broken_off: FailureKind
    """What it is to the router when an answer ends without its end."""

    def pull(self, levers: Levers) -> None:
        """From now on."""
        ...

    @property
    def address(self) -> str:
        """host:port, once it is started."""
        ...

    @property
    def states(self) -> Sequence[str]:
        """Of its requests, in the order in which they came: "finished", "left", "failed", or what goes on."""
        ...

    @property
    def prompts(self) -> Sequence[int]:
        """Lengths of the prompts that it was sent."""
        ...

    @property
    def tokens_sent(self) -> int:
        """Of all requests together."""
        ...

    async def start(self) -> None:
        """Listen."""
        ...

    async def kill(self) -> None:
        """Stop at once."""
        ...

    def link(self, address: str = "") -> AbstractAsyncContextManager[WorkerLink]:
        """An async context manager: the way to it, perhaps over another address."""
        ...


class _Played:
    """What peers have in common: a fake does the work."""

    _fake: FakeWorker | ForeignEngine | OpenAiEngine

    @property
    def states(self) -> Sequence[str]:
        return ["left" if call.state in ("cancelled", "aborted") else call.state for call in self._fake.calls]

    @property
    def address(self) -> str:
        return self._fake.address.removeprefix("http://")

    @property
    def tokens_sent(self) -> int:
        return sum(call.tokens_sent for call in self._fake.calls)

    async def start(self) -> None:
        await self._fake.start()

    async def kill(self) -> None:
        await self._fake.kill()


@dataclass
class NativePeer(_Played):
    """Our own worker, by calls or by one stream."""

    by_stream: bool
    broken_off: FailureKind = "transport"
    """It ends no answer so while it lives."""

    def __post_init__(self) -> None:
        self._levers = Levers()
        self._fake: FakeWorker = fake_worker(script=self._script, max_context_tokens=CONTEXT_TOKENS)

    def pull(self, levers: Levers) -> None:
        self._levers = levers

    def _script(self, call: Call) -> Script:
        sampling, levers = call.request.sampling, self._levers
        return Script(
            tokens=sampling.max_new_tokens or 4,
            text_bytes=levers.message_bytes,
            before_start=levers.before_start,
            before_finish=levers.before_end,
            error=InvalidRequest(levers.refuses) if levers.refuses else None,
            finish=not levers.breaks_off,
            others=max(0, sampling.n - 1),
        )

    @property
    def prompts(self) -> Sequence[int]:
        return [len(call.tokens) for call in self._fake.calls]

    @asynccontextmanager
    async def link(self, address: str = "") -> AsyncIterator[WorkerLink]:
        async with open_channel(address or self.address) as channel:
            worker = Parts(1).workers[0]
            if not self.by_stream:
                yield CallLink(channel, worker.name)
                return
            stream = StreamLink(channel, worker)
            yield stream
            await stream.close()


@dataclass
class GrpcEnginePeer(_Played):
    """SGLang's or vLLM's engine, by gRPC."""

    words: SglangWords | VllmWords
    broken_off: FailureKind = "fault"

    def __post_init__(self) -> None:
        self._fake = ForeignEngine(
            "sglang" if isinstance(self.words, SglangWords) else "vllm",
            max_context_tokens=CONTEXT_TOKENS,
            caches=False,
        )

    def pull(self, levers: Levers) -> None:
        fake = self._fake
        fake.before_start, fake.gate = levers.before_start, levers.before_end
        fake.refusal = (grpc.StatusCode.INVALID_ARGUMENT, levers.refuses) if levers.refuses else None
        fake.reason = "" if levers.breaks_off else "length"
        fake.padding_bytes = levers.message_bytes

    @property
    def prompts(self) -> Sequence[int]:
        return [len(call.prompt) for call in self._fake.calls]

    @asynccontextmanager
    async def link(self, address: str = "") -> AsyncIterator[WorkerLink]:
        async with open_channel(address or self.address) as channel:
            archives = TokenizerStore(executor=None)
            speaker = EngineSpeaker(self.words, channel, self.address, MonotonicClock(), archives, timeout_s=_TIMEOUT_S)
            await speaker.info()
            yield TranslatedLink(speaker, "peer")
            await speaker.close()


@dataclass
class HttpEnginePeer(_Played):
    """An engine that speaks OpenAI's HTTP alone."""

    broken_off: FailureKind = "fault"

    def __post_init__(self) -> None:
        self._fake = OpenAiEngine(max_model_len=CONTEXT_TOKENS)

    def pull(self, levers: Levers) -> None:
        fake = self._fake
        fake.before_headers, fake.gate = levers.before_start, levers.before_end
        fake.refusal = (400, {"error": {"message": levers.refuses}}) if levers.refuses else None
        fake.reason = None if levers.breaks_off else "length"
        fake.padding_bytes = levers.message_bytes

    @property
    def prompts(self) -> Sequence[int]:
        return [len(call.prompt) for call in self._fake.calls]

    @asynccontextmanager
    async def link(self, address: str = "") -> AsyncIterator[WorkerLink]:
        where = engine_address(f"http://{address or self.address}")
        speaker = HttpSpeaker(where, MonotonicClock(), timeout_s=_TIMEOUT_S, api_key=lambda: None)
        await speaker.info()
        yield TranslatedLink(speaker, "peer")
        await speaker.close()


PEERS: dict[str, Callable[[], Peer]] = {
    "calls": lambda: NativePeer(by_stream=False),
    "stream": lambda: NativePeer(by_stream=True),
    "sglang": lambda: GrpcEnginePeer(SglangWords()),
    "vllm": lambda: GrpcEnginePeer(VllmWords()),
    "openai": HttpEnginePeer,
}


def asks(request: inference_pb2.GenerateRequest, tokens: int, n: int = 1) -> inference_pb2.GenerateRequest:
    """The request, for so many tokens."""
    request.sampling.max_new_tokens = tokens
    request.sampling.n = n
    return request
