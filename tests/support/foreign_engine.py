"""An engine of another project with nothing behind it: speaks SGLang's or vLLM's gRPC dialect on a real port.

What it "generates" is the alphabet, so answers are text that a test can name. It hashes blocks in a way of its own, of
a size of its own, and publishes KV events as those engines do, with all the ways in which their streams go wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc.aio
from smg_grpc_proto.generated import (
    common_pb2,
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from radixfleet.channel import server_options
from radixfleet.text import TokenizerSpec
from tests.support.byte_tokenizer import byte_spec

Dialect = Literal["sglang", "vllm"]


def alphabet(first: int, count: int) -> list[int]:
    """Byte tokens: "abc...", going round, from the letter with this number on."""
    return [97 + (first + position) % 26 for position in range(count)]


def archive(spec: TokenizerSpec) -> bytes:
    """Tokenizer files as an engine zips them."""
    settings = {"eos_token": spec.eos_token, "bos_token": spec.bos_token, "chat_template": spec.chat_template}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as files:
        files.writestr("tokenizer.json", spec.tokenizer_json)
        files.writestr("tokenizer_config.json", json.dumps(settings))
    return buffer.getvalue()


@dataclass(eq=False)
class EngineCall:
    """One Generate call."""

    request: Any
    state: str = "running"
    """running, then finished, aborted, cancelled, failed."""
    cached_tokens: int = 0
    tokens_sent: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prompt(self) -> list[int]:
        return list(self.request.tokenized.input_ids)


@dataclass(eq=False)
class ForeignEngine:
    """See the module. Change fields while it runs."""

    dialect: Dialect
    model: str = "fake-model"
    block_size: int = 48
    caches: bool = True
    """False: for prompts so long that hashing them here takes minutes."""
    publishes: bool = True
    """KV events; else the call is unimplemented."""
    serves_snapshots: bool = False
    has_loads: bool = True
    ranks: int = 1
    """Data-parallel; each has the load. Batches are the last one's."""
    healthy: bool = True
    before_start: asyncio.Event | None = None
    """Requests wait here before anything is said."""
    gate: asyncio.Event | None = None
    """Answers wait here before their last token."""
    lingers: bool = False
    """Calls stay open after their last message."""
    now: Callable[[], float] = time.time
    uptime_gate: asyncio.Event | None = None
    """Answers on its uptime wait here before they are sent."""
    uptimes_asked: int = 0
    padding_bytes: int = 0
    """Log probabilities that nobody asked for, in each chunk."""
    refusal: tuple[grpc.StatusCode, str] | None = None
    reason: str = "length"
    max_context_tokens: int = 4096
    kv_tokens: int = 65_536
    spec: TokenizerSpec = field(default_factory=byte_spec)
    calls: list[EngineCall] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    load: Any = field(default_factory=lambda: common_pb2.EngineLoad(max_running_requests=8))
    address: str = ""
    history: list[Any] = field(default_factory=list)
    forgotten: int = 0
    """Batches that are no longer in the history."""
    subscriptions: list[int] = field(default_factory=list)
    """The numbers from which subscribers began."""
    _prefixes: dict[tuple[int, ...], None] = field(default_factory=dict)
    _subscribers: set[asyncio.Queue[Any]] = field(default_factory=set)
    _server: grpc.aio.Server | None = None

    async def start(self, port: int = 0, *, later_s: float = 0.0) -> ForeignEngine:
        """Listen, as if it were so much later."""
        self.started_s = self.now() + later_s
        self._server = grpc.aio.server(options=server_options())
        if self.dialect == "sglang":
            sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(_Sglang(self), self._server)
        else:
            vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(_Vllm(self), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()
        return self

    async def kill(self) -> None:
        """Stop at once."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
        self._subscribers.clear()

    async def restart(self) -> None:
        """Another process at the same address: nothing is cached, batches begin at 0 again."""
        port = int(self.address.rsplit(":", 1)[1])
        await self.kill()
        self._prefixes.clear()
        self.history.clear()
        self.forgotten = 0
        await self.start(port, later_s=100.0)

    @property
    def worker_id(self) -> str:
        """What a router calls it."""
        return f"{self.dialect}@{self.address}"

    async def uptime_s(self) -> float:
        """Read at once, told when the gate is open."""
        uptime_s = self.now() - self.started_s
        self.uptimes_asked += 1
        if self.uptime_gate is not None:
            await self.uptime_gate.wait()
        return uptime_s

    @property
    def running(self) -> int:
        return sum(call.state == "running" for call in self.calls)

    @property
    def sequence(self) -> int:
        """Of the newest batch; -1 before the first."""
        return self.forgotten + len(self.history) - 1

    def cached(self, prompt: list[int]) -> int:
        """Tokens of a prompt that are cached, in whole blocks."""
        size, depth = self.block_size, 0
        while tuple(prompt[: depth + size]) in self._prefixes and len(prompt) >= depth + size:
            depth += size
        return min(depth, len(prompt) - 1)

    def store(self, prompt: list[int]) -> None:
        """Cache a prompt's whole blocks, and say so in one batch."""
        size = self.block_size
        ends = [end for end in range(size, len(prompt) + 1, size) if tuple(prompt[:end]) not in self._prefixes]
        if not ends:
            return
        stored = common_pb2.KvBlocksStored()
        if ends[0] > size:
            stored.parent_block_hash = block_hash(prompt[: ends[0] - size])
        for end in ends:
            self._prefixes[tuple(prompt[:end])] = None
            stored.blocks.add(block_hash=block_hash(prompt[:end]), token_ids=prompt[end - size : end], block_size=size)
        self.publish(common_pb2.KvCacheEvent(stored=stored))

    def evict(self, prompt: list[int]) -> None:
        """Drop the cached block that ends a prefix."""
        del self._prefixes[tuple(prompt)]
        removed = common_pb2.KvBlocksRemoved(block_hashes=[block_hash(prompt)])
        self.publish(common_pb2.KvCacheEvent(removed=removed))

    def clear(self) -> None:
        """Drop everything."""
        self._prefixes.clear()
        self.publish(common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()))

    def publish(self, *events: Any, lost: bool = False) -> None:
        """A batch. `lost`: subscribers never see it."""
        batch = common_pb2.KvEventBatch(sequence_number=self.sequence + 1, events=events, load=self.load)
        batch.dp_rank = self.ranks - 1
        self.history.append(batch)
        for subscriber in () if lost else self._subscribers:
            subscriber.put_nowait(batch)

    def tell_load(self) -> None:
        """A load record: repeats the last number."""
        record = common_pb2.EngineLoad(load_only=True)
        record.MergeFrom(self.load)
        batch = common_pb2.KvEventBatch(sequence_number=max(0, self.sequence), load=record)
        for subscriber in self._subscribers:
            subscriber.put_nowait(batch)

    def forget(self) -> None:
        """The history is gone; the cache is not."""
        self.forgotten += len(self.history)
        self.history.clear()

    def snapshot(self) -> Any:
        """All cached blocks, in one chunk."""
        events = [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())]
        for prefix in self._prefixes:
            tokens = list(prefix)
            stored = common_pb2.KvBlocksStored()
            if len(tokens) > self.block_size:
                stored.parent_block_hash = block_hash(tokens[: -self.block_size])
            stored.blocks.add(block_hash=block_hash(tokens), token_ids=tokens[-self.block_size :])
            events.append(common_pb2.KvCacheEvent(stored=stored))
        about = common_pb2.KvSnapshotChunk(index=0, count=1, blocks=len(self._prefixes))
        return common_pb2.KvEventBatch(sequence_number=self.sequence, events=events, snapshot=about, load=self.load)


def block_hash(prefix: list[int]) -> int:
    """Signed 64-bit, of the engine's own making."""
    digest = hashlib.blake2b(repr(prefix).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class _Servicer(ABC):
    """What both dialects have in common."""

    pb: Any

    def __init__(self, engine: ForeignEngine) -> None:
        self.engine = engine

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return self.pb.HealthCheckResponse(healthy=self.engine.healthy)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        engine = self.engine
        return self.pb.GetModelInfoResponse(
            served_model_name=engine.model,
            max_context_length=engine.max_context_tokens,
            vocab_size=engine.spec.vocab_size,
            eos_token_ids=engine.spec.eos_token_ids,
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:
        engine = self.engine
        if not engine.has_loads:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no loads")
        load = self.pb.SchedulerLoad(
            num_running_reqs=engine.load.running_requests,
            num_waiting_reqs=engine.load.waiting_requests,
            max_total_num_tokens=engine.kv_tokens,
            max_running_requests=engine.load.max_running_requests,
            num_waiting_uncached_tokens=engine.load.waiting_uncached_tokens,
        )
        return self.pb.GetLoadsResponse(loads=[load] * engine.ranks)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        data = archive(self.engine.spec)
        for start in range(0, len(data), 4096):
            is_last = start + 4096 >= len(data)
            digest = hashlib.sha256(data).hexdigest() if is_last else ""
            yield common_pb2.GetTokenizerChunk(data=data[start : start + 4096], sha256=digest)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        engine = self.engine
        if not engine.publishes:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no KV events")
        await context.send_initial_metadata(())
        start = request.start_sequence_number
        engine.subscriptions.append(start)
        if start > engine.sequence + 1 or (start and start < engine.forgotten):
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "begin at 0")
        queue: asyncio.Queue[Any] = asyncio.Queue()
        engine._subscribers.add(queue)
        if not start and engine.forgotten:
            if engine.serves_snapshots:
                yield engine.snapshot()
        else:
            for batch in engine.history[max(0, start - engine.forgotten) :]:
                yield batch
        try:
            while True:
                yield await queue.get()
        finally:
            engine._subscribers.discard(queue)

    async def _run(self, call: EngineCall, index: int, count: int) -> AsyncIterator[tuple[list[int], str]]:
        """Tokens of one completion, with the reason at its end."""
        engine = self.engine
        tokens = alphabet(len(call.prompt) + index, count)
        stops = set(call.request.sampling_params.stop_token_ids)
        for position, token in enumerate(tokens, start=1):
            is_last = position == len(tokens) or token in stops
            if is_last and engine.gate is not None:
                gate = asyncio.ensure_future(engine.gate.wait())
                aborted = asyncio.ensure_future(call.aborted.wait())
                try:
                    await asyncio.wait((gate, aborted), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    gate.cancel()
                    aborted.cancel()
            if call.aborted.is_set():
                yield [], "abort"
                return
            yield [token], ("stop" if token in stops else engine.reason) if is_last else ""
            call.tokens_sent += 1
            if is_last:
                return

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        engine = self.engine
        call = EngineCall(request)
        engine.calls.append(call)
        try:
            if engine.refusal is not None:
                call.state = "failed"
                await context.abort(*engine.refusal)
            if engine.before_start is not None:
                await engine.before_start.wait()
            if engine.caches:
                call.cached_tokens = engine.cached(call.prompt)
                engine.store(call.prompt)
            for index in range(request.sampling_params.n or 1):
                told: list[int] = []
                async for tokens, reason in self._run(call, index, self.limit(request.sampling_params)):
                    told += tokens
                    for message in self.messages(call, index, told, tokens, reason):
                        yield message
            if engine.lingers:
                await asyncio.Event().wait()
            call.state = "aborted" if call.aborted.is_set() else "finished"
        except (asyncio.CancelledError, GeneratorExit):
            call.state = "cancelled"
            raise

    def _abort(self, request_id: str) -> None:
        self.engine.aborts.append(request_id)
        for call in self.engine.calls:
            if call.request.request_id == request_id:
                call.aborted.set()

    @abstractmethod
    def limit(self, sampling: Any) -> int:
        """Tokens to answer with at most."""

    @abstractmethod
    def messages(self, call: EngineCall, index: int, told: list[int], new: list[int], reason: str) -> list[Any]:
        """What the dialect says of `new` tokens, after which `told` are all."""

    def padding(self) -> Any:
        """None, unless messages are to be large."""
        count = self.engine.padding_bytes // 4
        return self.pb.OutputLogProbs(token_logprobs=[0.0] * count) if count else None

    def logprobs(self, tokens: list[int], tops: int) -> Any:
        """Each token at -1, the likeliest beside it at -0.5, in the wrong order."""
        return self.pb.OutputLogProbs(
            token_logprobs=[-1.0] * len(tokens),
            token_ids=tokens,
            top_logprobs=[
                self.pb.TopLogProbs(values=[-1.0, -0.5, -2.0][: tops + 1], token_ids=[token, 1, 2][: tops + 1])
                for token in tokens
            ],
        )


class _Sglang(_Servicer, sglang_scheduler_pb2_grpc.SglangSchedulerServicer):
    """Counts since the beginning; the complete message has all tokens."""

    pb = sglang_scheduler_pb2

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        engine = self.engine
        return self.pb.GetServerInfoResponse(
            uptime_seconds=await engine.uptime_s(), max_total_num_tokens=engine.kv_tokens
        )

    async def Abort(self, request: Any, context: Any) -> Any:
        self._abort(request.request_id)
        return self.pb.AbortResponse(success=True)

    def limit(self, sampling: Any) -> int:
        return int(sampling.max_new_tokens)

    def messages(self, call: EngineCall, index: int, told: list[int], new: list[int], reason: str) -> list[Any]:
        request = call.request
        counts = {
            "prompt_tokens": len(call.prompt),
            "completion_tokens": len(told),
            "cached_tokens": call.cached_tokens,
            "index": index,
        }
        logprobs = self.logprobs(new, request.top_logprobs_num) if request.return_logprob else self.padding()
        messages = []
        if new and request.stream:
            chunk = self.pb.GenerateStreamChunk(token_ids=new, output_logprobs=logprobs, **counts)
            messages.append(self.pb.GenerateResponse(request_id=request.request_id, chunk=chunk))
        if reason:
            complete = self.pb.GenerateComplete(output_ids=told, finish_reason=reason, **counts)
            messages.append(self.pb.GenerateResponse(request_id=request.request_id, complete=complete))
        return messages


class _Vllm(_Servicer, vllm_engine_pb2_grpc.VllmEngineServicer):
    """Counts of the message alone; the complete message has the last chunk's tokens once more."""

    pb = vllm_engine_pb2

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        await self.engine.uptime_s()  # not told: the real one leaves it 0
        return self.pb.GetServerInfoResponse(max_num_seqs=8)

    async def Abort(self, request: Any, context: Any) -> Any:
        for request_id in request.request_ids:
            self._abort(request_id)
        return self.pb.AbortResponse()

    def limit(self, sampling: Any) -> int:
        return int(sampling.max_tokens)

    def messages(self, call: EngineCall, index: int, told: list[int], new: list[int], reason: str) -> list[Any]:
        sampling = call.request.sampling_params
        counts = {
            "prompt_tokens": len(call.prompt),
            "completion_tokens": len(new),
            "cached_tokens": call.cached_tokens,
            "index": index,
        }
        logprobs = self.logprobs(new, sampling.logprobs) if sampling.HasField("logprobs") else self.padding()
        messages = []
        if new:
            chunk = self.pb.GenerateStreamChunk(token_ids=new, output_logprobs=logprobs, **counts)
            messages.append(self.pb.GenerateResponse(chunk=chunk))
        if reason:
            complete = self.pb.GenerateComplete(
                output_ids=new, finish_reason=reason, output_logprobs=logprobs, **counts
            )
            messages.append(self.pb.GenerateResponse(complete=complete))
        return messages
