"""An engine that speaks SGLang's or vLLM's gRPC dialect, as a worker of ours.

info        GetModelInfo, GetServerInfo, GetLoads, and GetTokenizer, from which the fingerprint is made
states      GetLoads and HealthCheck about once a second, load records and KV events as they come
generate    Generate, and Abort for an answer that nobody reads on: not every engine ends one with its call
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc.aio
import numpy as np
import structlog
from smg_grpc_proto.generated import common_pb2

from radixfleet import convert
from radixfleet.blocks import BLOCK_SCHEME, BLOCK_TOKENS
from radixfleet.clock import Clock
from radixfleet.counts import counted
from radixfleet.errors import InvalidRequest, Unavailable
from radixfleet.sampling import sampling_params
from radixfleet.status import until_status
from radixfleet.text import Tokenizer
from radixfleet.v1 import inference_pb2, worker_pb2
from router.dialects.answer import Answer, Names
from router.dialects.continued import rest_of
from router.dialects.kv_events import KvEvents
from router.dialects.speaker import Archives, Faulty, State, Unreachable
from router.dialects.words import Words, index_of

POLL_S = 1.0
_COALESCE_S = 0.05
_ABORT_S = 5.0
_SAME_START_S = 1.0
"""What is reckoned of one and the same start from different answers lies this far apart at most."""
_DEFAULT_MAX_NEW_TOKENS = 256
_MAX_TOKENIZER_BYTES = 256 * 1024**2

_log = structlog.get_logger("radixfleet.router.dialects")


class EngineSpeaker:
    """One engine at one address."""

    def __init__(
        self,
        words: Words,
        channel: grpc.aio.Channel,
        address: str,
        clock: Clock,
        archives: Archives,
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: of a question about itself, and of each piece of the tokenizer's files."""
        self._words = words
        self._stub = words.stub(channel)
        self._address = address
        self._clock = clock
        self._archives = archives
        self._timeout_s = timeout_s
        self._started_s: tuple[float, float] | None = None
        """Between these times of our clock the engine started."""
        self._was_lost = False
        """Since it was last asked what it is."""
        self._incarnation = 0
        self._tokenizer: Tokenizer | None = None
        self._fingerprint = 0
        """The tokenizer's."""
        self._model = inference_pb2.ModelInfo()
        self._capacity = worker_pb2.Capacity()
        self._has_loads = True
        self._background: set[asyncio.Task[None]] = set()

    @property
    def dialect(self) -> str:
        """See `Speaker`, here and below."""
        return self._words.dialect

    @property
    def lacks(self) -> frozenset[str]:
        """What the dialect has no word for."""
        return self._words.lacks

    async def info(self) -> worker_pb2.WorkerInfo:
        """What the engine tells of itself. Asked again whenever another one may listen there."""
        with self._noting_loss():
            return await self._told()

    async def _told(self) -> worker_pb2.WorkerInfo:
        pb = self._words.pb
        asked_s = self._clock.now()
        async with asyncio.timeout(self._timeout_s):
            told, server = await asyncio.gather(
                self._stub.GetModelInfo(pb.GetModelInfoRequest()), self._stub.GetServerInfo(pb.GetServerInfoRequest())
            )
        self._take_start(server, asked_s)
        loads = await self._loads()
        self._capacity = worker_pb2.Capacity(
            kv_tokens=max(getattr(server, "max_total_num_tokens", 0), loads.max_total_num_tokens),
            max_running_requests=max(getattr(server, "max_num_seqs", 0), loads.max_running_requests),
        )
        healthy = await self._is_healthy()
        # The last to be waited for: the store keeps it only when the fleet hears of this worker.
        tokenizer = self._tokenizer or await self._fetched_tokenizer(told)
        self._model = inference_pb2.ModelInfo(
            model=told.served_model_name or told.model_path,
            max_context_tokens=told.max_context_length,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            has_chat_template=tokenizer.spec.chat_template is not None,
            tokenizer_fingerprint=self._fingerprint,
            dtype=getattr(server, "model_dtype", "").removeprefix("torch."),
        )
        return worker_pb2.WorkerInfo(
            worker_id=f"{self.dialect}@{self._address}",
            incarnation=self._incarnation,
            status=worker_pb2.WORKER_STATUS_SERVING if healthy else worker_pb2.WORKER_STATUS_FAILED,
            model=self._model,
            capacity=self._capacity,
            version=f"{self.dialect} {getattr(server, 'sglang_version', '')}".strip(),
            block_scheme=BLOCK_SCHEME,
            block_tokens=BLOCK_TOKENS,
        )

    async def tokenizer(self) -> bytes:
        """Fetched by `info`."""
        assert self._tokenizer is not None, "it was asked before"
        return self._tokenizer.spec.to_json()

    async def drain(self, grace_s: float | None) -> None:
        """Engines know no such word."""

    async def resume(self) -> None:
        """Nor this one: it was never told to stop."""

    async def states(self) -> AsyncGenerator[State, None]:
        """A digest when the events have become the whole truth, then changes; the load at least every `POLL_S`."""
        changed = asyncio.Event()
        events = KvEvents(f"{self.dialect}@{self._address}", self._model.model, changed.set)
        following = asyncio.create_task(events.follow(self._stub), name=f"kv events of {self._address}")
        sequence, told_generation = 0, 0
        try:
            while True:
                with self._noting_loss():
                    healthy, load = await self._poll(events)
                ends_at_s = self._clock.now() + POLL_S
                while (left_s := ends_at_s - self._clock.now()) > 0:
                    changed.clear()
                    update = self._update(healthy=healthy, load=load)
                    evicted, added = events.blocks.drain()
                    if events.is_complete and told_generation != events.generation:
                        told_generation = events.generation
                        sequence += 1
                        update.digest.block_hashes = events.blocks.hashes().tobytes()
                    elif events.is_complete and len(evicted) + len(added):
                        sequence += 1
                        update.delta.evicted, update.delta.added = evicted.tobytes(), added.tobytes()
                    update.sequence = sequence
                    yield State(update, tells_prefixes=events.is_complete)
                    await asyncio.sleep(min(_COALESCE_S, left_s))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(max(0.0, ends_at_s - self._clock.now())):
                            await changed.wait()
                    load = _load(events.load, self._capacity.kv_tokens) if events.load is not None else load
        finally:
            self._was_lost |= events.was_cut
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        source: inference_pb2.Prompt | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """See `Generator`. Token ids are enough."""
        execution_id = secrets.token_hex(12)
        message, answer = self._begin(request, execution_id)
        if answer.ending is not None:
            for one in answer.take(answer.ending):
                yield one
            return
        call = self._stub.Generate(message, timeout=timeout_s)
        try:
            while not answer.is_complete:
                response = await call.read()
                if not isinstance(response, self._words.pb.GenerateResponse):
                    raise Faulty("it ended the answer without saying why")
                part = self._words.part(response, answer.emitted(index_of(response)))
                for one in answer.take(part):
                    yield one
        finally:
            if answer.ended_by_engine:
                await until_status(call)
            else:
                self._in_background(self._abort(execution_id))
            call.cancel()

    async def close(self) -> None:
        """Let the aborts under way go."""
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _begin(self, request: inference_pb2.GenerateRequest, execution_id: str) -> tuple[Any, Answer]:
        """What the engine is asked, unless the answer has its `ending`, and who reads what it says.

        Raises InvalidRequest.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise Unavailable(f"worker {self._address} has not told its tokenizer yet", retry_after_s=1.0)
        if request.cache_salt:
            raise InvalidRequest("the engine that was chosen cannot keep caches apart by salt", field="cache_salt")
        sampling = sampling_params(request.sampling, vocab_size=tokenizer.vocab_size)
        prompt = convert.unpack_tokens(request.prompt.token_ids, "prompt.token_ids")
        generated = convert.unpack_tokens(request.generated, "generated")
        room = self._model.max_context_tokens - len(prompt)
        wanted = sampling.max_new_tokens
        max_new_tokens = wanted if wanted is not None else max(1, min(_DEFAULT_MAX_NEW_TOKENS, room))
        if max_new_tokens > room:
            raise InvalidRequest(
                f"the prompt has {counted(len(prompt), 'token')} and max_new_tokens is {max_new_tokens}, but the "
                f"context is {self._model.max_context_tokens} tokens",
                field="sampling.max_new_tokens",
            )
        sampling = replace(sampling, max_new_tokens=max_new_tokens)
        names = Names(request.request_id, execution_id, f"{self.dialect}@{self._address}")
        answer = Answer(names, prompt, generated, sampling, tokenizer, self._clock)
        if answer.ending is not None:
            return None, answer
        rest = rest_of(sampling, max_new_tokens, len(generated))
        return self._words.request(execution_id, np.concatenate([prompt, generated]).tolist(), rest), answer

    async def _abort(self, execution_id: str) -> None:
        with suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await self._stub.Abort(self._words.abort(execution_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"abort at {self._address}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _fetched_tokenizer(self, told: Any) -> Tokenizer:
        data = bytearray()
        stream = self._stub.GetTokenizer(common_pb2.GetTokenizerRequest())
        try:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    chunk = await stream.read()
                if not isinstance(chunk, common_pb2.GetTokenizerChunk):
                    break
                data += chunk.data
                if len(data) > _MAX_TOKENIZER_BYTES:
                    raise ValueError(f"the engine's tokenizer is larger than {_MAX_TOKENIZER_BYTES} bytes")
        finally:
            stream.cancel()
        tokenizer, self._fingerprint = await self._archives.tokenizer_of(
            bytes(data), eos_token_ids=told.eos_token_ids, vocab_size=told.vocab_size
        )
        self._tokenizer = tokenizer
        return tokenizer

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """An engine that was only too busy to answer is still the same."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            self._was_lost |= error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
            raise
        except Unreachable:
            self._was_lost = True
            raise

    def _take_start(self, server: Any, asked_s: float) -> None:
        """Engines have no incarnations: another start is another one."""
        is_same = self._is_same_start(server, asked_s)
        self._was_lost = False
        if is_same:
            return
        self._started_s = self._reckoned(server, asked_s)
        self._incarnation = secrets.randbits(63) + 1
        self._tokenizer = None

    def _is_same_start(self, server: Any, asked_s: float) -> bool:
        """An answer that was long on its way says little of when it was given, but never that of another start."""
        if self._started_s is None:
            return False
        if not _tells_start(server):
            return not self._was_lost
        known, reckoned = self._started_s, self._reckoned(server, asked_s)
        if reckoned[0] > known[1] + _SAME_START_S or reckoned[1] < known[0] - _SAME_START_S:
            return False
        if reckoned[1] - reckoned[0] <= max(known[1] - known[0], _SAME_START_S):
            self._started_s = reckoned  # as exact: two clocks drift apart in weeks
        return True

    def _reckoned(self, server: Any, asked_s: float) -> tuple[float, float]:
        """The uptime was read between the question, at `asked_s`, and now."""
        return asked_s - server.uptime_seconds, self._clock.now() - server.uptime_seconds

    async def _poll(self, events: KvEvents) -> tuple[bool, worker_pb2.Load]:
        """Health and load now. A load record among the events spares the question.

        Raises Unreachable for an engine that started again between two polls, which no connection need have shown.
        """
        pb = self._words.pb
        asked_s = self._clock.now()
        server = await self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=self._timeout_s)
        if not self._is_same_start(server, asked_s):
            raise Unreachable("the engine started again")
        if events.was_cut and not _tells_start(server):
            raise Unreachable("its KV events were cut: it may have started again")
        healthy = await self._is_healthy()
        if events.load is not None:
            return healthy, _load(events.load, self._capacity.kv_tokens)
        return healthy, _polled_load(await self._loads())

    async def _is_healthy(self) -> bool:
        pb = self._words.pb
        answer = await self._stub.HealthCheck(pb.HealthCheckRequest(), timeout=self._timeout_s)
        return bool(answer.healthy)

    async def _loads(self) -> Any:
        """SchedulerLoad, of all ranks together; an empty one where the engine has no word for it."""
        pb = self._words.pb
        if self._has_loads:
            try:
                answer = await self._stub.GetLoads(pb.GetLoadsRequest(include=["core"]), timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                self._has_loads = False
            else:
                return _together(answer.loads, pb)
        return pb.SchedulerLoad()

    def _update(self, *, healthy: bool, load: worker_pb2.Load) -> worker_pb2.StateUpdate:
        return worker_pb2.StateUpdate(
            incarnation=self._incarnation,
            status=worker_pb2.WORKER_STATUS_SERVING if healthy else worker_pb2.WORKER_STATUS_FAILED,
            load=load,
            capacity=self._capacity if self._capacity.kv_tokens else None,
        )


def _tells_start(server: Any) -> bool:
    """SGLang's servers say how long they are up; vLLM's leave it 0, however long that is.

    One that leaves it is taken for another when it was lost: no connection, or its events were cut.
    """
    return bool(server.uptime_seconds)


def _load(record: Any, kv_tokens: int) -> worker_pb2.Load:
    """From an EngineLoad."""
    in_use = record.active_token_usage if record.HasField("active_token_usage") else record.token_usage
    return worker_pb2.Load(
        running_requests=record.running_requests,
        waiting_requests=record.waiting_requests,
        outstanding_prompt_tokens=max(record.waiting_uncached_tokens, record.prefill_pending_tokens),
        kv_protected_tokens=round(in_use * kv_tokens),
    )


def _together(loads: Sequence[Any], pb: Any) -> Any:
    """A SchedulerLoad from those of data-parallel ranks. Its token_usage is their share of all tokens."""
    if len(loads) == 1:
        return loads[0]
    tokens = sum(max(0, load.max_total_num_tokens) for load in loads)
    used = sum(max(0, load.max_total_num_tokens) * load.token_usage for load in loads)
    return pb.SchedulerLoad(
        num_running_reqs=sum(max(0, load.num_running_reqs) for load in loads),
        num_waiting_reqs=sum(max(0, load.num_waiting_reqs) for load in loads),
        num_waiting_uncached_tokens=sum(max(0, load.num_waiting_uncached_tokens) for load in loads),
        max_running_requests=sum(max(0, load.max_running_requests) for load in loads),
        max_total_num_tokens=tokens,
        token_usage=used / tokens if tokens else 0.0,
    )


def _polled_load(loads: Any) -> worker_pb2.Load:
    """From a SchedulerLoad."""
    return worker_pb2.Load(
        running_requests=max(0, loads.num_running_reqs),
        waiting_requests=max(0, loads.num_waiting_reqs),
        outstanding_prompt_tokens=max(0, loads.num_waiting_uncached_tokens),
        kv_protected_tokens=max(0, round(loads.token_usage * loads.max_total_num_tokens)),
    )
