"""The router's side of one worker: dials it, asks what it is, and follows its state for as long as the worker is known.

One task a worker, which gives up only where a worker that kept registering has done neither that nor answered for
`FORGOTTEN_S`:

    ask (info, tokenizer) -> follow (states)          -> lost: pause, longer each time -> ask ...
                                        |
                                        +-- its facts may have changed: ask again, beside following
                                        +-- a report is missing: the same, and follow again from a new digest

A worker is connected from the first update of a state stream until the stream breaks or stays silent for
`heartbeat_timeout_s`. A stream that breaks ends no request: those have calls of their own on the same channel. Silence
ends them, once each time: a worker that tells nothing computes nothing. One that is late with an answer may be busy: it
is followed all the while, and asked until it answers. Engines of other dialects are always left to finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import cast

import grpc.aio
import structlog

from radixfleet import convert
from radixfleet.blocks import BLOCK_SCHEME, BLOCK_TOKENS
from radixfleet.cancellation import is_cancelled
from radixfleet.channel import open_channel
from radixfleet.errors import Unavailable
from radixfleet.types import Incarnation, WorkerId
from radixfleet.v1 import worker_pb2
from router.dialects.detection import recognise
from router.dialects.native import NativeSpeaker
from router.dialects.speaker import Generator, Speaker, Unreachable
from router.worker_address import engine_address, is_url
from router.workers.intake import Next, StateIntake
from router.workers.pauses import Pauses
from router.workers.silence import limited_silence
from router.workers.state import WorkerFacts, WorkerState
from router.workers.surroundings import Surroundings

FORGOTTEN_S = 900.0
"""Workers that live register every few seconds. Who was registered by hand is never given up."""
_RESYNC_PAUSE_S = 0.05
_EMPTY_POLL_S = 0.2
_REASON_LENGTH = 200
"""In the list of workers: what answers there may have written a part of it."""

_log = structlog.get_logger("radixfleet.router.workers")


class _Lost(Exception):
    """The state stream is over."""


class _Unanswered(Exception):
    """A question about itself was not answered in time."""


class WorkerConnection:
    """See the module. Everything that it learns goes into `state`."""

    def __init__(self, state: WorkerState, around: Surroundings, changed: Callable[[], None]) -> None:
        """`changed` is called when the worker's facts, status or connection are different."""
        self.state = state
        self._changed = changed
        self.channel: grpc.aio.Channel | None = None
        """None: it is reached by HTTP."""
        self._settings = around.settings
        self._sketch = around.sketch
        self._tokenizers = around.tokenizers
        self._listener = around.listener
        self._pauses = Pauses(around.random)
        self._intake = StateIntake(state, around)
        self._clock = around.clock
        self._speaker: Speaker | None = None
        if is_url(state.address):
            self._speaker = _http_speaker(state.address, around)
        else:
            self.channel = open_channel(
                around.access.endpoint(state.address), max_message_bytes=around.settings.max_message_bytes
            )
        self._to_ask = asyncio.Event()
        """The facts may be others by now."""
        self._connected_at_s = 0.0
        self._renewed_at_s: float | None = None
        """When the worker last registered, of those that do so again and again; None: it never did."""

    def renew(self) -> None:
        """The worker has registered, and will again."""
        self._renewed_at_s = self._clock.now()

    @property
    def _is_gone(self) -> bool:
        if self._renewed_at_s is None or self.state.connected:
            return False
        seen_at_s = max(self._renewed_at_s, self.state.updated_at_s or 0.0)
        return self._clock.now() - seen_at_s > FORGOTTEN_S

    async def run(self) -> None:
        """Follow the worker until cancelled, or until it is gone for good."""
        while True:
            try:
                await self._ask()
                await self._follow_and_ask()
            except (grpc.aio.AioRpcError, Unreachable, TimeoutError, ValueError, _Lost, _Unanswered) as error:
                pause_s = self._lost(error)
            except Exception as error:  # noqa: BLE001  whatever it is: without this task the worker is never found again
                _log.error("following a worker failed by a fault of ours", worker=self.state.name, exc_info=error)
                pause_s = self._lost(error)
            if self._is_gone:
                return
            await asyncio.sleep(pause_s)

    @property
    def generator(self) -> Generator | None:
        """The way of requests to a worker that speaks another dialect; None for our own, which have links."""
        return None if self._speaker is None or self._speaker.dialect == "native" else cast("Generator", self._speaker)

    @property
    def _any_speaker(self) -> Speaker:
        """The worker's speaker; while it has not answered yet, a native one, whose calls fail then."""
        return self._speaker or NativeSpeaker(self._dialled, timeout_s=self._settings.connect_timeout_s)

    @property
    def _dialled(self) -> grpc.aio.Channel:
        assert self.channel is not None, "only engines that are reached by HTTP have none, and their speaker is known"
        return self.channel

    async def drain(self, grace_s: float | None) -> worker_pb2.DrainResponse:
        """Tell the worker to drain; returns when it is empty, or resumed. Raises AioRpcError, Unavailable."""
        with self._unless_removed():
            return await self._any_speaker.drain(grace_s) or await self._emptied(grace_s)

    async def close(self) -> None:
        """Leave the worker; what still runs on its channel breaks off."""
        if self.generator is not None:
            await self.generator.close()
        if self.channel is not None:
            await self.channel.close(None)

    async def _emptied(self, grace_s: float | None) -> worker_pb2.DrainResponse:
        """Wait until our own requests there have ended: all that can be known of an engine that does not drain.

        Ends too when somebody resumes it.
        """
        running = self.state.books.own_requests
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.state.drain_wanted and self.state.books.own_requests:  # noqa: ASYNC110  rare, and books know nothing of events
                    await asyncio.sleep(_EMPTY_POLL_S)
        finished = max(0, running - self.state.books.own_requests)
        return worker_pb2.DrainResponse(finished_requests=finished, resumed=not self.state.drain_wanted)

    async def resume(self) -> None:
        """Tell the worker to take requests again. Raises AioRpcError, Unavailable."""
        try:
            with self._unless_removed():
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    await self._any_speaker.resume()
        except TimeoutError:
            raise Unavailable(f"worker {self.state.name} does not answer") from None

    @contextmanager
    def _unless_removed(self) -> Iterator[None]:
        """Raises Unavailable when the worker's channel is closed while an order is on its way."""
        try:
            yield
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise Unavailable(f"worker {self.state.name} was removed meanwhile") from None

    async def _ask(self) -> None:
        """Learn what the worker is, and have its tokenizer."""
        try:
            speaker, info = await self._informed()
            facts = _facts(info, speaker)
            if facts.model.tokenizer_fingerprint:
                await self._tokenizers.ensure(facts.model.tokenizer_fingerprint, speaker.tokenizer)
        except TimeoutError:
            raise _Unanswered("no answer in time") from None
        state = self.state
        if not facts.comparable_blocks and (state.facts is None or state.facts.comparable_blocks):
            _warn_of_blocks(facts)
        state.facts = facts
        state.changed()
        self._changed()

    async def _informed(self) -> tuple[Speaker, worker_pb2.WorkerInfo]:
        """What the worker says of itself, and what it speaks; another one may listen there when nobody understands."""
        if self._speaker is not None:
            try:
                return self._speaker, await self._speaker.info()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    self._speaker = None
                raise
        speaker, info = await recognise(
            self._dialled,
            self.state.address,
            self._clock,
            self._tokenizers,
            timeout_s=self._settings.connect_timeout_s,
        )
        self._speaker = speaker
        if speaker.dialect != "native":
            _log.info("the worker is another engine", address=self.state.address, dialect=speaker.dialect)
        return speaker, info

    async def _follow_and_ask(self) -> None:
        """Until the worker is lost. Asking has a task of its own, so that it hears all that is told meanwhile."""
        self._to_ask.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ask_when_changed())
                while True:
                    await self._follow()
                    await asyncio.sleep(_RESYNC_PAUSE_S)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _ask_when_changed(self) -> None:
        while True:
            await self._to_ask.wait()
            self._to_ask.clear()
            try:
                await self._ask()
            except _Unanswered:
                self._to_ask.set()
                await asyncio.sleep(_RESYNC_PAUSE_S)

    async def _follow(self) -> None:
        """Take in one state stream. Returns when a report is missing, so that the next stream brings all."""
        assert self._speaker is not None, "it was asked before"
        self._listener.events_lost(self.state)
        limit = limited_silence(self._settings.heartbeat_timeout_s)
        async with aclosing(self._speaker.states()) as states, limit as silence:
            while True:
                told = await silence.next(states)
                if told is None:
                    raise _Lost("the worker ended its state stream")
                step = self._intake.take(told.update, tells_prefixes=told.tells_prefixes)
                self._connected()
                if step is not Next.READ:
                    self._to_ask.set()
                    self._changed()
                if step is Next.RESYNC:
                    return

    def _connected(self) -> None:
        state = self.state
        if state.connected:
            return
        self._connected_at_s = self._clock.now()
        state.connected = True
        state.changed()
        _log.info("worker connected", worker=state.name, address=state.address, status=state.status.value)
        self._changed()

    def _lost(self, error: Exception) -> float:
        """Returns after how many seconds the worker is to be asked again."""
        state = self.state
        pause_s = self._pauses.next_s(self._clock.now() - self._connected_at_s if state.connected else 0.0)
        reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error) or "no word in time"
        is_other_refusal = isinstance(error, ValueError) and reason[:_REASON_LENGTH] != state.refusal
        if is_other_refusal:
            state.refusal = reason[:_REASON_LENGTH]
            self._changed()
        if state.connected or not pause_s or is_other_refusal:
            _log.warning("no connection to worker", worker=state.name, address=state.address, reason=reason)
        if state.connected:
            state.connected = False
            state.books.forget_reports()
            self._sketch.lose_truth(state.slot)
            state.changed()
            self._changed()
        if state.is_native and isinstance(error, TimeoutError):
            # It fell silent. Its connection is whole, so nothing else would tell the requests that it computes.
            state.on_silence()
        return pause_s


def _http_speaker(address: str, around: Surroundings) -> Speaker:
    from router.dialects.http_engine import HttpSpeaker  # aiohttp takes a while to import, and few need it

    # The key is for those whom the operator named; anybody may be registered.
    return HttpSpeaker(
        engine_address(address),
        around.clock,
        timeout_s=around.settings.connect_timeout_s,
        api_key=around.engine_key if address in around.settings.workers else _no_key,
        tls=around.access.peer_tls,
    )


def _no_key() -> None:
    """Nothing to show."""


def _facts(info: worker_pb2.WorkerInfo, speaker: Speaker) -> WorkerFacts:
    return WorkerFacts(
        worker_id=WorkerId(info.worker_id),
        incarnation=Incarnation(info.incarnation),
        status=convert.worker_status(info.status),
        model=convert.model_info(info.model),
        capacity=convert.capacity(info.capacity) if info.HasField("capacity") else None,
        memory=convert.memory_pools(info.memory) if info.HasField("memory") else None,
        version=info.version,
        block_scheme=info.block_scheme,
        block_tokens=info.block_tokens,
        metrics_port=info.metrics_port,
        dialect=speaker.dialect,
        lacks=speaker.lacks,
    )


def _warn_of_blocks(facts: WorkerFacts) -> None:
    _log.warning(
        f"no truth from worker {facts.worker_id}, approximate: its block hashes are of another scheme",
        worker=facts.worker_id,
        block_scheme=facts.block_scheme,
        block_tokens=facts.block_tokens,
        expected_block_scheme=BLOCK_SCHEME,
        expected_block_tokens=BLOCK_TOKENS,
    )
