"""SGLang's requests in our words, and our answers in SGLang's.

A prompt is token ids only, and so is the answer: text is the gateway's affair. Counts are cumulative. Each of n
completions has its index and one `complete`, which holds all of its tokens; when streaming, chunks come before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang_pb2

from radixfleet import convert
from radixfleet.errors import InvalidRequest
from radixfleet.sampling import MAX_GRAMMAR_BYTES
from radixfleet.v1 import inference_pb2

_REFUSED = (
    "mm_inputs",
    "return_hidden_states",
    "token_ids_logprob",
    "disaggregated_params",
    "custom_logit_processor",
    "input_embeds",
    "lora_id",
)
"""What a worker of ours cannot do, and must not seem to do."""


def generate_request(request: Any) -> inference_pb2.GenerateRequest:
    """Ours. Raises InvalidRequest, with the field as SGLang names it, for what there is no word for."""
    for name, value in ((descriptor.name, value) for descriptor, value in request.ListFields()):
        if name in _REFUSED and value:
            raise InvalidRequest(f"{name} is not supported by this worker", field=name)
    tokens = np.array(request.tokenized.input_ids, dtype=np.uint32)
    if not len(tokens):
        raise InvalidRequest("tokenized.input_ids is empty", field="tokenized.input_ids")
    prompt = inference_pb2.Prompt(token_ids=convert.pack_tokens(tokens))
    return inference_pb2.GenerateRequest(request_id=request.request_id, prompt=prompt, sampling=_sampling(request))


def _sampling(request: Any) -> inference_pb2.SamplingParams:
    theirs = request.sampling_params
    ours = inference_pb2.SamplingParams(
        temperature=theirs.temperature,
        # 0 means unset where it can mean nothing else: proto3 has no other word for it here.
        top_p=theirs.top_p or 1.0,
        top_k=theirs.top_k,
        min_p=theirs.min_p,
        frequency_penalty=theirs.frequency_penalty,
        presence_penalty=theirs.presence_penalty,
        repetition_penalty=theirs.repetition_penalty or 1.0,
        min_new_tokens=theirs.min_new_tokens,
        stop=theirs.stop,
        stop_token_ids=theirs.stop_token_ids,
        ignore_eos=theirs.ignore_eos,
        n=theirs.n or 1,
        logit_bias={_token_id(token): bias for token, bias in theirs.logit_bias.items()},
        grammar=_grammar(theirs),
    )
    if theirs.HasField("max_new_tokens"):
        ours.max_new_tokens = theirs.max_new_tokens
    if request.return_logprob:
        ours.logprobs = max(0, request.top_logprobs_num)
        if 0 <= request.logprob_start_len < len(request.tokenized.input_ids):
            ours.prompt_logprobs = max(0, request.top_logprobs_num)
    return ours


def _token_id(token: str) -> int:
    if not token.isdecimal() or int(token) >= 1 << 32:
        raise InvalidRequest(f"logit_bias names tokens by their ids, got {token!r}", field="sampling_params.logit_bias")
    return int(token)


def _grammar(theirs: Any) -> inference_pb2.Grammar | None:
    kind = theirs.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "regex":
        return inference_pb2.Grammar(regex=theirs.regex)
    if kind == "json_schema":
        return inference_pb2.Grammar(json_schema=theirs.json_schema)
    if kind == "ebnf_grammar":
        return inference_pb2.Grammar(lark=_lark(theirs.ebnf_grammar))
    raise InvalidRequest(f"{kind} is not supported by this worker", field=f"sampling_params.{kind}")


def _lark(ebnf: str) -> str:
    if len(ebnf.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"ebnf_grammar has more than {MAX_GRAMMAR_BYTES} bytes", field="sampling_params.ebnf_grammar"
        )
    try:
        return str(any_to_lark(ebnf))
    except Exception as error:  # whatever a parser in Python trips over: the grammar is the client's
        raise InvalidRequest(f"ebnf_grammar cannot be read: {error}", field="sampling_params.ebnf_grammar") from error


@dataclass(slots=True)
class _Choice:
    """One of the n completions so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)


class AnswerWriter:
    """Turns the messages of one answer of ours into SGLang's."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._prompt_tokens = len(request.tokenized.input_ids)
        self._cached_tokens = 0
        self._prompt_logprobs: list[inference_pb2.TokenLogprobs] = []
        self._choices: dict[int, _Choice] = {}

    def take(self, response: inference_pb2.GenerateResponse) -> Iterator[Any]:
        """The messages, none or some, that a message of ours becomes."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self._cached_tokens = min(response.started.cached_tokens, self._prompt_tokens)
        elif kind == "prompt_logprobs":
            self._prompt_logprobs += response.prompt_logprobs.tokens
        elif kind == "delta":
            is_first = not self._choices
            choice = self._choices.setdefault(response.index, _Choice())
            choice.token_ids += response.delta.token_ids
            choice.logprobs += response.delta.logprobs
            if self._request.stream:
                yield self._chunk(response, choice, is_first=is_first)
        elif kind == "finished":
            yield self._complete(response)

    def _chunk(self, response: inference_pb2.GenerateResponse, choice: _Choice, *, is_first: bool) -> Any:
        delta = response.delta
        chunk = sglang_pb2.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(choice.token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=_output_logprobs(delta.token_ids, delta.logprobs),
            input_logprobs=self._input_logprobs() if is_first else None,
            index=response.index,
        )
        return sglang_pb2.GenerateResponse(request_id=self._request.request_id, chunk=chunk)

    def _complete(self, response: inference_pb2.GenerateResponse) -> Any:
        finished, choice = response.finished, self._choices.get(response.index) or _Choice()
        complete = sglang_pb2.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=convert.finish_reason(finished.reason).value,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(choice.token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=_output_logprobs(choice.token_ids, choice.logprobs),
            input_logprobs=self._input_logprobs(),
            index=response.index,
        )
        matched = finished.WhichOneof("matched")
        if matched == "matched_stop":
            complete.matched_stop_str = finished.matched_stop
        elif matched == "matched_token_id":
            complete.matched_token_id = finished.matched_token_id
        return sglang_pb2.GenerateResponse(request_id=self._request.request_id, complete=complete)

    def _input_logprobs(self) -> Any:
        """Of the prompt from `logprob_start_len` on; nothing tells the probability of its first token."""
        if not self._prompt_logprobs:
            return None
        start = self._request.logprob_start_len
        told = self._prompt_logprobs[max(start - 1, 0) :]
        values = [sglang_pb2.InputTokenLogProb(value=each.logprob) for each in told]
        tops = [_top(each) for each in told]
        if not start:
            values.insert(0, sglang_pb2.InputTokenLogProb())
            tops.insert(0, sglang_pb2.TopLogProbs())
        return sglang_pb2.InputLogProbs(
            token_logprobs=values, token_ids=self._request.tokenized.input_ids[start:], top_logprobs=tops
        )


def _output_logprobs(token_ids: Iterable[int], logprobs: Iterable[inference_pb2.TokenLogprobs]) -> Any:
    told = list(logprobs)
    if not told:
        return None
    return sglang_pb2.OutputLogProbs(
        token_logprobs=[each.logprob for each in told], token_ids=token_ids, top_logprobs=map(_top, told)
    )


def _top(told: inference_pb2.TokenLogprobs) -> Any:
    return sglang_pb2.TopLogProbs(values=told.top_logprobs, token_ids=told.top_token_ids)
