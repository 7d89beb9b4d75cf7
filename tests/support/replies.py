"""What a worker replies, message by message, and the request and model that it belongs to."""

from __future__ import annotations

from functools import cache

import numpy as np

from radixfleet.convert import pack_tokens
from radixfleet.text import Tokenizer
from radixfleet.types import BlockHash, ModelInfo
from radixfleet.v1 import inference_pb2
from router.api.preparing import ServedModel
from router.dispatch.request import PreparedRequest
from tests.support.byte_tokenizer import byte_spec


@cache
def model() -> ServedModel:
    """Whose tokens are bytes."""
    info = ModelInfo("m", 100, 257, (256,), True, 0, "float32", 1)
    return ServedModel(info, Tokenizer(byte_spec()))


def prepared(prompt: bytes = b"hi", **sampling: int) -> PreparedRequest:
    """A request for `prompt`; `sampling`: its parameters."""
    tokens = np.frombuffer(prompt, dtype=np.uint8).astype(np.uint32)
    message = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(token_ids=pack_tokens(tokens)), sampling=inference_pb2.SamplingParams(**sampling)
    )
    return PreparedRequest("id", "m", tokens, BlockHash(0), np.zeros(0, np.uint64), None, message)


def started(prompt_tokens: int = 2, cached_tokens: int = 1) -> inference_pb2.GenerateResponse:
    """The first reply."""
    event = inference_pb2.Started(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    return inference_pb2.GenerateResponse(started=event)


def delta(text: str, index: int = 0, *, logprob: float | None = None) -> inference_pb2.GenerateResponse:
    """A piece of text; `logprob`: of each of its tokens, where they are told."""
    ids = list(text.encode())
    logprobs = []
    if logprob is not None:
        entry = inference_pb2.TokenLogprobs(logprob=logprob, top_token_ids=[97, 98], top_logprobs=[-0.5, -1.5])
        logprobs = [entry] * len(ids)
    event = inference_pb2.Delta(token_ids=ids, text=text, logprobs=logprobs)
    return inference_pb2.GenerateResponse(delta=event, index=index)


def finished(
    reason: int = inference_pb2.FINISH_REASON_STOP,
    index: int = 0,
    text: str = "",
    usage: tuple[int, int, int] | None = None,
) -> inference_pb2.GenerateResponse:
    """The last reply of a completion; `usage`: tokens of the prompt, cached ones, and of the answer."""
    event = inference_pb2.Finished(reason=reason, text=text)  # type: ignore[arg-type]
    if usage is not None:
        prompt, cached, completion = usage
        event.usage.MergeFrom(
            inference_pb2.Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
        )
    return inference_pb2.GenerateResponse(finished=event, index=index)
