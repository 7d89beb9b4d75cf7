"""An engine that speaks nothing but OpenAI's HTTP, as a worker of ours: vLLM's, SGLang's, llama.cpp's, Ollama's server.

info        /v1/models: the model, and its context where the engine tells it; `owned_by` says which kind of engine it is
states      /health once a second; where there is none, any answer is a sign of life. No loads and no word on the cache:
            the router goes by its own bookings and by the receipts that come with the usage
generate    a prompt of token ids to /v1/completions where the engine takes them, else the text there, or the chat to
            /v1/chat/completions; closing the connection aborts

While an answer streams, /v1/models is not asked for: llama-cpp-python breaks running answers off to answer that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import aiohttp
import msgspec
import structlog

from radixfleet.blocks import BLOCK_SCHEME, BLOCK_TOKENS
from radixfleet.clock import Clock
from radixfleet.errors import InvalidRequest, Unavailable
from radixfleet.sampling import sampling_params
from radixfleet.tls import ClientTls
from radixfleet.tracing import headers
from radixfleet.types import SamplingParams
from radixfleet.v1 import inference_pb2, worker_pb2
from router.dialects.answer import Names
from router.dialects.http_answer import HttpAnswer
from router.dialects.http_connection import HttpConnection
from router.dialects.http_events import DONE, error_message, read_event, server_sent_events
from router.dialects.http_forms import HttpForm, HttpForms, limit_of
from router.dialects.http_words import kind_of
from router.dialects.speaker import State, Unreachable
from router.worker_address import EngineAddress

POLL_S = 1.0
_LOADING = 503
_TAIL_S = 5.0
"""For the usage, when every completion has ended."""
_ASSUMED_KV_TOKENS = 262_144
"""What such an engine can cache is not told. Receipts teach when it is less. Nor may an answer be longer."""

_log = structlog.get_logger("radixfleet.router.dialects")


class _Model(msgspec.Struct):
    """One model in the answer of /v1/models."""

    id: str
    owned_by: str | None = None
    parent: str | None = None
    """The model that an adapter belongs to."""
    max_model_len: int | None = None
    meta: Any = None
    """Of llama.cpp's: an object whose n_ctx is the context of each of its slots."""

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt and answer together; None: it is not told."""
        told = self.max_model_len
        if told is None and isinstance(self.meta, dict) and isinstance(self.meta.get("n_ctx"), int):
            told = self.meta["n_ctx"]
        return told if told and told > 0 else None


class _Models(msgspec.Struct):
    """The list."""

    data: list[_Model]


class HttpSpeaker:
    """One engine at one address."""

    dialect = "openai"

    def __init__(
        self,
        address: EngineAddress,
        clock: Clock,
        *,
        timeout_s: float,
        api_key: Callable[[], str | None],
        tls: ClientTls | None = None,
    ) -> None:
        """`timeout_s`: of a question about itself. `api_key`: what it is shown, asked for at each request.

        `tls`: see `HttpConnection`.
        """
        self._http = HttpConnection(address, clock, connect_timeout_s=timeout_s, api_key=api_key, tls=tls)
        self._address = address
        self._clock = clock
        self._timeout_s = timeout_s
        self._incarnation = 0
        self._model = _Model("")
        self._kind = kind_of("")
        self._takes_ids: bool | None = None
        """None: it was not tried yet."""
        self._tells_cached: bool | None = None
        """None: no answer has shown it yet."""

    @property
    def lacks(self) -> frozenset[str]:
        """See `Speaker`, here and below."""
        return self._kind.lacks

    async def info(self) -> worker_pb2.WorkerInfo:
        """What the engine tells of itself. Asked again whenever another one may listen there."""
        status, body = await self._http.get(f"{self._address.base}/models", self._timeout_s)
        if status >= 500:
            raise Unreachable(f"it is not ready: {error_message(body, f'status {status}')}")
        if status in (401, 403):
            raise ValueError(f"{self._address.host} refuses this router's key: set --engine-api-key")
        if status != 200:
            raise ValueError(f"{self._address.base}/models answered with status {status}: is it OpenAI's API?")
        self._model = _chosen(body, self._address)
        self._kind = kind_of(self._model.owned_by or "")
        if not self._incarnation or self._http.was_refused:
            self._http.was_refused = False
            self._incarnation = secrets.randbits(63) + 1
            self._takes_ids = self._tells_cached = None
            _log.warning(
                f"no truth from worker {self._address.name}, approximate: OpenAI's HTTP has no word for its cache",
                worker=self._address.name,
                engine=self._kind.name or "unknown",
            )
        return worker_pb2.WorkerInfo(
            worker_id=self._address.name,
            incarnation=self._incarnation,
            status=await self._health(),
            model=inference_pb2.ModelInfo(model=self._model.id, max_context_tokens=self._model.context_tokens or 0),
            capacity=worker_pb2.Capacity(kv_tokens=_ASSUMED_KV_TOKENS),
            version=f"openai {self._model.owned_by or ''}".strip(),
            block_scheme=BLOCK_SCHEME,
            block_tokens=BLOCK_TOKENS,
        )

    async def tokenizer(self) -> bytes:
        """Never told, and so never asked for: the fingerprint is 0."""
        raise ValueError("OpenAI's HTTP has no word for the tokenizer")

    async def drain(self, grace_s: float | None) -> None:
        """Engines know no such word."""

    async def resume(self) -> None:
        """Nor this one: it was never told to stop."""

    async def states(self) -> AsyncGenerator[State, None]:
        """Whether it lives, every `POLL_S`."""
        asking: asyncio.Task[worker_pb2.WorkerStatus.ValueType] | None = None
        status = worker_pb2.WORKER_STATUS_SERVING
        try:
            while True:
                asking = asking or asyncio.create_task(self._health(), name=f"health of {self._address.name}")
                done, _ = await asyncio.wait({asking}, timeout=POLL_S)
                if done:
                    status, asking = asking.result(), None
                elif self._clock.now() - self._http.heard_at_s > self._timeout_s:
                    raise Unreachable("no word in time")
                if self._http.was_refused:
                    raise Unreachable("it refused a connection, or broke it off")
                yield State(self._update(status), tells_prefixes=False)
                if done:
                    await asyncio.sleep(POLL_S)
        finally:
            if asking is not None:
                asking.cancel()
                with suppress(asyncio.CancelledError, Unreachable):
                    await asking

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        source: inference_pb2.Prompt | None = None,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """See `Generator`."""
        ends_at_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        execution_id = secrets.token_hex(12)
        sampling = sampling_params(request.sampling)
        answer = self._answer(request, sampling, execution_id)
        if answer.is_whole:
            yield answer.start()
            yield answer.finish(tells_cached=False)
            return
        forms = HttpForms(self._kind, self._model.context_tokens, takes_ids=self._takes_ids is not False)
        response = await self._post(forms.of(request, sampling, source), execution_id, ends_at_s)
        try:
            yield answer.start()
            async with aclosing(self._messages(response, answer, ends_at_s)) as messages:
                async for message in messages:
                    yield message
            self._learn(answer)
            last = answer.finish(tells_cached=bool(self._tells_cached))
            if not answer.was_cut:
                await self._read_rest(response, ends_at_s)
            yield last
        finally:
            response.close()

    async def close(self) -> None:
        """Every connection."""
        await self._http.close()

    async def _messages(
        self, response: aiohttp.ClientResponse, answer: HttpAnswer, ends_at_s: float | None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """All but the first and the last."""
        if response.content_type == "application/json":  # it does not stream
            for message in answer.take(read_event(await self._http.whole(response, ends_at_s))):
                yield message
            return
        async with aclosing(server_sent_events(self._http.read(response, ends_at_s))) as events:
            tail_ends_at_s = None
            while not answer.was_cut or not answer.is_complete:
                if answer.is_complete and tail_ends_at_s is None:
                    tail_ends_at_s = asyncio.get_running_loop().time() + _TAIL_S
                try:
                    async with asyncio.timeout_at(tail_ends_at_s):
                        event = await anext(events, DONE)
                except TimeoutError:
                    return
                if event.strip() == DONE:
                    return
                for message in answer.take(read_event(event)):
                    yield message

    async def _read_rest(self, response: aiohttp.ClientResponse, ends_at_s: float | None) -> None:
        """What comes behind an answer, so that the connection can be used again."""
        with suppress(TimeoutError, Unreachable):
            async with asyncio.timeout(_TAIL_S):
                async for _ in self._http.read(response, ends_at_s):
                    pass

    async def _post(
        self, forms: Sequence[HttpForm], execution_id: str, ends_at_s: float | None
    ) -> aiohttp.ClientResponse:
        """The first form that the engine takes."""
        extra = {"X-Request-Id": execution_id, **headers()}
        first, *others = forms
        try:
            response = await self._http.post(first.path, self._body(first), extra, ends_at_s)
        except (InvalidRequest, Unavailable, Unreachable):
            if not others or (first.has_ids and self._takes_ids):
                raise
            response = await self._http.post(others[0].path, self._body(others[0]), extra, ends_at_s)
            if first.has_ids:
                self._takes_ids = False
                _log.info("the engine takes no token ids, it is sent text", worker=self._address.name)
            return response
        if first.has_ids:
            self._takes_ids = True
        return response

    def _body(self, form: HttpForm) -> dict[str, Any]:
        return {"model": self._model.id, "stream": True, "stream_options": {"include_usage": True}, **form.fields}

    def _answer(
        self, request: inference_pb2.GenerateRequest, sampling: SamplingParams, execution_id: str
    ) -> HttpAnswer:
        has_ids = request.prompt.WhichOneof("form") == "token_ids"
        return HttpAnswer(
            Names(request.request_id, execution_id, self._address.name),
            self._clock,
            prompt_tokens=len(request.prompt.token_ids.packed) // 4 if has_ids else None,
            generated_tokens=len(request.generated.packed) // 4,
            max_new_tokens=limit_of(sampling),
            most_new_tokens=sampling.max_new_tokens or self._model.context_tokens or _ASSUMED_KV_TOKENS,
            n=sampling.n,
            num_logprobs=sampling.logprobs,
        )

    def _learn(self, answer: HttpAnswer) -> None:
        if answer.cached_tokens is not None:
            self._tells_cached = True
        elif self._tells_cached is None:
            self._tells_cached = False
            _log.warning(
                f"worker {self._address.name} does not tell how much of a prompt it had cached (vLLM: "
                "--enable-prompt-tokens-details, SGLang: --enable-cache-report): what it caches is assumed",
                worker=self._address.name,
            )

    async def _health(self) -> worker_pb2.WorkerStatus.ValueType:
        """Raises Unreachable."""
        status, _ = await self._http.get(f"{self._address.root}/health", 2 * self._timeout_s)
        if status == _LOADING:
            return worker_pb2.WORKER_STATUS_LOADING
        return worker_pb2.WORKER_STATUS_FAILED if status >= 500 else worker_pb2.WORKER_STATUS_SERVING

    def _update(self, status: worker_pb2.WorkerStatus.ValueType) -> worker_pb2.StateUpdate:
        return worker_pb2.StateUpdate(
            incarnation=self._incarnation,
            status=status,
            load=worker_pb2.Load(),
            capacity=worker_pb2.Capacity(kv_tokens=_ASSUMED_KV_TOKENS),
        )


def _chosen(body: bytes, address: EngineAddress) -> _Model:
    """Raises ValueError where no one model is meant, and for a router of ours, which could be this one."""
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{address.base}/models is no list of models: {error}") from error
    if any(model.owned_by == "radixfleet" for model in models):
        raise ValueError(f"{address.host} is a Radixfleet router: name its workers instead")
    if address.model:
        models = [model for model in models if model.id == address.model]
        if not models:
            raise ValueError(f"{address.host} does not serve {address.model!r}")
    else:
        models = [model for model in models if model.parent is None]
    if len(models) != 1:
        names = ", ".join(model.id for model in models[:10]) or "none"
        raise ValueError(f"{address.host} serves several models ({names}): give {address.base}#MODEL for each you want")
    return models[0]
