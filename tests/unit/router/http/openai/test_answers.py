"""From replies to the pieces of answers, and from the pieces to whole answers."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest

from radixfleet.errors import Unavailable
from radixfleet.v1 import inference_pb2
from router.http.openai.answers import ChatChoices, Choices, CompletionChoices, usage_of
from router.http.openai.whole import Whole, WholeChat, WholeCompletion
from tests.support.replies import delta, finished, model, prepared, started


def whole(choices: Choices, answer: Whole, *replies: inference_pb2.GenerateResponse) -> dict:
    for reply in replies:
        for part in choices.take(reply):
            answer.add(part)
    made = answer.answer("id", 1, "m", usage_of([choices.meter]))
    return msgspec.to_builtins(made)


def chat(*replies: inference_pb2.GenerateResponse, tool_names: Collection[str] = (), **sampling: int) -> dict:
    choices = ChatChoices(tool_names)
    choices.begin(prepared(**sampling), model())
    return whole(choices, WholeChat(), *replies)


def completion(
    *replies: inference_pb2.GenerateResponse, echo: bool = False, logprobs: int | None = None, **kind
) -> dict:
    choices = CompletionChoices(0, echo=echo, **kind)
    choices.begin(prepared(**({} if logprobs is None else {"logprobs": logprobs})), model())
    return whole(choices, WholeCompletion(), *replies)


def test_a_chat_is_put_together_with_the_workers_own_usage() -> None:
    answer = chat(started(), delta("he"), delta("y"), finished(text="!", usage=(2, 1, 3)))
    assert answer == {
        "id": "id",
        "created": 1,
        "model": "m",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hey!", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_the_pieces_of_a_chat_begin_with_the_role_and_end_with_the_reason() -> None:
    choices = ChatChoices()
    choices.begin(prepared(), model())
    parts = [part for reply in (started(), delta("a"), finished()) for part in choices.take(reply)]
    assert [msgspec.to_builtins(part.delta) for part in parts] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {},
    ]
    assert [part.finish_reason for part in parts] == [None, None, "stop"]


def test_the_usage_counts_up_while_the_answer_comes() -> None:
    choices = ChatChoices()
    choices.begin(prepared(), model())
    counted = []
    for reply in (started(), delta("ab"), delta("c"), finished(usage=(2, 1, 4))):
        choices.take(reply)
        counted.append(usage_of([choices.meter]).completion_tokens)
    assert counted == [0, 2, 3, 4]


def test_completions_of_one_prompt_come_mixed_and_are_kept_apart() -> None:
    """Behaviour 43."""
    answer = chat(started(), delta("a", 1), delta("b"), delta("c", 1), finished(index=1), finished(usage=(2, 0, 3)))
    assert [(choice["index"], choice["message"]["content"]) for choice in answer["choices"]] == [(0, "b"), (1, "ac")]


def test_an_answer_that_a_worker_broke_off_is_a_failure() -> None:
    for choices in (ChatChoices(), CompletionChoices(0, echo=False)):
        choices.begin(prepared(), model())
        with pytest.raises(Unavailable, match="not complete"):
            choices.take(finished(inference_pb2.FINISH_REASON_ABORT))


def test_calls_of_tools_are_no_text() -> None:
    text = 'Well.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    answer = chat(started(), *(delta(text[at : at + 7]) for at in range(0, len(text), 7)), finished(), tool_names="f")
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    call = choice["message"]["tool_calls"][0]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert call["type"] == "function"
    assert "index" not in call


def test_without_tools_marks_of_calls_are_text() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    choice = chat(started(), delta(text), finished())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_a_call_that_the_limit_cut_ended_by_length() -> None:
    for call in ('<tool_call>{"name": "f"}', '<tool_call>{"name": "f", "arguments": {"a": "'):
        end = finished(inference_pb2.FINISH_REASON_LENGTH)
        choice = chat(started(), delta(call), end, tool_names="f")["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_a_call_that_broke_off_is_told_and_is_no_reason_to_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "x"</tool_call>'
    choice = chat(started(), delta(text), finished(), tool_names="f")["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "x"'


def test_the_first_piece_of_a_call_has_its_name_and_the_others_none() -> None:
    choices = ChatChoices({"f"})
    choices.begin(prepared(), model())
    replies = (
        started(),
        *map(delta, ('<tool_call>{"name": "f", "arguments": {', '"a": 1', "}}</tool_call>")),
        finished(),
    )
    _, first, *more = (msgspec.to_builtins(part) for reply in replies for part in choices.take(reply))
    (call,) = first["delta"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"index": 0, "type": "function", "function": {"name": "f", "arguments": "{"}}
    assert [part["delta"] for part in more] == [
        {"tool_calls": [{"index": 0, "function": {"arguments": '"a": 1'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {},
    ]
    assert more[-1]["finish_reason"] == "tool_calls"


def test_log_probabilities_of_a_chat() -> None:
    answer = chat(started(), delta("ab", logprob=-0.25), finished(text="", usage=(2, 0, 2)), logprobs=2)
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    assert second["token"] == "b"


def test_log_probabilities_come_also_for_tokens_that_make_no_text_yet() -> None:
    half = inference_pb2.Delta(token_ids=[0xC3], text="", logprobs=[inference_pb2.TokenLogprobs(logprob=-1.0)])
    other = inference_pb2.Delta(token_ids=[0xA9], text="é", logprobs=[inference_pb2.TokenLogprobs(logprob=-2.0)])
    replies = [inference_pb2.GenerateResponse(delta=event) for event in (half, other)]
    choice = chat(started(), *replies, finished(), logprobs=0)["choices"][0]
    assert choice["message"]["content"] == "é"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-1.0, -2.0]


def test_log_probabilities_of_a_completion() -> None:
    choice = completion(started(), delta("ab", logprob=-0.25), delta("c", logprob=-1.0), finished(), logprobs=2)[
        "choices"
    ][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.25, -0.25, -1.0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}] * 2 + [{"a": -0.5, "b": -1.5, "c": -1.0}],
        "text_offset": [0, 1, 2],
    }


def test_an_echo_begins_with_the_prompt_and_its_probabilities() -> None:
    entry = inference_pb2.TokenLogprobs(logprob=-3.0, top_token_ids=[105], top_logprobs=[-3.0])
    told = inference_pb2.PromptLogprobs(start=1, tokens=[entry])
    replies = (started(), inference_pb2.GenerateResponse(prompt_logprobs=told), delta("a", logprob=-0.25), finished())
    choice = completion(*replies, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "hia"
    assert choice["logprobs"]["tokens"] == ["h", "i", "a"]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -0.25]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"i": -3.0}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2, 3]])
def test_the_probabilities_of_a_prompt_come_in_runs(cuts: list[int]) -> None:
    entries = [inference_pb2.TokenLogprobs(logprob=-float(number)) for number in range(1, 5)]
    runs = [entries[start:end] for start, end in zip([0, *cuts], [*cuts, 4], strict=True)]
    told = [
        inference_pb2.GenerateResponse(prompt_logprobs=inference_pb2.PromptLogprobs(start=1, tokens=run))
        for run in runs
    ]
    choices = CompletionChoices(0, echo=True)
    choices.begin(prepared(b"hello", logprobs=0), model())
    answer = whole(choices, WholeCompletion(), started(), *told, delta("a", logprob=-0.5), finished())
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("helloa")
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]


def test_an_echo_is_the_text_that_the_client_sent() -> None:
    assert completion(started(), delta("a"), finished(), echo=True, echo_text="HI")["choices"][0]["text"] == "HIa"


def test_only_the_prompt_where_no_token_is_wanted() -> None:
    limit = inference_pb2.FINISH_REASON_LENGTH
    answer = completion(started(), delta("a"), finished(limit, usage=(2, 0, 1)), echo=True, prompt_only=True)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert answer["usage"]["completion_tokens"] == 0


def test_a_tokens_text_is_what_it_adds_behind_another() -> None:
    from router.http.openai.logprobs import TokenTexts

    texts = TokenTexts(model().tokenizer)
    assert [texts[token_id] for token_id in (97, 32, 256)] == ["a", " ", "<|end|>"]
    assert texts[0xC3] == "\ufffd"
