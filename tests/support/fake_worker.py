"""A worker's whole gRPC face with nothing behind it: scripted answers, block hashes for a KV cache, death on demand.

`FakeWorker` speaks `radixfleet.v1.Inference` and `Worker` on a real port. What it "generates" is a function of the
prompt's length, so tests can tell answers apart. Everything it was asked is recorded.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from radixfleet import blocks, convert
from radixfleet.accepted import ACCEPTED
from radixfleet.channel import listen, make_server
from radixfleet.clock import MonotonicClock
from radixfleet.errors import RadixfleetError
from radixfleet.text import Tokenizer, TokenizerSpec
from radixfleet.types import Capacity, Load, MemoryPools, ModelInfo, TokenArray, WorkerStatus
from radixfleet.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.byte_tokenizer import byte_spec
from tests.support.played_answer import PlayedAnswer, played
from worker.servicer.link import Links, TimeRemaining

HEARTBEAT_S = 0.05
SERVICES = ("radixfleet.v1.Inference", "radixfleet.v1.Worker")


@dataclass(slots=True)
class Script:
    """How one request goes. Gates are waited for; the default script answers at once."""

    tokens: int = 4
    tokens_a_delta: int = 1
    text_bytes: int = 1
    before_start: asyncio.Event | None = None
    before_first_token: asyncio.Event | None = None
    before_token: asyncio.Event | None = None
    before_finish: asyncio.Event | None = None
    error: RadixfleetError | None = None
    error_after: int = -1
    """Tokens before `error` is raised; -1: before Started; 0: after Started."""
    finish: bool = True
    """False: the stream ends well, but without Finished."""
    others: int = 0
    """More completions beside the first: each has one Delta of its own and a Finished without usage."""


@dataclass(slots=True, eq=False)
class Call:
    """One request as the worker saw it."""

    request: inference_pb2.GenerateRequest
    tokens: TokenArray
    time_remaining_s: float | None
    cached_tokens: int = 0
    uncached_tokens: int = 0
    tokens_sent: int = 0
    state: str = "waiting"
    """waiting, started, computed (the first token is out); then finished, cancelled, failed."""


@dataclass
class FakeWorker:
    """See the module. Change fields while it runs; call `publish` to have them reported at once."""

    spec: TokenizerSpec
    worker_id: str = "worker-0"
    model: str = "fake-model"
    memory: MemoryPools | None = None
    capacity: Capacity = field(default_factory=lambda: Capacity(64 * 1024, 16, 64, 2048))
    incarnation: int = 1
    status: WorkerStatus = WorkerStatus.SERVING
    block_scheme: int = blocks.BLOCK_SCHEME
    block_tokens: int = blocks.BLOCK_TOKENS
    max_context_tokens: int = 1 << 21
    script: Callable[[Call], Script] = field(default=lambda _: Script())
    extra_load: Load = field(default_factory=Load)
    """Load that requests of others make."""
    speaks: asyncio.Event = field(default_factory=lambda: set_event())
    """Cleared: sends no state, as a hung process would not."""
    info_gate: asyncio.Event | None = None
    """Questions what it is wait here."""
    infos_asked: int = 0
    drain_gate: asyncio.Event | None = None
    resume_gate: asyncio.Event | None = None
    knows_links: bool = True
    """False: answers `Worker.Link` as a server does that never heard of it."""
    links: int = 0
    """Links opened so far."""
    calls: list[Call] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)
    """Block hashes in the "KV cache"."""
    watches: int = 0
    """State streams opened so far."""
    tokenizer_fetches: int = 0
    drains: list[float | None] = field(default_factory=list)
    resumes: int = 0
    aborts: list[str] = field(default_factory=list)
    address: str = ""
    sequence: int = 0
    _server: grpc.aio.Server | None = None
    _watchers: set[asyncio.Queue[worker_pb2.StateUpdate]] = field(default_factory=set)

    async def start(self, port: int = 0) -> FakeWorker:
        """Listen on 127.0.0.1; `address` says where."""
        self._server, health = await make_server(SERVICES)
        inference_pb2_grpc.add_InferenceServicer_to_server(_Inference(self), self._server)
        worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(self), self._server)
        bound = listen(self._server, "127.0.0.1", port)
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()
        await health.set(serving=True)
        return self

    @property
    def port(self) -> int:
        """The port it listens, or last listened, on."""
        return int(self.address.rsplit(":", 1)[1])

    async def kill(self) -> None:
        """Stop at once: every call breaks off and the port is closed."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
        self._watchers.clear()

    def restart_engine(self) -> None:
        """New incarnation, empty cache, the same process."""
        self.incarnation += 1
        self.sequence = 0
        self.cached.clear()
        self.publish()

    @property
    def load(self) -> Load:
        """What it reports: its own running calls and `extra_load`."""
        running = [call for call in self.calls if call.state in ("started", "computed")]
        waiting = [call for call in self.calls if call.state == "waiting"]
        extra = self.extra_load
        uncomputed = sum(call.uncached_tokens for call in waiting + running if call.state != "computed")
        return Load(
            running_requests=len(running) + extra.running_requests,
            waiting_requests=len(waiting) + extra.waiting_requests,
            outstanding_prompt_tokens=uncomputed + extra.outstanding_prompt_tokens,
            kv_protected_tokens=sum(len(call.tokens) for call in running) + extra.kv_protected_tokens,
            kv_evictable_tokens=extra.kv_evictable_tokens,
        )

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return sum(call.state in ("waiting", "started", "computed") for call in self.calls)

    def count(self, state: str) -> int:
        """Calls in this state."""
        return sum(call.state == state for call in self.calls)

    def publish(self, **fields: Any) -> None:
        """Report to all watchers now; `fields` go into the update (delta, lease_events)."""
        if self.speaks.is_set():
            update = self.update(**fields)
            for watcher in self._watchers:
                watcher.put_nowait(update)

    def publish_delta(self, added: list[int], evicted: list[int] | None = None) -> None:
        """Change the cached blocks and report it, in sequence."""
        self.sequence += 1
        self.cached.difference_update(evicted or [])
        self.cached.update(added)
        self.publish(delta=worker_pb2.PrefixDelta(evicted=_packed(evicted or []), added=_packed(added)))

    def lose_delta(self, added: list[int]) -> None:
        """Change the cached blocks in sequence, and lose the report of it."""
        self.sequence += 1
        self.cached.update(added)

    def lease_event(self, lease_id: str, phase: str, cached_tokens: int = 0) -> None:
        """Report what became of a leased request: "STARTED", "FIRST_TOKEN", "ENDED"."""
        value = worker_pb2.LeaseEvent.Phase.Value(f"PHASE_{phase}")
        event = worker_pb2.LeaseEvent(lease_id=lease_id, phase=value, cached_tokens=cached_tokens)
        self.publish(lease_events=[event])

    def update(self, **fields: Any) -> worker_pb2.StateUpdate:
        """A state update of this moment."""
        return worker_pb2.StateUpdate(
            incarnation=self.incarnation,
            sequence=self.sequence,
            status=convert.worker_status_to_pb(self.status),
            load=convert.load_to_pb(self.load),
            capacity=None if self.status is WorkerStatus.LOADING else convert.capacity_to_pb(self.capacity),
            **fields,
        )

    def info(self) -> worker_pb2.WorkerInfo:
        """The answer to GetInfo."""
        loading = self.status is WorkerStatus.LOADING
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            status=convert.worker_status_to_pb(self.status),
            model=convert.model_info_to_pb(self.model_info()),
            capacity=None if loading else convert.capacity_to_pb(self.capacity),
            memory=convert.memory_pools_to_pb(self.memory) if self.memory else None,
            version="0.1.0",
            block_scheme=self.block_scheme,
            block_tokens=self.block_tokens,
        )

    def model_info(self) -> ModelInfo:
        """What it serves."""
        return ModelInfo(
            model=self.model,
            max_context_tokens=self.max_context_tokens,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self.spec.eos_token_ids,
            has_chat_template=self.spec.chat_template is not None,
            tokenizer_fingerprint=self.spec.fingerprint(),
            dtype="float32",
            num_parameters=1,
        )

    def hashes(self, tokens: TokenArray, salt: str = "") -> list[int]:
        """Block hashes of a prompt as this worker computes them."""
        seed = blocks.seed_hash(blocks.namespace(self.model, salt))
        return [int(block) for block in blocks.chain_hashes(seed, tokens)]

    def prefill(self, call: Call) -> None:
        """Look the prompt up, and cache it."""
        hashes = self.hashes(call.tokens, call.request.cache_salt)
        depth = next((index for index, block in enumerate(hashes) if block not in self.cached), len(hashes))
        call.cached_tokens = min(depth * self.block_tokens, len(call.tokens) - 1)
        call.uncached_tokens = len(call.tokens) - call.cached_tokens
        new = hashes[depth:]
        if new:
            self.publish_delta(new)


async def _serve(worker_id: str) -> None:
    """A worker in a process of its own: prints its address; its answers have no end."""
    worker = FakeWorker(byte_spec(), worker_id, script=lambda _: Script(before_finish=asyncio.Event()))
    await worker.start()
    print(worker.address, flush=True)
    await asyncio.Event().wait()


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def _packed(hashes: list[int]) -> bytes:
    return np.array(hashes, dtype="<u8").tobytes()


class _Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with aclosing(self.answer(request, context.time_remaining)) as responses:
            async for response in responses:
                yield response

    async def answer(
        self, request: inference_pb2.GenerateRequest, time_remaining: TimeRemaining
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        worker = self._worker
        tokens = convert.unpack_tokens(request.prompt.token_ids, "prompt.token_ids")
        call = Call(request, tokens, time_remaining(), uncached_tokens=len(tokens))
        worker.calls.append(call)
        try:
            async for response in _answer(worker, call, worker.script(call)):
                yield response
            call.state = "finished"
        except RadixfleetError:
            call.state = "failed"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            call.state = "cancelled"
            raise

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.TokenizeResponse:
        tokens = Tokenizer(self._worker.spec).encode_prompt(convert.prompt_form(request.prompt))
        return inference_pb2.TokenizeResponse(token_ids=tokens.tolist())

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=Tokenizer(self._worker.spec).decode(request.token_ids))

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ModelInfo:
        return convert.model_info_to_pb(self._worker.model_info())


async def _answer(worker: FakeWorker, call: Call, script: Script) -> AsyncIterator[inference_pb2.GenerateResponse]:
    response = inference_pb2.GenerateResponse
    await _pass(script.before_start)
    if script.error is not None and script.error_after < 0:
        raise script.error
    worker.prefill(call)
    call.state = "started"
    yield response(
        started=inference_pb2.Started(
            request_id=call.request.request_id,
            execution_id=f"{worker.worker_id}-{len(worker.calls)}",
            worker_id=worker.worker_id,
            prompt_tokens=len(call.tokens),
            cached_tokens=call.cached_tokens,
        )
    )
    await _pass(script.before_first_token)
    while call.tokens_sent < script.tokens:
        if script.error is not None and call.tokens_sent >= script.error_after:
            raise script.error
        await _pass(script.before_token)
        call.state = "computed"
        count = min(script.tokens_a_delta, script.tokens - call.tokens_sent)
        first = len(call.tokens) + call.tokens_sent
        ids = [(first + index) % worker.spec.vocab_size for index in range(count)]
        yield response(delta=inference_pb2.Delta(token_ids=ids, text="x" * script.text_bytes))
        call.tokens_sent += count
    if script.error is not None and call.tokens_sent >= script.error_after:
        raise script.error
    for index in range(1, script.others + 1):
        yield response(delta=inference_pb2.Delta(token_ids=[index], text="y"), index=index)
        yield response(finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_STOP), index=index)
    await _pass(script.before_finish)
    if script.finish:
        usage = inference_pb2.Usage(
            prompt_tokens=len(call.tokens), cached_tokens=call.cached_tokens, completion_tokens=call.tokens_sent
        )
        finished = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)
        yield response(finished=finished)


async def _pass(gate: asyncio.Event | None) -> None:
    if gate is not None:
        await gate.wait()


class _Worker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Link(
        self, request_iterator: AsyncIterator[worker_pb2.RouterFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        if not self._worker.knows_links:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self._worker.links += 1
        await context.send_initial_metadata(ACCEPTED)
        await Links(self._running, MonotonicClock()).serve(request_iterator, context.write)

    def _running(
        self, request: inference_pb2.GenerateRequest, time_remaining: TimeRemaining
    ) -> AbstractAsyncContextManager[PlayedAnswer]:
        return played(_Inference(self._worker).answer(request, time_remaining))

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerInfo:
        self._worker.infos_asked += 1
        await _pass(self._worker.info_gate)
        return self._worker.info()

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.TokenizerChunk]:
        self._worker.tokenizer_fetches += 1
        data = self._worker.spec.to_json()
        for start in range(0, len(data), 4096):
            yield worker_pb2.TokenizerChunk(data=data[start : start + 4096])

    async def WatchState(
        self, request: worker_pb2.WatchStateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.StateUpdate]:
        worker = self._worker
        worker.watches += 1
        queue: asyncio.Queue[worker_pb2.StateUpdate] = asyncio.Queue()
        worker._watchers.add(queue)
        try:
            await worker.speaks.wait()
            digest = worker_pb2.PrefixDigest(block_hashes=_packed(sorted(worker.cached)))
            yield worker.update(digest=digest)
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), HEARTBEAT_S)
                except TimeoutError:
                    if worker.speaks.is_set():
                        yield worker.update()
        finally:
            worker._watchers.discard(queue)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainResponse:
        worker = self._worker
        worker.drains.append(request.grace_s if request.HasField("grace_s") else None)
        worker.status = WorkerStatus.DRAINING
        worker.publish()
        await _pass(worker.drain_gate)
        return worker_pb2.DrainResponse(
            finished_requests=worker.count("finished"), resumed=worker.status is WorkerStatus.SERVING
        )

    async def Resume(
        self, request: worker_pb2.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ResumeResponse:
        worker = self._worker
        worker.resumes += 1
        worker.status = WorkerStatus.SERVING
        worker.publish()
        await _pass(worker.resume_gate)
        return worker_pb2.ResumeResponse()

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.FlushCacheResponse:
        flushed = sorted(self._worker.cached)
        self._worker.publish_delta([], flushed)
        return worker_pb2.FlushCacheResponse(flushed_tokens=len(flushed) * self._worker.block_tokens)

    async def Abort(
        self, request: worker_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AbortResponse:
        self._worker.aborts.append(request.execution_id)
        return worker_pb2.AbortResponse(found=False)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
