"""`sglang.grpc.scheduler.SglangScheduler`, as far as a worker of ours can answer it.

What is not here (embeddings, LoRA adapters, profiles) is UNIMPLEMENTED, which gRPC says by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang_pb2

from radixfleet.status import Context
from radixfleet.types import Load, WorkerStatus
from worker.dialects.kv_events import KvEventFeed, OutOfRange
from worker.dialects.load import hit_rate, share, used_tokens
from worker.dialects.sglang_requests import AnswerWriter, generate_request
from worker.dialects.tokenizer_archive import tokenizer_archive
from worker.engine.handle import EngineHandle
from worker.servicer.description import Description, package_version
from worker.servicer.generation import Generation
from worker.servicer.inference import InferenceServicer
from worker.servicer.requests import RunningRequests
from worker.servicer.state import StateFeed

TOKENIZER_CHUNK_BYTES = 64 * 1024
_CHEAP_BYTES = 64 * 1024


@dataclass(slots=True, eq=False)
class _Call:
    """A Generate call under way."""

    generation: Generation | None = None
    is_aborted: bool = False


class SglangServicer:
    """Methods raise RadixfleetErrors; the server's interceptor makes statuses of them."""

    def __init__(
        self,
        description: Description,
        engine: EngineHandle,
        state: StateFeed,
        requests: RunningRequests,
        inference: InferenceServicer,
        events: KvEventFeed,
    ) -> None:
        self._description = description
        self._engine = engine
        self._state = state
        self._requests = requests
        self._inference = inference
        self._events = events
        self._calls: dict[str, set[_Call]] = {}
        """By the client's own id, which need not be unique."""
        self._started_s = time.time()
        self._received_s = 0.0

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Healthy exactly while requests are taken."""
        status = self._state.status
        return sglang_pb2.HealthCheckResponse(healthy=status is WorkerStatus.SERVING, message=status.value)

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """UNAVAILABLE while the model's limits are not known yet."""
        ready = self._requests.require_loaded()
        info, spec = self._description.model_info(ready), self._description.tokenizer
        return sglang_pb2.GetModelInfoResponse(
            model_path=info.model,
            tokenizer_path=info.model,
            served_model_name=info.model,
            is_generation=True,
            max_context_length=info.max_context_tokens,
            max_req_input_len=info.max_context_tokens - 1,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            bos_token_id=spec.bos_token_id or 0,
            model_type="llama",
            architectures=["LlamaForCausalLM"],
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """What it runs with."""
        ready = self._requests.require_loaded()
        now_s = time.time()
        response = sglang_pb2.GetServerInfoResponse(
            active_requests=len(self._requests),
            last_receive_timestamp=self._received_s,
            uptime_seconds=now_s - self._started_s,
            sglang_version=f"radixfleet-{package_version()}",
            server_type="grpc",
            max_total_num_tokens=ready.capacity.kv_tokens,
        )
        response.start_time.FromMilliseconds(round(self._started_s * 1000))
        response.server_args.update(
            {
                "model_path": self._description.model,
                "served_model_name": self._description.model,
                "page_size": ready.capacity.page_size,
                "max_running_requests": ready.capacity.max_running_requests,
                "chunked_prefill_size": ready.capacity.chunked_prefill_size,
                "context_length": ready.max_context_tokens,
                "dtype": ready.dtype,
                "tp_size": 1,
                "dp_size": 1,
            }
        )
        return response

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """The engine's last report; zeros before the first."""
        report, ready = self._engine.last_report, self._engine.last_ready
        load = report.load if report is not None else Load()
        total = ready.capacity.kv_tokens if ready is not None else 0
        running, waiting = load.running_requests, load.waiting_requests
        places = ready.capacity.max_running_requests if ready is not None else 0
        entry = sglang_pb2.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used_tokens(load),
            max_total_num_tokens=total,
            token_usage=share(load.kv_protected_tokens, total),
            cache_hit_rate=hit_rate(report),
            utilization=share(running, places),
            max_running_requests=places,
            num_waiting_uncached_tokens=load.outstanding_prompt_tokens,
            disaggregation=sglang_pb2.DisaggregationMetrics(mode="null"),
            queues=sglang_pb2.QueueMetrics(waiting=waiting),
            memory=sglang_pb2.MemoryMetrics(token_capacity=total),
        )
        return sglang_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=package_version(),
            dp_rank_count=1,
            loads=[entry],
            aggregate=sglang_pb2.AggregateMetrics(
                total_running_reqs=running,
                total_waiting_reqs=waiting,
                total_reqs=running + waiting,
                avg_token_usage=entry.token_usage,
                avg_utilization=entry.utilization,
            ),
        )

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Ends by itself, when it is aborted, or when the call is cancelled."""
        self._received_s = time.time()
        is_cheap = request.ByteSize() <= _CHEAP_BYTES and not request.sampling_params.HasField("ebnf_grammar")
        writer = AnswerWriter(request)
        with self._call(request.request_id) as call:
            ours = generate_request(request) if is_cheap else await asyncio.to_thread(generate_request, request)
            async with self._inference.running(ours, context.time_remaining) as generation:
                call.generation = generation
                if call.is_aborted:
                    self._requests.abort(generation.identity.execution_id)
                async for response in generation.responses():
                    for message in writer.take(response):
                        yield message

    async def Abort(self, request: Any, context: Context) -> Any:
        """All calls with exactly this id. An id that is unknown, or known no longer, is no error."""
        calls = self._calls.get(request.request_id, ())
        for call in calls:
            call.is_aborted = True
            if call.generation is not None:
                self._requests.abort(call.generation.identity.execution_id)
        return sglang_pb2.AbortResponse(success=True, message="" if calls else "no such request is running")

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """A zip of the tokenizer's files; the last chunk has the digest of all of it."""
        context_tokens = self._requests.require_loaded().max_context_tokens
        data = await asyncio.to_thread(
            tokenizer_archive, self._description.tokenizer, max_context_tokens=context_tokens
        )
        digest = hashlib.sha256(data).hexdigest()
        for start in range(0, len(data), TOKENIZER_CHUNK_BYTES):
            end = start + TOKENIZER_CHUNK_BYTES
            yield common_pb2.GetTokenizerChunk(data=data[start:end], sha256=digest if end >= len(data) else "")

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Drop what no request uses; with requests running, theirs stays."""
        flushed = await self._engine.flush()
        message = f"{flushed.flushed_tokens} tokens dropped, {flushed.kept_tokens} in use"
        return common_pb2.FlushCacheResponse(success=True, message=message)

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Ends when the subscriber goes, or the server stops. OUT_OF_RANGE: begin at 0."""
        await context.send_initial_metadata(())
        try:
            with self._events.subscribe(request.start_sequence_number) as subscription:
                async for batch in subscription:
                    yield batch
        except OutOfRange as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))

    @contextmanager
    def _call(self, request_id: str) -> Iterator[_Call]:
        call = _Call()
        if request_id:
            self._calls.setdefault(request_id, set()).add(call)
        try:
            yield call
        finally:
            if request_id:
                calls = self._calls[request_id]
                calls.discard(call)
                if not calls:
                    del self._calls[request_id]
