"""From a client's message to tokens and block hashes: validated on the event loop, tokenized and hashed off it.

Tokenizing 32k tokens takes 50 ms and a million tokens seconds, in which the event loop serves every other stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import lru_cache, partial
from time import perf_counter
from typing import NamedTuple, TypeVar

from radixfleet import convert
from radixfleet.errors import InvalidRequest, Unavailable, unknown_model
from radixfleet.guard import client_salt
from radixfleet.sampling import check_continuable, sampling_params
from radixfleet.text import Tokenizer
from radixfleet.types import ModelInfo, SamplingParams, TokenArray
from radixfleet.v1 import inference_pb2
from router.api.preparing import ServedModel, prepare, prepare_text, text_of, tokens_of
from router.dispatch.chooser import RETRY_AFTER_S
from router.dispatch.request import NO_TOKENIZER, PreparedRequest
from router.metrics import RouterMetrics
from router.workers.gathering import Gathering
from router.workers.registry import WorkerRegistry
from router.workers.state import UNKNOWN_CONTEXT, WorkerState
from router.workers.tokenizers import TokenizerStore

_SMALL_PACKED_BYTES = 129 * 1024
"""33,000 packed token ids are read and hashed within 150 us. A thread would cost 60 more, and the wait for it."""
_SMALL_PLAIN_BYTES = 8 * 1024
"""The same of token ids in the plain form, which are read one by one."""
_SMALL_SAMPLING_BYTES = 128
"""Sampling parameters of this size are mostly those of other requests too."""

_NAMED = 5
"""Workers that an error lists."""

T = TypeVar("T")


class Preparation(NamedTuple):
    """A request that is valid, but for its prompt."""

    work: Callable[[], PreparedRequest]
    """Tokenizes and hashes the prompt; on any thread. Raises InvalidRequest."""
    is_quick: bool
    """`work` takes no longer than waking a thread would, so it is done on the event loop."""
    is_ids: bool
    """The request has the very token ids that a worker is to be sent."""


class Prompts:
    """Resolves models and prepares prompts."""

    def __init__(
        self,
        registry: WorkerRegistry,
        tokenizers: TokenizerStore,
        executor: Executor,
        metrics: RouterMetrics,
        *,
        max_tokens: int | None = None,
        isolate_clients: bool = False,
        gathering: Gathering | None = None,
    ) -> None:
        """`max_tokens` of a prompt; None: what the model's context takes. `isolate_clients`: see `client_salt`.

        `gathering`: lets requests wait while the router has just started; None: none waits.
        """
        self._registry = registry
        self._tokenizers = tokenizers
        self._executor = executor
        self._metrics = metrics
        self._max_tokens = max_tokens
        self._isolate_clients = isolate_clients
        self._gathering = gathering
        self._served: dict[str, ServedModel] = {}
        """As last asked for, by name."""

    def models(self) -> tuple[ModelInfo, ...]:
        """Every model that the fleet serves now, by name."""
        return tuple(self._informed(name) for name in self._registry.models)

    def model(self, name: str) -> ServedModel:
        """The model called `name`, or the only one when `name` is empty.

        Raises UnknownModel, or Unavailable while no worker has told its model.
        """
        models = self._registry.models
        if not models:
            raise Unavailable(_nobody_known(self._registry.workers), retry_after_s=RETRY_AFTER_S)
        if not name and len(models) > 1:
            raise InvalidRequest(f"model must be one of {', '.join(models)}", field="model")
        name = name or models[0]
        if name not in models:
            raise unknown_model(name, models)
        info = self._informed(name)
        served = self._served.get(name)
        if served is not None and served.info == info and served.tokenizer is self._tokenizer(name, info):
            return served
        self._served[name] = served = self._serving(name, info)
        return served

    def _tokenizer(self, name: str, info: ModelInfo) -> Tokenizer | None:
        """The model's tokenizer, if the store has it now."""
        if not info.tokenizer_fingerprint:
            return None
        return self._tokenizers.get(info.tokenizer_fingerprint) or self._tokenizers.named(name)

    def _serving(self, name: str, info: ModelInfo) -> ServedModel:
        """The model as it is served now. Raises Unavailable while its tokenizer is on its way."""
        tokenizer = self._tokenizer(name, info)
        if tokenizer is None and info.tokenizer_fingerprint:
            raise Unavailable(f"the tokenizer of {name} is not here yet", retry_after_s=RETRY_AFTER_S)
        return ServedModel(info, tokenizer)

    def _informed(self, name: str) -> ModelInfo:
        group = self._registry.group(name)
        if group.common_model is not None:
            return group.common_model
        # Those that told their tokenizer know most. Else workers that are in use decide; among those, the longest
        # context.
        best = max(
            group.workers,
            key=lambda worker: (not worker.is_text_engine, not worker.ineligible_reason, worker.max_context_tokens),
        )
        assert best.facts is not None, "a worker that serves a model has told its facts"
        info, named = best.facts.model, self._tokenizers.named(name)
        return info if named is None or not best.is_text_engine else _with_tokenizer(info, named)

    def awaits(self, model: str) -> bool:
        """Whether the model has no worker yet and the router has just started; `until_served` then comes first."""
        return self._gathering is not None and self._gathering.awaits(model)

    async def until_served(self, model: str) -> None:
        """Wait, while the router has just started, for the workers that it is about to know. Mostly returns at once."""
        if self._gathering is not None:
            await self._gathering.until_served(model)

    async def all_lack(self, model: str, need: str) -> bool:
        """Whether no worker of the model can do this, one of `needs.WORDS`. Raises as `model` does."""
        await self.until_served(model)
        return all(need in worker.lacks for worker in self._registry.group(self.model(model).info.model).workers)

    async def prepare(self, request: inference_pb2.GenerateRequest) -> PreparedRequest:
        """A request that can be sent to a worker. Raises InvalidRequest, UnknownModel or Unavailable."""
        await self.until_served(request.model)
        return await self.finish(self.begin(request))

    def begin(self, request: inference_pb2.GenerateRequest, *, look_aside: bool = False) -> Preparation:
        """Do the part of `prepare` that takes no time. Raises as it does. Call it once for a request, which it salts.

        `look_aside`: the client sends it to a worker itself.
        """
        if self._isolate_clients:
            request.cache_salt = client_salt(request.cache_salt)
        convert.check_names(request)
        model = self.model(request.model)
        sampling = _checked_sampling(request.sampling, model.info.vocab_size or None)
        prompt, is_continued = request.prompt, request.HasField("generated")
        if request.resume or is_continued:
            _check_resume(request, sampling)
        is_ids = prompt.WhichOneof("form") == "token_ids"
        work = prepare_text if model.tokenizer is None and not is_ids else prepare
        is_quick = is_ids and _is_small(prompt.token_ids) and not (is_continued and not _is_small(request.generated))
        return Preparation(
            partial(work, request, model, self._most_tokens(model, look_aside=look_aside), look_aside=look_aside),
            is_quick=is_quick,
            is_ids=is_ids and not is_continued,
        )

    def _most_tokens(self, model: ServedModel, *, look_aside: bool) -> int | None:
        """The most tokens that a prompt may have; None: any number.

        A prompt that is too long for every worker is refused by the one that gets it. Look-aside would first book it
        there, so it is refused here.
        """
        longest = self._registry.group(model.info.model).longest_native_context if look_aside else 0
        if not longest:
            return self._max_tokens
        return longest - 1 if self._max_tokens is None else min(self._max_tokens, longest - 1)

    async def finish(self, preparation: Preparation) -> PreparedRequest:
        """Do what `begin` has left to do, on a thread where that pays. Raises InvalidRequest."""
        return preparation.work() if preparation.is_quick else await self._timed(preparation.work)

    def room(self, request: PreparedRequest) -> int:
        """Tokens that the answer may have on every worker that may get the request.

        Less than 1 when nothing fits, or when that is not known.
        """
        room = self._registry.group(request.model).room(request.prompt_tokens, request.fingerprint)
        is_known = request.fingerprint != NO_TOKENIZER and room < UNKNOWN_CONTEXT - request.prompt_tokens
        return room if is_known else 0

    async def tokenize(self, model_name: str, prompt: inference_pb2.Prompt) -> TokenArray:
        """The ids of a prompt of any form."""
        await self.until_served(model_name)
        model = self.model(model_name)
        return await self._timed(lambda: tokens_of(prompt, model, self._max_tokens))

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> str:
        """The text of token ids."""
        await self.until_served(request.model)
        model = self.model(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return await self._off_loop(lambda: text_of(request, model, skip_special_tokens=skip))

    async def _timed(self, work: Callable[[], T]) -> T:
        began_s = perf_counter()
        try:
            return await self._off_loop(work)
        finally:
            self._metrics.tokenize_s.observe(perf_counter() - began_s)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _nobody_known(workers: Sequence[WorkerState]) -> str:
    """Why there is no model at all."""
    if not workers:
        return "no worker has registered at this router, and none is among its settings (--workers)"
    told = ", ".join(f"{worker.address} ({worker.ineligible_reason})" for worker in workers[:_NAMED])
    return f"no worker of this router has told its model yet: {told}{', ...' if len(workers) > _NAMED else ''}"


@lru_cache(maxsize=64)
def _with_tokenizer(info: ModelInfo, tokenizer: Tokenizer) -> ModelInfo:
    """Of an engine that tells nothing of it. Remembered: the fingerprint is a hash of all the vocabulary."""
    return replace(
        info,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        has_chat_template=tokenizer.spec.chat_template is not None,
        tokenizer_fingerprint=tokenizer.spec.fingerprint(),
    )


def _is_small(tokens: inference_pb2.TokenIds) -> bool:
    num_bytes = tokens.ByteSize()
    return num_bytes <= _SMALL_PLAIN_BYTES or (num_bytes <= _SMALL_PACKED_BYTES and not tokens.ids)


def _checked_sampling(message: inference_pb2.SamplingParams, vocab_size: int | None) -> SamplingParams:
    """`sampling_params`, remembered: most requests have the parameters of others, and reading them costs 20 us."""
    data = message.SerializeToString()
    if len(data) > _SMALL_SAMPLING_BYTES:
        return sampling_params(message, vocab_size=vocab_size)
    return _remembered_sampling(data, vocab_size)


@lru_cache(maxsize=1024)
def _remembered_sampling(message: bytes, vocab_size: int | None) -> SamplingParams:
    return sampling_params(inference_pb2.SamplingParams.FromString(message), vocab_size=vocab_size)


def _check_resume(request: inference_pb2.GenerateRequest, sampling: SamplingParams) -> None:
    if request.resume:
        if not sampling.is_greedy and sampling.seed is None:
            message = "resume needs sampling.temperature 0, sampling.top_k 1, or sampling.seed"
            raise InvalidRequest(message, field="resume")
        check_continuable(sampling, "resume")
    if request.HasField("generated"):
        check_continuable(sampling, "generated")
