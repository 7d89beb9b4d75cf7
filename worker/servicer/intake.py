"""From a GenerateRequest to what the engine computes: tokens, limits, every default filled in. Refuses what cannot be.

Tokenizing and whatever else takes time in proportion to the request happens on a few threads, never on the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from radixfleet import blocks, convert
from radixfleet.errors import InvalidRequest
from radixfleet.guard import client_salt
from radixfleet.output_text.output import OutputText
from radixfleet.output_text.texts import texts_of
from radixfleet.sampling import check_continuable, sampling_params
from radixfleet.text import Tokenizer
from radixfleet.types import HashArray, SamplingParams, TokenArray
from radixfleet.v1 import inference_pb2
from worker.core.logits import LogitEdits
from worker.core.messages import Child, Ready, Submit
from worker.sampling.counter_random import child_seeds
from worker.scheduling.limits import Limits
from worker.servicer.continuation import Ending, replay
from worker.servicer.grammars import Grammars

Result = TypeVar("Result")

_CHEAP_PROMPT_BYTES = 64 * 1024
_CHEAP_STOP_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be started, once: its `texts` go with it."""

    tokens: TokenArray
    """The prompt."""
    generated: TokenArray
    """The beginning of the answer, which the client has already; mostly empty."""
    sampling: SamplingParams
    texts: Sequence[OutputText]
    """Of each of the n completions, brought to where `generated` ends."""
    ending: Ending | None
    """The answer is over where `generated` ends, and why."""
    stop_token_ids: tuple[int, ...]
    """All that end the generation: the model's end-of-sequence tokens, unless ignored, and the request's own."""
    max_new_tokens: int
    """`generated` among them."""
    namespace: tuple[str, ...]
    priority: int

    def submit(self, uids: Sequence[int]) -> Submit:
        """The engine's form of it. `uids`: one for each of the n completions."""
        sampling = self.sampling
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        seeds = child_seeds(seed, sampling.n)
        return Submit(
            uid=uids[0],
            token_ids=np.concatenate([self.tokens, self.generated]).view(np.int32),
            namespace=self.namespace,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            max_new_tokens=self.max_new_tokens - len(self.generated),
            min_new_tokens=max(0, sampling.min_new_tokens - len(self.generated)),
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            edits=self._edits(),
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            children=tuple(Child(*child) for child in zip(uids[1:], seeds[1:], strict=True)),
        )

    def block_hashes(self) -> HashArray:
        """Of the prompt's whole routing blocks."""
        return blocks.chain_hashes(blocks.seed_hash(self.namespace), self.tokens)

    def _edits(self) -> LogitEdits | None:
        sampling = self.sampling
        edits = LogitEdits(
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            bias=sampling.logit_bias,
            grammar=sampling.grammar,
        )
        return None if edits == LogitEdits() else edits


class Intake:
    """Prepares requests for one model."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        threads: Executor,
        grammars: Grammars,
        *,
        default_max_new_tokens: int,
        isolate_clients: bool = False,
    ) -> None:
        """`isolate_clients`: see `client_salt`."""
        self._grammars = grammars
        self._model = model
        self._tokenizer = tokenizer
        self._threads = threads
        self._default_max_new_tokens = default_max_new_tokens
        self._isolate_clients = isolate_clients

    async def prepare(self, request: inference_pb2.GenerateRequest, ready: Ready) -> Prepared:
        """Validate against what the engine can hold. Raises InvalidRequest; with a grammar, also Unavailable."""
        if self._isolate_clients:
            request.cache_salt = client_salt(request.cache_salt)
        if _is_cheap(request):
            prepared = self._prepare(request, ready)
        else:
            prepared = await self._on_thread(lambda: self._prepare(request, ready))
        if prepared.sampling.grammar is not None:
            await self._grammars.admit(prepared.sampling.grammar)
        return prepared

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        """The tokens of a prompt, at least one. Raises InvalidRequest."""
        return await self._on_thread(
            lambda: inference_pb2.TokenizeResponse(token_ids=self._tokens(request.prompt).tolist())
        )

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> inference_pb2.DetokenizeResponse:
        """The text of token ids, of which there may be none. Raises InvalidRequest."""
        return await self._on_thread(lambda: inference_pb2.DetokenizeResponse(text=self._text(request)))

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _prepare(self, request: inference_pb2.GenerateRequest, ready: Ready) -> Prepared:
        sampling = sampling_params(request.sampling, vocab_size=self._tokenizer.vocab_size)
        tokens = self._tokens(request.prompt)
        max_new_tokens = self._max_new_tokens(sampling, len(tokens), Limits.from_ready(ready))
        generated = self._generated(request, sampling, max_new_tokens)
        end_of_sequence = () if sampling.ignore_eos else self._tokenizer.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*end_of_sequence, *sampling.stop_token_ids)))
        texts = texts_of(self._tokenizer, sampling, frozenset(stop_token_ids), tokens)
        least = sampling.min_new_tokens
        return Prepared(
            tokens=tokens,
            generated=generated,
            sampling=sampling,
            texts=texts,
            ending=replay(generated.tolist(), texts[0], stop_token_ids, min_new_tokens=least, most=max_new_tokens),
            stop_token_ids=stop_token_ids,
            max_new_tokens=max_new_tokens,
            namespace=blocks.namespace(self._model, request.cache_salt),
            priority=request.priority,
        )

    def _tokens(self, prompt: inference_pb2.Prompt) -> TokenArray:
        tokens = self._tokenizer.encode_prompt(convert.prompt_form(prompt))
        convert.check_tokens(tokens, vocab_size=self._tokenizer.vocab_size)
        return tokens

    def _generated(
        self, request: inference_pb2.GenerateRequest, sampling: SamplingParams, max_new_tokens: int
    ) -> TokenArray:
        generated = convert.unpack_tokens(request.generated, "generated")
        if len(generated):
            check_continuable(sampling, "generated")
            convert.check_tokens(generated, vocab_size=self._tokenizer.vocab_size, field="generated")
            if len(generated) > max_new_tokens:
                raise InvalidRequest(
                    f"generated has {len(generated)} tokens, but the answer has at most {max_new_tokens}",
                    field="generated",
                )
        return generated

    def _text(self, request: inference_pb2.DetokenizeRequest) -> str:
        ids = np.array(request.token_ids, dtype=np.uint32)
        if len(ids):
            convert.check_tokens(ids, vocab_size=self._tokenizer.vocab_size, field="token_ids")
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return self._tokenizer.decode(ids, skip_special_tokens=skip)

    def _max_new_tokens(self, sampling: SamplingParams, num_prompt: int, limits: Limits) -> int:
        """What the client asked for, or the default as far as the context allows, which is no larger than the pool."""
        wanted = sampling.max_new_tokens
        if wanted is None:
            room = limits.max_context_tokens - num_prompt
            wanted = max(1, sampling.min_new_tokens, min(self._default_max_new_tokens, room))
        refusal = limits.refusal(num_prompt, wanted)
        if refusal is not None:
            raise InvalidRequest(
                refusal,
                field="prompt" if limits.refusal(num_prompt, 1) is not None else "sampling.max_new_tokens",
                prompt_tokens=str(num_prompt),
                max_new_tokens=str(wanted),
                max_context_tokens=str(limits.max_context_tokens),
                kv_tokens=str(limits.kv_tokens),
            )
        return wanted


def _is_cheap(request: inference_pb2.GenerateRequest) -> bool:
    """Token ids, so few of anything that a thread would cost more than it saves."""
    return (
        request.prompt.WhichOneof("form") == "token_ids"
        and not request.HasField("generated")
        and request.prompt.ByteSize() <= _CHEAP_PROMPT_BYTES
        and sum(map(len, request.sampling.stop)) <= _CHEAP_STOP_CHARACTERS
    )
