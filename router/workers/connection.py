"""The router's side of one worker: dials it, asks what it is, and follows its state for as long as the worker is known.

One task a worker, which never gives up:

    ask (GetInfo, GetTokenizer) -> follow (WatchState) -> lost: pause, longer each time -> ask ...
                                        |
                                        +-- a report is missing: ask and follow again, at once, from a new digest

A worker is connected from the first update of a state stream until the stream breaks or stays silent for
`heartbeat_timeout_s`. Losing the connection ends no request: those have calls of their own on the same channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
import structlog

from radixfleet import convert
from radixfleet.blocks import BLOCK_SCHEME, BLOCK_TOKENS
from radixfleet.channel import open_channel
from radixfleet.types import Incarnation, WorkerId
from radixfleet.v1 import worker_pb2, worker_pb2_grpc
from router.workers.intake import Next, StateIntake
from router.workers.state import WorkerFacts, WorkerState
from router.workers.surroundings import Surroundings

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_RESYNC_PAUSE_S = 0.05
_MAX_TOKENIZER_BYTES = 256 * 1024**2

_log = structlog.get_logger("radixfleet.router.workers")


class _Lost(Exception):
    """The state stream is over."""


class WorkerConnection:
    """See the module. Everything that it learns goes into `state`."""

    def __init__(self, state: WorkerState, around: Surroundings, changed: Callable[[], None]) -> None:
        """`changed` is called when the worker's facts, status or connection are different."""
        self.state = state
        self._changed = changed
        self.channel = open_channel(
            around.access.endpoint(state.address), max_message_bytes=around.settings.max_message_bytes
        )
        self._settings = around.settings
        self._sketch = around.sketch
        self._tokenizers = around.tokenizers
        self._listener = around.listener
        self._random = around.random
        self._intake = StateIntake(state, around)
        self._stub = worker_pb2_grpc.WorkerStub(self.channel)
        self._failures = 0

    async def run(self) -> None:
        """Follow the worker until cancelled."""
        while True:
            try:
                while True:
                    await self._ask()
                    await self._follow()
                    await asyncio.sleep(_RESYNC_PAUSE_S)
            except (grpc.aio.AioRpcError, TimeoutError, ValueError, _Lost) as error:
                self._lost(error)
            except Exception as error:  # noqa: BLE001  whatever it is: without this task the worker is never found again
                _log.error("following a worker failed by a fault of ours", worker=self.state.name, exc_info=error)
                self._lost(error)
            await asyncio.sleep(self._pause_s())

    async def drain(self, grace_s: float | None) -> worker_pb2.DrainResponse:
        """Tell the worker to drain; returns when it is empty. Raises AioRpcError."""
        return await self._stub.Drain(worker_pb2.DrainRequest(grace_s=grace_s))

    async def resume(self) -> None:
        """Tell the worker to take requests again. Raises AioRpcError."""
        await self._stub.Resume(worker_pb2.ResumeRequest(), timeout=self._settings.connect_timeout_s)

    async def _ask(self) -> None:
        """Learn what the worker is, and have its tokenizer."""
        async with asyncio.timeout(self._settings.connect_timeout_s):
            facts = _facts(await self._stub.GetInfo(worker_pb2.GetInfoRequest()))
        state = self.state
        if facts.model.tokenizer_fingerprint:
            await self._tokenizers.ensure(facts.model.tokenizer_fingerprint, self._fetch_tokenizer)
        if not facts.comparable_blocks and (state.facts is None or state.facts.comparable_blocks):
            _warn_of_blocks(facts)
        state.facts = facts
        state.changed()
        self._changed()

    async def _fetch_tokenizer(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        stream = self._stub.GetTokenizer(worker_pb2.GetTokenizerRequest())
        try:
            while True:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    chunk = await stream.read()
                if not isinstance(chunk, worker_pb2.TokenizerChunk):
                    return b"".join(pieces)
                size += len(chunk.data)
                if size > _MAX_TOKENIZER_BYTES:
                    raise ValueError(f"the worker's tokenizer is larger than {_MAX_TOKENIZER_BYTES} bytes")
                pieces.append(chunk.data)
        finally:
            stream.cancel()

    async def _follow(self) -> None:
        """Take in one state stream. Returns when a report is missing, so that the next stream brings all."""
        self._listener.events_lost(self.state)
        stream = self._stub.WatchState(worker_pb2.WatchStateRequest(watcher="router"))
        try:
            while True:
                async with asyncio.timeout(self._settings.heartbeat_timeout_s):
                    update = await stream.read()
                if not isinstance(update, worker_pb2.StateUpdate):
                    raise _Lost("the worker ended its state stream")
                step = self._intake.take(update)
                self._connected()
                if step is not Next.READ:
                    self._changed()
                if step is Next.RESYNC:
                    return
                if step is Next.ASK:
                    await self._ask()
        finally:
            stream.cancel()

    def _connected(self) -> None:
        state = self.state
        if state.connected:
            return
        self._failures = 0
        state.connected = True
        state.changed()
        _log.info("worker connected", worker=state.name, address=state.address, status=state.status.value)
        self._changed()

    def _lost(self, error: Exception) -> None:
        state = self.state
        self._failures += 1
        if state.connected or self._failures == 1:
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error) or "no word in time"
            _log.warning("no connection to worker", worker=state.name, address=state.address, reason=reason)
        if state.connected:
            state.connected = False
            state.books.forget_reports()
            self._sketch.lose_truth(state.slot)
            state.changed()
            self._changed()

    def _pause_s(self) -> float:
        """None after the first failure, for most losses are over at once; then doubling, with jitter."""
        if self._failures <= 1:
            return 0.0
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._failures - 2, 10), _LONGEST_PAUSE_S)
        return pause_s * self._random.uniform(0.5, 1.0)


def _facts(info: worker_pb2.WorkerInfo) -> WorkerFacts:
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
