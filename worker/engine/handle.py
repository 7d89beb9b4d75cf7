"""What the front of a worker sees of its engine: a handle, and one stream for each request.

    front (one event loop)                                   engine, runner (their own processes, or inline)
      stream = handle.submit(Submit(uid=handle.next_uid(), ...))   ->  Submit
      async for progress in stream: ...                            <-  Admitted, Output, Ended, coalesced
      or stream.listen(...), and no task a request
      stream.close()                                               ->  Abort, unless it has ended

Everything here is used from the event loop that called `start`, and nothing in it blocks. Every submitted request has
one terminal outcome, owned by its stream: a last `Progress` with `ended` set, or one raised error, or `close()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import msgspec

from radixfleet.errors import BY_REASON, InternalError, RadixfleetError
from radixfleet.types import Grammar, Incarnation, WorkerStatus
from worker.core.logits import TokenLogprobs
from worker.core.messages import Admitted, Ended, Flushed, Output, PromptChunk, PromptLogprobs, Ready, Report, Submit

_BY_CODE = {kind.code: kind for kind in reversed(BY_REASON.values())}


class EngineLoadError(Exception):
    """The engine cannot start at all; the message, with its advice, is for the operator."""


class StateChange(msgspec.Struct, frozen=True):
    """The engine's status or incarnation changed."""

    status: WorkerStatus
    incarnation: Incarnation
    message: str = ""
    """Why, when the status is FAILED."""
    final: bool = False
    """With FAILED: the handle has given up restarting. The worker should end, so that its owner can replace it."""


Notice: TypeAlias = Report | StateChange
Listener: TypeAlias = Callable[[Notice], None]


class Progress(msgspec.Struct, frozen=True):
    """All that happened to one request since its stream was last read. At least one field is set."""

    admitted: Admitted | None
    token_ids: list[int]
    """New tokens, in order."""
    ended: Ended | None
    """Set on the last progress of the stream; its `reason` is never None (a failure is raised instead)."""
    logprobs: list[TokenLogprobs] = []
    """One for each of `token_ids`, where the request asked for them; else empty."""
    prompt_logprobs: list[PromptLogprobs] = []
    """Log probabilities of the prompt, where the request asked for them. They come before the first token."""
    chunks: list[PromptChunk] = []
    """Chunks of the prompt that were computed, where the request is traced. They, too, come before the first token."""


class RequestStream(AsyncIterator[Progress]):
    """What one request brings forth, for one task that reads it, or for a listener.

    Holds at most `max_new_tokens` unread tokens. A failed request raises its error (a `RadixfleetError`) after the
    tokens before it. Leaving a `with` block, or `close()`, aborts the request unless it has ended; the stream is then
    over for its reader too.
    """

    def __init__(self, uid: int, abandon: Callable[[RequestStream], None]) -> None:
        self.uid = uid
        self._abandon = abandon
        self._wakeup = asyncio.Event()
        self._listener: Callable[[], None] | None = None
        self._admitted: Admitted | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._chunks: list[PromptChunk] = []
        self._ended: Ended | None = None
        self._error: RadixfleetError | None = None
        self._open = True
        """No terminal outcome was fed yet."""

    def feed(self, event: Admitted | PromptChunk | PromptLogprobs | Output | Ended) -> None:
        """Take what the engine says. For the handle only, which then calls `tell`.

        What comes after the terminal outcome is ignored.
        """
        if not self._open:
            return
        if isinstance(event, Output):
            self._token_ids.append(event.token_id)
            if event.logprobs is not None:
                self._logprobs.append(event.logprobs)
        elif isinstance(event, Admitted):
            self._admitted = event
        elif isinstance(event, PromptLogprobs):
            self._prompt_logprobs.append(event)
        elif isinstance(event, PromptChunk):
            self._chunks.append(event)
        elif event.reason is None:
            self._open = False
            self._error = _BY_CODE.get(event.code, InternalError)(event.message)
        else:
            self._open = False
            self._ended = event
        self._wakeup.set()

    def fail(self, error: RadixfleetError) -> None:
        """End the stream with an error that the engine itself does not send. For the handle only, which then tells."""
        if self._open:
            self._open = False
            self._error = error
            self._wakeup.set()

    def tell(self) -> None:
        """The listener, if there is one, is to take what was fed. For the handle only."""
        if self._listener is not None:
            self._listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when there is something to `take`: at once, if there is already.

        It should not raise: its request then fails, and it is called once more.
        """
        self._listener = listener
        if self._has_news or self._error is not None:
            listener()

    def take(self) -> Progress | None:
        """All news; None: there is none. Then raises the error of a failed request, once."""
        if self._has_news:
            return self._take()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def close(self) -> None:
        """Abort the request unless it has ended. Idempotent."""
        if self._open:
            self._open = False
            self._abandon(self)
        self._take()
        self._error = self._listener = None  # who listens holds the stream: else only the collector would end the two
        self._wakeup.set()

    async def __anext__(self) -> Progress:
        """Wait for news and return all of it; after the end, StopAsyncIteration."""
        if self._open:
            await self._wakeup.wait()
        self._wakeup.clear()
        progress = self.take()
        if progress is None:
            raise StopAsyncIteration
        return progress

    @property
    def _has_news(self) -> bool:
        if self._admitted is not None or self._ended is not None:
            return True
        return bool(self._token_ids or self._prompt_logprobs or self._chunks)

    def _take(self) -> Progress:
        progress = Progress(
            self._admitted, self._token_ids, self._ended, self._logprobs, self._prompt_logprobs, self._chunks
        )
        self._admitted, self._token_ids, self._ended = None, [], None
        self._logprobs, self._prompt_logprobs, self._chunks = [], [], []
        return progress

    def __enter__(self) -> Self:
        """Use as a context manager, so that a reader that goes away never leaves its request running."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


class EngineHandle(Protocol):
    """An engine as its front uses it: `InlineEngine` lives in the same process, `ProcessEngine` in two of its own."""

    @property
    def status(self) -> WorkerStatus:
        """LOADING, SERVING or FAILED. (Draining is the front's own affair.)"""
        ...

    @property
    def incarnation(self) -> Incarnation:
        """Changes with each start of the engine: whatever was cached before is gone."""
        ...

    @property
    def last_report(self) -> Report | None:
        """The newest report of this incarnation."""
        ...

    @property
    def last_ready(self) -> Ready | None:
        """What the runner said when it was last ready; kept while the engine restarts. None before the first time."""
        ...

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended."""
        ...

    async def start(self) -> None:
        """Begin loading. Returns when the children exist, not when they are ready."""
        ...

    async def ready(self) -> Ready:
        """Wait until requests are accepted. Raises EngineLoadError when the model cannot be served."""
        ...

    def next_uid(self) -> int:
        """A number for a new request; never used again."""
        ...

    def submit(self, request: Submit) -> RequestStream:
        """Hand over a request without children. Raises Unavailable, with retry_after_s, unless SERVING."""
        ...

    def submit_group(self, request: Submit) -> list[RequestStream]:
        """Hand over a request; its stream, then those of its children. Raises Unavailable unless SERVING."""
        ...

    async def prepare(self, grammar: Grammar) -> str:
        """Have the runner compile a grammar, so that no step waits for it. Why it cannot be used; empty when it can.

        Raises Unavailable unless SERVING, or if the engine dies.
        """
        ...

    def abort(self, uid: int) -> None:
        """Ask for a request's end; its stream then ends with reason ABORT. Does nothing when it has ended already."""
        ...

    async def flush(self) -> Flushed:
        """Drop all prefixes that no running request uses. Raises Unavailable unless SERVING, or if the engine dies."""
        ...

    def follow_blocks(self, *, on: bool) -> None:
        """Have reports tell the tokens of cached blocks (`Report.block_runs`), or no longer.

        Does nothing unless SERVING, and is over when the engine restarts.
        """
        ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` on the event loop with each report and state change from now on.

        Returns the function that ends the subscription.
        """
        ...

    async def stop(self) -> None:
        """End the engine. Streams still open end with Unavailable. Idempotent."""
        ...
