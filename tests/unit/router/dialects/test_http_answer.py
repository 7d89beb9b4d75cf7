from __future__ import annotations

import json
from typing import Any

import pytest

from radixfleet.clock import ManualClock
from radixfleet.errors import InvalidRequest, Overloaded, RadixfleetError, Unavailable
from radixfleet.v1 import inference_pb2
from router.dialects.answer import Names
from router.dialects.http_answer import HttpAnswer
from router.dialects.http_events import ChoicePiece, Event, read_event


def answer(max_new_tokens: int = 100) -> HttpAnswer:
    names = Names("request", "execution", "worker")
    return HttpAnswer(names, ManualClock(), prompt_tokens=None, max_new_tokens=max_new_tokens)


def text_of(*choices: dict[str, Any]) -> str:
    """Of an answer that comes in these pieces."""
    taken = answer()
    events = [read_event(json.dumps({"choices": [{"index": 0, **choice}]}).encode()) for choice in choices]
    return "".join(message.delta.text for event in events for message in taken.take(event))


def calls_of(text: str) -> list[dict[str, Any]]:
    """In the notation of models."""
    return [json.loads(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]


def call(arguments: str, name: str | None = None, **fields: Any) -> dict[str, Any]:
    return {**fields, "function": {"arguments": arguments} | ({"name": name} if name else {})}


BERN = {"name": "weather", "arguments": {"city": "Bern"}}
ROME = {"name": "weather", "arguments": {"city": "Rome"}}


@pytest.mark.parametrize(
    "pieces",
    [
        [
            [call("", "weather", index=0, id="a"), call("", "weather", index=1, id="b")],
            [call('{"city": "Be', index=0), call('{"city": "Ro', index=1)],
            [call('rn"}', index=0), call('me"}', index=1)],
        ],
        [
            [call('{"city": "Bern"}', "weather", index=0, id="a")],
            [call('{"city": "Rome"}', "weather", index=0, id="b")],
        ],
        [[call('{"city": "Bern"}', "weather", index=0, id="a"), call('{"city": "Rome"}', "weather", index=0, id="b")]],
        [
            [call("", "weather", index=0, id="a")],
            [call('{"city": "Bern"}', index=0, id="a")],
            [call("", "weather", index=0, id="b")],
            [call('{"city": "Rome"}', index=0)],
        ],
        [[call('{"city": "Bern"}', "weather", id="a")], [call('{"city": "Rome"}', "weather", id="b")]],
        [[call('{"city": "Bern"}', "weather", index=None), call('{"city": "Rome"}', "weather", index=None)]],
        [[call('{"city": "Bern"}', "weather", index=0)], [call('{"city": "Rome"}', "weather", index=0)]],
        [[call('{"city": ', "weather")], [call('"Bern"}')], [call('{"city": "Rome"}', "weather")]],
        [
            [call('{"city": ', "weather", index=0, id="a")],
            [call('"Bern"}', index=0, id="b")],
            [call('{"city": "Rome"}', "weather", index=1, id="c")],
        ],
    ],
    ids=[
        "interleaved",
        "one index",
        "one index, one event",
        "one index, in pieces",
        "ids",
        "null index",
        "one index, no ids",
        "nothing",
        "an id for each piece",
    ],
)
def test_calls_of_tools_are_kept_apart_however_they_are_numbered(pieces: list[list[dict[str, Any]]]) -> None:
    """Ollama gives every call the index 0, other servers none: two calls became one, with the arguments of both."""
    text = text_of(
        *({"delta": {"tool_calls": piece}} for piece in pieces), {"finish_reason": "tool_calls", "delta": {}}
    )
    assert calls_of(text) == [BERN, ROME]


def test_calls_of_a_whole_message_need_no_numbers() -> None:
    calls = [call('{"city": "Bern"}', "weather"), call('{"city": "Rome"}', "weather")]
    assert calls_of(text_of({"message": {"tool_calls": calls}, "finish_reason": "tool_calls"})) == [BERN, ROME]


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, InvalidRequest),
        ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, InvalidRequest),
        ({"error": {"message": "too long", "type": "invalid_request_error", "code": None}}, InvalidRequest),
        ({"error": {"message": "too long", "code": "422"}}, InvalidRequest),
        ({"error": {"message": "too long", "code": 429}}, Overloaded),
        ({"error": {"message": "too long", "code": 401}}, Unavailable),
        ({"error": {"message": "too long", "code": 500}}, Unavailable),
        ({"error": {"message": "too long", "code": 2**70}}, Unavailable),
        ({"error": "too long"}, Unavailable),
    ],
)
def test_who_is_at_fault_by_an_error_in_the_stream(told: dict[str, Any], kind: type[RadixfleetError]) -> None:
    """SGLang says 200, and in its first event that the prompt is too long: another was asked, then it was a 503."""
    with pytest.raises(kind, match="too long") as caught:
        list(answer().take(read_event(json.dumps(told).encode())))
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "piece",
    [
        {"text": "tok "},
        {"delta": {"content": "t"}},
        {"delta": {"reasoning_content": "hm "}},
        {"delta": {"tool_calls": [call("x" * 100, index=0, id="a")]}},
        {"text": ""},
        {"text": "t" * 100_000},
        {"message": {"content": "t" * 100_000}},
    ],
    ids=["text", "letters", "thoughts", "a call", "nothing", "much at once", "much in one piece"],
)
def test_an_engine_that_goes_far_past_the_limit_is_cut_off(piece: dict[str, Any]) -> None:
    """It went on for ever: what it said was passed on, or collected."""
    asked, text = answer(max_new_tokens=5), ""
    for _ in range(200):
        for message in asked.take(read_event(json.dumps({"choices": [piece]}).encode())):
            text += message.delta.text
        if asked.was_cut:
            break
    assert asked.is_complete
    last = asked.finish(tells_cached=False).finished
    assert last.reason == inference_pb2.FINISH_REASON_LENGTH
    assert last.usage.completion_tokens <= 5
    assert len(text) < 12_000
    assert bool(text) is (piece != {"text": ""} and "tool_calls" not in str(piece)), "a call without an end is none"


@pytest.mark.parametrize("chunks", [[5, 1], [4, 3], [9], [1] * 6])
def test_where_tokens_are_told_it_is_cut_off_at_the_limit(chunks: list[int]) -> None:
    asked = answer(max_new_tokens=5)
    events = [Event(choices=[ChoicePiece(text="a" * size, token_ids=[97] * size)]) for size in chunks]
    told = [token for event in events for message in asked.take(event) for token in message.delta.token_ids]
    assert told == [97] * 5
    last = asked.finish(tells_cached=False).finished
    assert (last.reason, last.usage.completion_tokens) == (inference_pb2.FINISH_REASON_LENGTH, 5)


def test_an_engine_that_keeps_to_the_limit_has_the_last_word() -> None:
    asked = answer(max_new_tokens=2)
    for piece in (ChoicePiece(text="ab", token_ids=[97, 98]), ChoicePiece(text="", finish_reason="stop")):
        list(asked.take(Event(choices=[piece])))
    assert asked.finish(tells_cached=False).finished.reason == inference_pb2.FINISH_REASON_STOP
    assert not asked.was_cut
