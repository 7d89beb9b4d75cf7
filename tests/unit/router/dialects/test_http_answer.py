from __future__ import annotations

import json
from typing import Any

import pytest

from radixfleet.clock import ManualClock
from radixfleet.errors import InvalidRequest, Overloaded, RadixfleetError, Unavailable
from router.dialects.answer import Names
from router.dialects.http_answer import HttpAnswer
from router.dialects.http_events import read_event


def answer() -> HttpAnswer:
    return HttpAnswer(Names("request", "execution", "worker"), ManualClock(), prompt_tokens=None, max_new_tokens=100)


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
