"""What the gRPC dialects of SGLang and vLLM have in common, and where they differ: words for requests and answers.

                      SGLang                              vLLM
prompt                token ids                           token ids (or text)
tokens of a chunk     new ones                            new ones
counts of a chunk     since the beginning                 of the chunk
the complete message  all tokens                          the last chunk's tokens once more
abort                 one id                              several ids
seed                  no word for it                      signed 32-bit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
from smg_grpc_proto.generated import (
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from radixfleet.errors import InvalidRequest
from radixfleet.types import Grammar, GrammarKind, SamplingParams
from router.dialects.speaker import Faulty


@dataclass(frozen=True, slots=True)
class Part:
    """One message of an engine's answer."""

    index: int
    token_ids: Sequence[int]
    """New ones; in the last message of an answer those that no chunk had."""
    cached_tokens: int
    logprobs: Any = None
    """OutputLogProbs, whose last entries are those of the new tokens."""
    prompt_logprobs: Any = None
    """InputLogProbs."""
    reason: str = ""
    """Why the completion ended; empty before it has."""
    matched_token_id: int | None = None


class Words(Protocol):
    """One dialect. Requests without fields have the same names in both: see `pb`."""

    dialect: str
    pb: Any
    lacks: frozenset[str]
    """What it has no word for, of `needs.WORDS`."""

    def stub(self, channel: grpc.aio.Channel) -> Any:
        """The gRPC stub of the engine's service."""
        ...

    def request(self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams) -> Any:
        """A streaming request. Raises InvalidRequest for what the dialect has no word for."""
        ...

    def part(self, response: Any, emitted: int) -> Part:
        """What a message says. `emitted`: tokens that came of its completion before; ask `index_of` which that is."""
        ...

    def abort(self, request_id: str) -> Any:
        """The message."""
        ...


def index_of(response: Any) -> int:
    """The completion that a message belongs to. Raises Faulty for one that is of no known kind."""
    kind = response.WhichOneof("response")
    if kind is None:
        raise Faulty("it sent what is neither a part of an answer nor its end")
    return int(getattr(response, kind).index)


def _logprob_fields(sampling: SamplingParams) -> tuple[bool, int]:
    tops = [count for count in (sampling.logprobs, sampling.prompt_logprobs) if count is not None]
    return bool(tops), max(tops, default=0)


class SglangWords:
    """`sglang.grpc.scheduler.SglangScheduler`."""

    dialect = "sglang"
    pb = sglang_scheduler_pb2
    lacks = frozenset({"cache_salt", "sampling.seed", "sampling.grammar.lark", "sampling.grammar.lark.json"})

    def stub(self, channel: grpc.aio.Channel) -> Any:
        """See `Words`, here and below."""
        return sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)

    def request(self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams) -> Any:
        """Seeds are refused: there is no word for them."""
        if sampling.seed is not None:
            raise InvalidRequest("the engine that was chosen cannot take a seed", field="sampling.seed")
        wants_logprobs, num_tops = _logprob_fields(sampling)
        theirs = self.pb.SamplingParams(
            **_same(sampling),
            top_k=sampling.top_k or -1,
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens,
            logit_bias={str(token): bias for token, bias in sampling.logit_bias},
        )
        _put_grammar(theirs, sampling.grammar, json_object=None, lark=None)
        return self.pb.GenerateRequest(
            request_id=request_id,
            tokenized=self.pb.TokenizedInput(input_ids=token_ids),
            sampling_params=theirs,
            return_logprob=wants_logprobs,
            top_logprobs_num=num_tops,
            logprob_start_len=0 if sampling.prompt_logprobs is not None else -1,
            stream=True,
        )

    def part(self, response: Any, emitted: int) -> Part:
        """`complete` holds all tokens; those that no chunk had are new."""
        if response.WhichOneof("response") == "chunk":
            chunk = response.chunk
            return _part(chunk, chunk.token_ids, emitted)
        complete = response.complete
        late = complete.output_ids[emitted:]
        return _part(complete, late, emitted, reason=complete.finish_reason)

    def abort(self, request_id: str) -> Any:
        """One at a time."""
        return self.pb.AbortRequest(request_id=request_id, reason="the client has gone")


class VllmWords:
    """`vllm.grpc.engine.VllmEngine`."""

    dialect = "vllm"
    pb = vllm_engine_pb2
    lacks = frozenset({"cache_salt", "sampling.grammar.lark.json"})

    def stub(self, channel: grpc.aio.Channel) -> Any:
        """See `Words`, here and below."""
        return vllm_engine_pb2_grpc.VllmEngineStub(channel)

    def request(self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams) -> Any:
        """Seeds keep their lowest 31 bits."""
        theirs = self.pb.SamplingParams(
            **_same(sampling),
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            logit_bias=dict(sampling.logit_bias),
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            seed=None if sampling.seed is None else sampling.seed & 0x7FFFFFFF,
        )
        _put_grammar(theirs, sampling.grammar, json_object="json_object", lark="grammar")
        return self.pb.GenerateRequest(
            request_id=request_id,
            tokenized=self.pb.TokenizedInput(input_ids=token_ids),
            sampling_params=theirs,
            stream=True,
        )

    def part(self, response: Any, emitted: int) -> Part:
        """`complete` repeats the tokens of the chunk before it; without a chunk, they are new."""
        if response.WhichOneof("response") == "chunk":
            chunk = response.chunk
            return _part(chunk, chunk.token_ids, emitted)
        complete = response.complete
        tokens = () if emitted else complete.output_ids
        return _part(complete, tokens, emitted, reason=complete.finish_reason)

    def abort(self, request_id: str) -> Any:
        """A list of one."""
        return self.pb.AbortRequest(request_ids=[request_id])


def _same(sampling: SamplingParams) -> dict[str, Any]:
    """Fields that both dialects name alike. Stop strings are missing: text is the router's affair, and so are they."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sampling.stop_token_ids,
        "skip_special_tokens": sampling.skip_special_tokens,
        "ignore_eos": sampling.ignore_eos,
        "n": sampling.n,
    }


def _put_grammar(theirs: Any, grammar: Grammar | None, *, json_object: str | None, lark: str | None) -> None:
    """`json_object`, `lark`: the fields for them; without one, an object is a schema, and Lark is refused."""
    if grammar is None:
        return
    if grammar.kind is GrammarKind.REGEX:
        theirs.regex = grammar.source
    elif grammar.kind is GrammarKind.JSON_SCHEMA:
        theirs.json_schema = grammar.source
    elif grammar.kind is GrammarKind.JSON_OBJECT:
        if json_object is not None:
            setattr(theirs, json_object, True)
        else:
            theirs.json_schema = '{"type": "object"}'
    elif lark is not None:
        setattr(theirs, lark, grammar.source)
    else:
        raise InvalidRequest("the engine that was chosen cannot take a Lark grammar", field="sampling.grammar.lark")


def _part(message: Any, token_ids: Sequence[int], emitted: int, *, reason: str = "") -> Part:
    """From a chunk or a complete message."""
    is_matched = bool(reason) and message.WhichOneof("matched_stop") == "matched_token_id"
    return Part(
        index=message.index,
        token_ids=token_ids,
        cached_tokens=message.cached_tokens,
        logprobs=message.output_logprobs if token_ids and message.HasField("output_logprobs") else None,
        prompt_logprobs=message.input_logprobs if not emitted and message.HasField("input_logprobs") else None,
        reason=reason,
        matched_token_id=message.matched_token_id if is_matched else None,
    )
