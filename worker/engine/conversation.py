"""The front's half of the conversation with an engine, however messages travel: open streams, status, listeners."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from radixfleet.errors import InternalError, RadixfleetError, Unavailable
from radixfleet.types import Grammar, Incarnation, WorkerStatus
from worker.core.messages import (
    Abort,
    Admitted,
    EngineMessage,
    Flush,
    Flushed,
    FollowBlocks,
    FrontMessage,
    LoadFailed,
    Output,
    Prepare,
    Prepared,
    PromptChunk,
    PromptLogprobs,
    Ready,
    Report,
    StepOutputs,
    Submit,
)
from worker.engine.handle import EngineLoadError, Listener, Notice, RequestStream, StateChange

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

_RETRY_AFTER_S = 1.0
_REFUSALS = {
    WorkerStatus.LOADING: "the worker is loading its model; try again soon",
    WorkerStatus.FAILED: "the worker's engine has failed; try another worker, or this one later",
}


class Conversation(ABC):
    """All of `EngineHandle` but `start` and `stop`. A subclass carries messages: it gives `_send`, and calls `_hear`.

    One level of inheritance instead of a delegate, because the two handles would otherwise repeat eleven methods each.
    """

    def __init__(self) -> None:
        self._status = WorkerStatus.LOADING
        self._incarnation = _new_incarnation()
        self._last_report: Report | None = None
        self._streams: dict[int, RequestStream] = {}
        self._flushes: dict[int, asyncio.Future[Flushed]] = {}
        self._preparations: dict[int, asyncio.Future[Prepared]] = {}
        self._uids = itertools.count(1)
        self._tickets = itertools.count(1)
        self._listeners: list[Listener] = []
        self._loaded = asyncio.Event()
        """Loading has ended, well or badly."""
        self._ready: Ready | None = None
        self._load_error = ""
        self._stopping = False

    @abstractmethod
    def _send(self, message: FrontMessage) -> None:
        """Carry a message to the engine. Never blocks, never raises."""

    @property
    def status(self) -> WorkerStatus:
        """See EngineHandle, here and below."""
        return self._status

    @property
    def incarnation(self) -> Incarnation:
        """Of the engine that serves, or that is to serve next."""
        return self._incarnation

    @property
    def last_report(self) -> Report | None:
        """None until the first of this incarnation."""
        return self._last_report

    @property
    def last_ready(self) -> Ready | None:
        """Kept while the engine restarts; set before the status becomes SERVING."""
        return self._ready

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended."""
        return len(self._streams)

    async def ready(self) -> Ready:
        """Wait for loading to end."""
        await self._loaded.wait()
        if self._ready is None:
            raise EngineLoadError(self._load_error)
        return self._ready

    def next_uid(self) -> int:
        """Unique in the life of the handle, so also in that of each engine."""
        return next(self._uids)

    def submit(self, request: Submit) -> RequestStream:
        """Hand over a request."""
        (stream,) = self.submit_group(request)
        return stream

    def submit_group(self, request: Submit) -> list[RequestStream]:
        """Hand over a request and its children, in one message."""
        self._require_serving()
        uids = [request.uid, *(child.uid for child in request.children)]
        streams = [RequestStream(uid, self._abandon) for uid in uids]
        self._streams.update(zip(uids, streams, strict=True))
        self._send(request)
        return streams

    def abort(self, uid: int) -> None:
        """Ask for a request's end; its stream ends when the engine says so."""
        if uid in self._streams:
            self._send(Abort(uid))

    async def flush(self) -> Flushed:
        """Drop evictable prefixes."""
        ticket = next(self._tickets)
        return await self._ask(Flush(ticket), ticket, self._flushes)

    async def prepare(self, grammar: Grammar) -> str:
        """Compile a grammar."""
        ticket = next(self._tickets)
        return (await self._ask(Prepare(ticket, grammar), ticket, self._preparations)).refusal

    def follow_blocks(self, *, on: bool) -> None:
        """Have reports tell the tokens of cached blocks."""
        if self._status is WorkerStatus.SERVING and not self._stopping:
            self._send(FollowBlocks(on))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Add a listener."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def _ask(
        self, question: FrontMessage, ticket: int, open_questions: dict[int, asyncio.Future[Answer]]
    ) -> Answer:
        """Send a message that has an answer, and wait for it."""
        self._require_serving()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        open_questions[ticket] = answer
        self._send(question)
        try:
            return await answer
        finally:
            open_questions.pop(ticket, None)

    def _require_serving(self) -> None:
        if self._stopping:
            raise _shutting_down()
        if self._status is not WorkerStatus.SERVING:
            raise Unavailable(_REFUSALS[self._status], retry_after_s=_RETRY_AFTER_S)

    def _abandon(self, stream: RequestStream) -> None:
        """The reader of a stream went away: end the request, and let the engine's answer find nobody."""
        if self._streams.pop(stream.uid, None) is not None:
            self._send(Abort(stream.uid))

    def _hear(self, message: EngineMessage) -> None:
        """Act on what the engine says."""
        match message:
            case StepOutputs():
                self._deliver(message)
            case Report():
                self._last_report = message
                self._notify(message)
            case Flushed(ticket=ticket):
                _answer(self._flushes.get(ticket), message)
            case Prepared(ticket=ticket):
                _answer(self._preparations.get(ticket), message)
            case Ready():
                self._ready = message
                self._loaded.set()
                self._enter(WorkerStatus.SERVING)
            case LoadFailed(message=why):
                self._load_error = why

    def _deliver(self, step: StepOutputs) -> None:
        """Feed the streams, in the engine's order, and then tell each one's listener, once.

        A stream that was abandoned is not there any more.
        """
        fed: dict[int, RequestStream] = {}
        events: tuple[Admitted | PromptChunk | PromptLogprobs | Output, ...] = (
            *step.admitted,
            *step.chunks,
            *step.prompt_logprobs,
            *step.outputs,
        )
        for event in events:
            stream = self._streams.get(event.uid)
            if stream is not None:
                stream.feed(event)
                fed[event.uid] = stream
        for ended in step.ended:
            stream = self._streams.pop(ended.uid, None)
            if stream is not None:
                stream.feed(ended)
                fed[ended.uid] = stream
        for stream in fed.values():
            self._tell(stream)

    def _tell(self, stream: RequestStream) -> None:
        """Have the listener take what the stream was fed. One that raises fails its own request, and hears of that."""
        try:
            stream.tell()
        except Exception:
            log.exception("a listener to a request raised", uid=stream.uid)
            self._abandon(stream)
            stream.fail(InternalError("internal error"))
            with suppress(Exception):  # logged already, and nobody else is to be told
                stream.tell()

    def _enter(self, status: WorkerStatus, message: str = "", *, final: bool = False) -> None:
        """Change the status, and say so."""
        self._status = status
        self._notify(StateChange(status, self._incarnation, message, final))

    def _lose_engine(self, why: str, *, is_final: bool = True) -> None:
        """The engine is gone, and its cache and running requests with it. `is_final`: it is not started again."""
        self._incarnation = _new_incarnation()
        self._last_report = None
        self._enter(WorkerStatus.FAILED, why)
        self._fail_requests(_shutting_down() if self._stopping else _died(why, is_final=is_final))

    def _give_up(self, why: str) -> None:
        """The engine is not started, or not started again. Who waits for it to load hears of it, too."""
        self._load_error = why
        self._loaded.set()
        self._enter(WorkerStatus.FAILED, why, final=True)

    def _fail_requests(self, error: RadixfleetError) -> None:
        """End all that wait for the engine, and then tell: a listener may close other streams of its request."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        for stream in streams.values():
            self._tell(stream)
        answers: list[asyncio.Future[Any]] = [*self._flushes.values(), *self._preparations.values()]
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)

    def _notify(self, notice: Notice) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(notice)
            except Exception:
                log.exception("a listener to the engine raised")


def _answer(waiting: asyncio.Future[Answer] | None, message: Answer) -> None:
    """Give an answer to whoever still waits for it."""
    if waiting is not None and not waiting.done():
        waiting.set_result(message)


def _new_incarnation() -> Incarnation:
    return Incarnation(secrets.randbits(63) + 1)


def _died(why: str, *, is_final: bool) -> Unavailable:
    """What those hear whose requests were running."""
    next_move = (
        "is not started again; send the request to another worker"
        if is_final
        else "is being started again; send the request again, to another worker or a little later"
    )
    return Unavailable(f"the worker cannot finish this request: {why}, and {next_move}", retry_after_s=_RETRY_AFTER_S)


def _shutting_down() -> Unavailable:
    return Unavailable("the worker is shutting down; send the request to another worker")
