"""Answers of engines that say what no engine should, and answers of which the client has all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from radixfleet.clock import ManualClock
from radixfleet.errors import InternalError
from radixfleet.text import Tokenizer
from radixfleet.types import SamplingParams
from radixfleet.v1 import inference_pb2
from router.dialects.answer import Answer, Names
from router.dialects.http_answer import HttpAnswer
from router.dialects.http_events import ChoicePiece, Event
from router.dialects.speaker import Unreachable
from router.dialects.words import Part, SglangWords, index_of
from tests.support.byte_tokenizer import byte_spec

NAMES = Names("r", "e", "w")
TOKENIZER = Tokenizer(byte_spec())
EOS = 256


def answer(generated: bytes | list[int] = b"", **sampling: Any) -> Answer:
    params = SamplingParams(**{"max_new_tokens": 5, **sampling})
    prompt = np.array([97, 98], dtype=np.uint32)
    return Answer(NAMES, prompt, np.array(list(generated), dtype=np.uint32), params, TOKENIZER, ManualClock())


def logprobs(*values: float) -> Any:
    return sglang.OutputLogProbs(token_logprobs=values)


@pytest.mark.parametrize("index", [1, 7])
def test_a_completion_that_nobody_asked_for_is_a_broken_engine(index: int) -> None:
    with pytest.raises(Unreachable, match=f"completion {index} of 1"):
        answer().emitted(index)


@pytest.mark.parametrize("message", [sglang.GenerateResponse(), vllm.GenerateResponse()])
def test_a_message_of_no_known_kind_is_a_broken_engine(message: Any) -> None:
    with pytest.raises(Unreachable):
        index_of(message)


@pytest.mark.parametrize("told", [None, logprobs(), logprobs(-1.0)])
def test_fewer_log_probabilities_than_tokens_end_the_answer_and_not_the_engine(told: Any) -> None:
    """Who asked for them could have any engine that leaves them out taken for lost."""
    with pytest.raises(InternalError, match="log probabilities of 2 tokens"):
        list(answer(logprobs=0).take(Part(0, [97, 98], 0, logprobs=told)))


@pytest.mark.parametrize("told", [None, {"token_logprobs": [-1.0]}, {"values": []}])
def test_nor_do_they_over_http(told: Any) -> None:
    asked = HttpAnswer(NAMES, ManualClock(), prompt_tokens=2, max_new_tokens=5, num_logprobs=0)
    with pytest.raises(InternalError, match="log probabilities"):
        list(asked.take(Event(choices=[ChoicePiece(text="ab", token_ids=[97, 98], logprobs=told)])))


def test_of_all_log_probabilities_the_last_are_those_of_tokens_that_no_chunk_had() -> None:
    words, asked = SglangWords(), answer(logprobs=0)
    chunk = sglang.GenerateStreamChunk(token_ids=[97], output_logprobs=logprobs(-1.0))
    complete = sglang.GenerateComplete(
        output_ids=[97, 98, 99], finish_reason="length", output_logprobs=logprobs(-1.0, -2.0, -3.0)
    )
    told = []
    for response in (sglang.GenerateResponse(chunk=chunk), sglang.GenerateResponse(complete=complete)):
        for message in asked.take(words.part(response, asked.emitted(index_of(response)))):
            told += [entry.logprob for entry in message.delta.logprobs]
    assert told == [-1.0, -2.0, -3.0]
    assert asked.is_complete


@pytest.mark.parametrize(
    ("generated", "sampling", "reason"),
    [
        (b"abcde", {}, inference_pb2.FINISH_REASON_LENGTH),
        (b"abcd", {}, None),
        (b"", {}, None),
        ([97, EOS], {}, inference_pb2.FINISH_REASON_STOP),
        ([97, EOS], {"ignore_eos": True}, None),
        ([97, EOS], {"min_new_tokens": 2}, None),
        (b"ab", {"stop_token_ids": (98,)}, inference_pb2.FINISH_REASON_STOP),
        (b"abc", {"stop": ("bc",)}, inference_pb2.FINISH_REASON_STOP),
        (b"abc", {"stop": ("cd",)}, None),
        ([97, EOS], {"stop": ("<|end|>",), "ignore_eos": True}, inference_pb2.FINISH_REASON_STOP),
    ],
)
def test_an_answer_that_the_client_has_whole_lacks_only_its_end(
    generated: bytes | list[int], sampling: dict[str, Any], reason: int | None
) -> None:
    """Its worker was lost after the last token: engines were asked for no token more, or for one too many."""
    asked = answer(generated, **sampling)
    assert (asked.ending is None) is (reason is None)
    if asked.ending is None:
        return
    started, finished = asked.take(asked.ending)
    assert started.started.counts_follow
    assert finished.finished.usage.cached_tokens_unknown, "0 would empty the sketch of a worker that has the prompt"
    assert finished.finished.reason == reason
    assert finished.finished.usage.completion_tokens == len(generated)
    assert asked.ended_by_engine, "there is nothing to abort"


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_string_that_is_a_special_token_ends_the_answer_though_it_is_not_shown(*, shown: bool) -> None:
    """Whatever was held back as another one's beginning is told, and engines need not know of it."""
    asked = answer(stop=("c<", "<|end|>", "no token"), ignore_eos=True, min_new_tokens=5, skip_special_tokens=not shown)
    delta, finished = list(asked.take(Part(0, [97, 99, EOS, 98], 0)))[-2:]
    assert (delta.delta.text, list(delta.delta.token_ids)) == (("a" if shown else "ac"), [97, 99, EOS])
    assert finished.finished.matched_stop == ("c<" if shown else "<|end|>")
    assert finished.finished.text == ""


@pytest.mark.parametrize(("generated", "limit", "is_whole"), [(0, 1, False), (4, 5, False), (5, 5, True)])
def test_so_it_is_over_http(generated: int, limit: int, is_whole: bool) -> None:
    asked = HttpAnswer(NAMES, ManualClock(), prompt_tokens=2, generated_tokens=generated, max_new_tokens=limit)
    assert asked.is_whole is asked.is_complete is is_whole
    if is_whole:
        last = asked.finish(tells_cached=False).finished
        assert (last.reason, last.usage.completion_tokens) == (inference_pb2.FINISH_REASON_LENGTH, generated)


@pytest.mark.parametrize("chunks", [[5, 1], [4, 3], [9], [1] * 6])
def test_an_engine_that_goes_past_the_limit_is_cut_off_there(chunks: list[int]) -> None:
    """Its tokens went on to the client for ever."""
    asked = answer(logprobs=0)
    messages = [
        message for size in chunks for message in asked.take(Part(0, [97] * size, 0, logprobs=logprobs(*range(size))))
    ]
    assert "".join(message.delta.text for message in messages) == "aaaaa"
    assert [entry.logprob for message in messages for entry in message.delta.logprobs][:4] == [
        float(place) for size in chunks for place in range(size)
    ][:4]
    assert messages[-1].finished.reason == inference_pb2.FINISH_REASON_LENGTH
    assert messages[-1].finished.usage.completion_tokens == 5
    assert asked.is_complete
    assert not asked.ended_by_engine, "it is to be told"
