"""From a valid request to what a worker is sent: tokens, hashes, the message. Pure work, for any thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from radixfleet import convert
from radixfleet.blocks import chain_hashes, namespace, seed_hash
from radixfleet.errors import InvalidRequest
from radixfleet.text import Tokenizer
from radixfleet.types import BlockHash, HashArray, ModelInfo, PromptForm, TokenArray
from radixfleet.v1 import inference_pb2
from router.api.known_chains import KnownChains
from router.api.plain_text import stand_ins
from router.api.prompt_length import check_text, check_tokens
from router.dispatch.request import NO_TOKENIZER, PreparedRequest


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, as the fleet serves it now."""

    info: ModelInfo
    tokenizer: Tokenizer | None
    """None: only engines that do not tell theirs serve it, so prompts go there as text."""
    chains: KnownChains = field(default_factory=KnownChains, compare=False)
    """Of its prompts."""

    @property
    def known_tokenizer(self) -> Tokenizer:
        """The tokenizer, for what cannot be done without one. Raises InvalidRequest where it is not known."""
        if self.tokenizer is None:
            raise InvalidRequest(
                f"the tokenizer of {self.info.model} is not known here: its engines speak OpenAI's HTTP, which does "
                f"not tell it. The router can be given it by --tokenizers {self.info.model}=DIRECTORY",
                field="model",
            )
        return self.tokenizer


def tokens_of(prompt: inference_pb2.Prompt, model: ServedModel, max_tokens: int | None) -> TokenArray:
    """The ids of a prompt of any form. Raises InvalidRequest."""
    form: PromptForm = convert.prompt_form(prompt)
    if isinstance(form, np.ndarray):
        tokens = form
    else:
        tokenizer = model.known_tokenizer
        limit = max_tokens or model.info.max_context_tokens  # 0: of workers that are still loading
        if limit:
            check_text(form, tokenizer.longest_token, limit)
        tokens = tokenizer.encode_prompt(form)
    if max_tokens is not None:
        check_tokens(len(tokens), max_tokens)
    if model.tokenizer is not None:
        convert.check_tokens(tokens, vocab_size=model.info.vocab_size)
    return tokens


def prepare_text(
    request: inference_pb2.GenerateRequest, model: ServedModel, max_tokens: int | None, *, look_aside: bool
) -> PreparedRequest:
    """Prepare a request for engines that take text and chats alone. Raises InvalidRequest."""
    convert.prompt_form(request.prompt)
    if request.resume or request.HasField("generated"):
        model.known_tokenizer  # noqa: B018  says what is missing
    tokens = stand_ins(request.prompt)
    if not len(tokens):
        raise InvalidRequest("prompt is empty", field="prompt")
    if max_tokens is not None:
        check_tokens(len(tokens), max_tokens)
    seed = _seed(model.info.model, request.cache_salt)
    return PreparedRequest(
        request_id=request.request_id,
        model=model.info.model,
        tokens=tokens,
        seed=seed,
        block_hashes=chain_hashes(seed, tokens),
        fingerprint=NO_TOKENIZER,
        message=_message(request, model, request.prompt),
        look_aside=look_aside,
    )


def _message(
    request: inference_pb2.GenerateRequest, model: ServedModel, prompt: inference_pb2.Prompt
) -> inference_pb2.GenerateRequest:
    """What a worker is sent."""
    return inference_pb2.GenerateRequest(
        request_id=request.request_id,
        model=model.info.model,
        prompt=prompt,
        sampling=request.sampling,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def prepare(
    request: inference_pb2.GenerateRequest, model: ServedModel, max_tokens: int | None, *, look_aside: bool
) -> PreparedRequest:
    """Prepare a request for workers that take token ids. Raises InvalidRequest."""
    tokens = tokens_of(request.prompt, model, max_tokens)
    seed = _seed(model.info.model, request.cache_salt)
    # A prompt whose log probabilities are asked for is computed whole, so no worker is cheaper for what it has cached.
    is_cacheable = not request.sampling.HasField("prompt_logprobs")
    hashes: HashArray = model.chains.chain(seed, tokens) if is_cacheable else np.zeros(0, dtype=np.uint64)
    is_ids = request.prompt.WhichOneof("form") == "token_ids"
    prepared = PreparedRequest(
        request_id=request.request_id,
        model=model.info.model,
        tokens=tokens,
        seed=seed,
        block_hashes=hashes,
        fingerprint=None if is_ids else model.info.tokenizer_fingerprint,
        message=_sent_by_the_client(request) if look_aside else _message(request, model, _packed(request, tokens)),
        source=None if is_ids or look_aside else request.prompt,
        resumable=request.resume,
        look_aside=look_aside,
    )
    if not request.HasField("generated"):
        return prepared
    generated = convert.unpack_tokens(request.generated, "generated")
    if not len(generated):
        return prepared
    if model.info.vocab_size:
        convert.check_tokens(generated, vocab_size=model.info.vocab_size, field="generated")
    return prepared.continued(generated)


@lru_cache(maxsize=1024)
def _seed(model: str, cache_salt: str) -> BlockHash:
    return seed_hash(namespace(model, cache_salt))


def _packed(request: inference_pb2.GenerateRequest, tokens: TokenArray) -> inference_pb2.Prompt:
    """The prompt as packed token ids: the client's own message where it is that already."""
    prompt = request.prompt
    is_packed = prompt.WhichOneof("form") == "token_ids" and not prompt.token_ids.ids
    return prompt if is_packed else inference_pb2.Prompt(token_ids=convert.pack_tokens(tokens))


def _sent_by_the_client(request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    """What the router keeps of a message that it sends nowhere; read, never written."""
    limit = request.sampling.max_new_tokens
    if not (request.priority or limit):
        return _NOTHING
    return inference_pb2.GenerateRequest(
        priority=request.priority, sampling=inference_pb2.SamplingParams(max_new_tokens=limit or None)
    )


_NOTHING = inference_pb2.GenerateRequest()


def text_of(request: inference_pb2.DetokenizeRequest, model: ServedModel, *, skip_special_tokens: bool) -> str:
    """The text of token ids. Raises InvalidRequest."""
    tokenizer = model.known_tokenizer
    ids = list(request.token_ids)
    if ids and max(ids) >= model.info.vocab_size:
        raise InvalidRequest(
            f"token_ids holds {max(ids)}, but the model's end at {model.info.vocab_size - 1}", field="token_ids"
        )
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
