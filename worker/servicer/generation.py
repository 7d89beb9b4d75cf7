"""One request from its submission to its one outcome, in two halves that wait for nothing but their own side.

    engine --Progress--> _hear: tokens to text, stop strings, times --> Outbox --> take --> a link, or a call

Neither half is a task: the first runs where the engine's message is heard, for all requests of a step in one turn of
the event loop, and the second where there is room for a message. A client that reads slowly (its call is suspended by
gRPC's flow control, its link has no credit) takes nothing for a while, and `_hear` still ends the request at a stop
string, and takes the times, when they are due. What piles up in between is joined into one Delta, so it is bounded by
max_new_tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from radixfleet import convert
from radixfleet.clock import Clock
from radixfleet.errors import InvalidRequest, Overloaded, RadixfleetError, Unavailable, UnknownModel
from radixfleet.types import ExecutionId, FinishReason, Usage, WorkerId
from radixfleet.v1 import inference_pb2, worker_pb2
from worker.core.messages import Admitted
from worker.engine.handle import Progress
from worker.metrics import Outcome, WorkerMetrics
from worker.servicer.acceptance import AcceptedRequest
from worker.servicer.choice import Choice, Outbox
from worker.servicer.request_trace import RequestTrace
from worker.servicer.state import StateFeed

_OUTCOMES = {
    FinishReason.STOP: Outcome.STOP,
    FinishReason.LENGTH: Outcome.LENGTH,
    FinishReason.ABORT: Outcome.ABORTED,
}
_SEVERITY = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
"""Which reason the outcome of several completions is counted by: the last of these."""


def outcome_of(error: Exception) -> Outcome:
    """How a request that ended with `error` is counted."""
    if isinstance(error, InvalidRequest | UnknownModel):
        return Outcome.REFUSED
    return Outcome.UNAVAILABLE if isinstance(error, Unavailable | Overloaded) else Outcome.FAILED


@dataclass(frozen=True, slots=True)
class Identity:
    """The names of a request."""

    execution_id: ExecutionId
    request_id: str
    worker_id: WorkerId
    lease_id: str
    """Empty when no router booked the request."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Tells what becomes of requests: to the metrics, and through the feed to the routers that booked them."""

    clock: Clock
    metrics: WorkerMetrics
    feed: StateFeed

    def tell(self, identity: Identity, phase: worker_pb2.LeaseEvent.Phase.ValueType, cached_tokens: int = 0) -> None:
        """A leased request reached a phase."""
        if identity.lease_id:
            self.feed.lease_event(
                worker_pb2.LeaseEvent(lease_id=identity.lease_id, phase=phase, cached_tokens=cached_tokens)
            )

    def first_token(self, ttft_s: float) -> None:
        """A request has its first token, `ttft_s` after it came."""
        self.metrics.first_token(ttft_s)
        self.feed.first_token(ttft_s)


class Generation:
    """See the module. The outcome is set once, by whoever comes first: the end of the stream, or `close`."""

    def __init__(
        self,
        identity: Identity,
        prompt_tokens: int,
        choices: Sequence[Choice],
        observer: Observer,
        *,
        generated_tokens: int,
        arrived_s: float,
        trace: RequestTrace,
        accepted: AcceptedRequest | None = None,
    ) -> None:
        """Listens to the engine at once.

        `generated_tokens`: of the answer, that the client has already. `arrived_s`: when the request came.
        `trace` is ended with it. `accepted`: what the feed knows of it; None where it never ran.
        """
        self.identity = identity
        self.outcome: Outcome | None = None
        """How the request ended; None while it runs."""
        self._prompt_tokens = prompt_tokens
        self._choices = choices
        self._reasons: list[FinishReason] = []
        """Why each completion that has finished did so."""
        self._observer = observer
        self._trace = trace
        self._accepted = accepted
        self._arrived_s = arrived_s
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self._cached_tokens = 0
        self._completion_tokens = generated_tokens
        self._outbox = Outbox()
        self._is_started = False
        self._listener: Callable[[], None] | None = None
        self._is_ended = False
        """Nothing more goes into the outbox."""
        self.error: Exception | None = None
        """What ended the request, if that was a failure."""
        for choice in choices:
            choice.stream.listen(partial(self._hear, choice))

    @property
    def uids(self) -> list[int]:
        """The engine's numbers for its completions."""
        return [choice.stream.uid for choice in self._choices]

    @property
    def is_over(self) -> bool:
        """All was taken, and nothing more comes; `error` says whether that was a failure."""
        return self._is_ended and self._outbox.is_empty

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when there is something to take, or the request is over; at once, if there is."""
        self._listener = listener
        self._tell()

    @property
    def has_message(self) -> bool:
        """Whether `take` has a message to give."""
        return not self._outbox.is_empty

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        """Move the next message into an empty one. There must be one."""
        self._outbox.take(response)

    async def responses(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """What the client is sent; raises the error that ended the request, if one did. For one reader."""
        news = asyncio.Event()
        self.listen(news.set)
        while not self.is_over:
            await news.wait()
            news.clear()
            while self.has_message:
                response = inference_pb2.GenerateResponse()
                self._outbox.take(response)
                yield response
        if self.error is not None:
            raise self.error

    def close(self, outcome: Outcome) -> None:
        """Nobody reads on: abort the request, unless it has ended. Idempotent."""
        self._settle(outcome)
        self._end()

    def _end(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        for choice in self._choices:
            choice.stream.close()
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None and (self._is_ended or not self._outbox.is_empty):
            self._listener()

    def _hear(self, choice: Choice) -> None:
        """News of one completion. An error of one is the end of all."""
        if self._is_ended:
            return
        try:
            while (progress := choice.stream.take()) is not None:
                self._take(choice, progress)
        except Exception as error:  # noqa: BLE001  told to the client; the engine's other requests go on
            # Frames hold this request, and those of all others that the same error ended. Only a fault's are read.
            self.error = error.with_traceback(None) if isinstance(error, RadixfleetError) else error
            self._settle(outcome_of(error))
        if self.error is not None or len(self._reasons) == len(self._choices):
            self._end()
        else:
            self._tell()

    def _take(self, choice: Choice, progress: Progress) -> None:
        if progress.admitted is not None and self._admitted_s is None:
            self._admit(progress.admitted)
        self._trace.computed(progress.chunks)
        for told in progress.prompt_logprobs:
            self._outbox.tell_prompt(told)
        if progress.token_ids:
            self._add_tokens(choice, progress)
        if choice.text.matched_stop is not None:
            self._finish(choice, FinishReason.STOP, None)
            choice.stream.close()
        elif progress.ended is not None:
            assert progress.ended.reason is not None, "a failed request raises"
            self._finish(choice, progress.ended.reason, progress.ended.matched_token_id)

    def _admit(self, admitted: Admitted) -> None:
        self._admitted_s = admitted.at_s
        self._cached_tokens = admitted.cached_tokens
        self._trace.admitted(admitted.at_s)
        if self._accepted is not None:
            self._accepted.admitted(admitted.cached_tokens)
        self._observer.metrics.admitted(max(0.0, admitted.at_s - self._arrived_s), self._prompt_tokens)
        self._observer.tell(self.identity, worker_pb2.LeaseEvent.PHASE_STARTED, admitted.cached_tokens)
        self._start()

    def _start(self) -> None:
        self._is_started = True
        self._outbox.started = inference_pb2.Started(
            request_id=self.identity.request_id,
            execution_id=self.identity.execution_id,
            worker_id=self.identity.worker_id,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    def _add_tokens(self, choice: Choice, progress: Progress) -> None:
        """Tokens that came together, up to the one that completes a stop string."""
        texts: list[str] = []
        for token_id in progress.token_ids:
            texts.append(choice.text.push(token_id))
            if choice.text.matched_stop is not None:
                break
        count = len(texts)
        self._outbox.add(choice.index, progress.token_ids[:count], progress.logprobs[:count], texts)
        self._completion_tokens += count
        now_s = self._observer.clock.now()
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._observer.first_token(now_s - self._arrived_s)
            self._trace.first_token(now_s)
            if self._accepted is not None:
                self._accepted.first_token()
            self._observer.tell(self.identity, worker_pb2.LeaseEvent.PHASE_FIRST_TOKEN, self._cached_tokens)
        elif choice.last_token_s is not None:
            self._observer.metrics.tokens(count, now_s - choice.last_token_s)
        choice.last_token_s = now_s

    def _finish(self, choice: Choice, reason: FinishReason, matched_token_id: int | None) -> None:
        """One completion has ended; with the last of them, so has the request."""
        if not self._is_started:
            self._start()  # aborted in the queue: the order of messages is the same
        tail = choice.text.finish()
        matched_stop = choice.text.matched_stop
        if matched_stop is not None:  # perhaps only now: the last bytes held back can complete one
            reason, matched_token_id = FinishReason.STOP, None
        finished = inference_pb2.Finished(reason=convert.finish_reason_to_pb(reason), text=tail)
        if matched_stop is not None:
            finished.matched_stop = matched_stop
        elif matched_token_id is not None:
            finished.matched_token_id = matched_token_id
        self._reasons.append(reason)
        if len(self._reasons) == len(self._choices):
            finished.usage.CopyFrom(convert.usage_to_pb(self._usage()))
            self._settle(_OUTCOMES[max(self._reasons, key=_SEVERITY.index)])
        self._outbox.finished.append((choice.index, finished))

    def _usage(self) -> Usage:
        """Three spans of time that join; those that the request did not reach are 0."""
        now_s = self._observer.clock.now()
        admitted_s = now_s if self._admitted_s is None else self._admitted_s
        first_token_s = now_s if self._first_token_s is None else self._first_token_s
        return Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=min(self._cached_tokens, self._prompt_tokens),
            completion_tokens=self._completion_tokens,
            queue_s=max(0.0, admitted_s - self._arrived_s),
            prefill_s=max(0.0, first_token_s - admitted_s),
            decode_s=max(0.0, now_s - first_token_s),
        )

    def _settle(self, outcome: Outcome) -> None:
        """The one place where a request's outcome is counted and told."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self._accepted is not None:
            self._accepted.end()
        now_s = self._observer.clock.now()
        self._observer.metrics.ended(outcome, now_s - self._arrived_s)
        self._trace.ended(
            outcome,
            now_s,
            gen_ai__usage__input_tokens=self._prompt_tokens,
            gen_ai__usage__output_tokens=self._completion_tokens,
            radixfleet__cached_tokens=self._cached_tokens,
            radixfleet__worker=self.identity.worker_id,
            radixfleet__request_id=self.identity.request_id,
            radixfleet__execution_id=self.identity.execution_id,
        )
        if self._admitted_s is not None:
            self._observer.metrics.answered(self._completion_tokens)
        self._observer.tell(self.identity, worker_pb2.LeaseEvent.PHASE_ENDED, self._cached_tokens)
