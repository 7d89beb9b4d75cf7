"""The Worker service: what routers and operators ask of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog

from radixfleet.accepted import ACCEPTED
from radixfleet.errors import InvalidRequest
from radixfleet.status import Context
from radixfleet.types import ExecutionId
from radixfleet.v1 import worker_pb2, worker_pb2_grpc
from worker.engine.handle import EngineHandle
from worker.servicer.description import Description
from worker.servicer.link import Links
from worker.servicer.requests import RunningRequests
from worker.servicer.state import StateFeed

TOKENIZER_CHUNK_BYTES = 1024**2
_MAX_GRACE_S = 86400.0

_log = structlog.get_logger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Methods raise RadixfleetErrors; the server's interceptor makes statuses of them."""

    def __init__(
        self,
        description: Description,
        engine: EngineHandle,
        feed: StateFeed,
        requests: RunningRequests,
        links: Links,
        *,
        drain_grace_s: float,
    ) -> None:
        self._description = description
        self._engine = engine
        self._feed = feed
        self._requests = requests
        self._links = links
        self._drain_grace_s = drain_grace_s

    async def Link(  # type: ignore[override]  # writes to the context
        self, request_iterator: AsyncIterator[worker_pb2.RouterFrame], context: Context
    ) -> None:
        """Ends when the router goes, or the worker closes its links."""
        _log.info("linked", peer=context.peer())
        await context.send_initial_metadata(ACCEPTED)
        await self._links.serve(request_iterator, context.write)

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.WorkerInfo:
        """Answers in every status."""
        engine, feed = self._engine, self._feed
        return self._description.worker_info(feed.status, engine.incarnation, engine.last_ready, feed.advice)

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.TokenizerChunk]:
        """The TokenizerSpec as JSON, in pieces."""
        data = await asyncio.to_thread(self._description.tokenizer.to_json)
        for start in range(0, len(data), TOKENIZER_CHUNK_BYTES):
            yield worker_pb2.TokenizerChunk(data=data[start : start + TOKENIZER_CHUNK_BYTES])

    async def WatchState(
        self, request: worker_pb2.WatchStateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.StateUpdate]:
        """Ends when the watcher goes, or the server stops."""
        with self._feed.watch() as watcher:
            _log.info("watched", watcher=request.watcher, peer=context.peer())
            async for update in watcher:
                yield update

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        """Until `Resume`."""
        grace_s = request.grace_s if request.HasField("grace_s") else self._drain_grace_s
        if not 0 <= grace_s <= _MAX_GRACE_S:  # refuses NaN, too
            raise InvalidRequest(f"grace_s must be from 0 to {_MAX_GRACE_S:g}, got {grace_s}", field="grace_s")
        drained = await self._requests.drain(grace_s, resumable=True)
        return worker_pb2.DrainResponse(
            finished_requests=drained.finished, aborted_requests=drained.aborted, resumed=drained.is_resumed
        )

    async def Resume(self, request: worker_pb2.ResumeRequest, context: Context) -> worker_pb2.ResumeResponse:
        """The end of a drain."""
        self._requests.resume()
        return worker_pb2.ResumeResponse()

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: Context
    ) -> worker_pb2.FlushCacheResponse:
        """Drop what no request uses."""
        flushed = await self._engine.flush()
        return worker_pb2.FlushCacheResponse(flushed_tokens=flushed.flushed_tokens, kept_tokens=flushed.kept_tokens)

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        """By execution id alone: names that clients choose need not be unique."""
        return worker_pb2.AbortResponse(found=self._requests.abort(ExecutionId(request.execution_id)))
