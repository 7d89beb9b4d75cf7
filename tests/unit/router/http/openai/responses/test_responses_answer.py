"""Responses from a worker's replies, whole and streamed, held against the `openai` package's own types."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseStreamEvent
from pydantic import TypeAdapter

from radixfleet.errors import InvalidRequest, Overloaded, Unavailable
from radixfleet.v1 import inference_pb2
from router.http.body import parse
from router.http.errors import json_response
from router.http.openai.answers import usage_of
from router.http.openai.plan import Plan
from router.http.openai.responses.plan import response_plan
from router.http.openai.responses.request import ResponsesRequest
from router.http.openai.streamed import Event
from tests.support.replies import delta, finished, model, prepared, started

LENGTH = inference_pb2.FINISH_REASON_LENGTH
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def begun(*, logprobs: bool = False, **fields: Any) -> Plan:
    asked = {"input": "hi"} | fields | ({"include": ["message.output_text.logprobs"]} if logprobs else {})
    plan = response_plan(parse(json.dumps(asked).encode(), ResponsesRequest), "id")
    plan.choices[0].begin(prepared(**({"logprobs": 2} if logprobs else {})), model())
    return plan


def whole(*replies: inference_pb2.GenerateResponse, **fields: Any) -> Response:
    plan = begun(**fields)
    (choices,) = plan.choices
    for reply in replies:
        for part in choices.take(reply):
            plan.whole.add(part)
    answer = plan.whole.answer(plan.answer_id, 1, "m", usage_of([choices.meter]))
    return Response.model_validate_json(json_response(answer).body, strict=False)


def told(events: list[Event]) -> list[Any]:
    read = [EVENTS.validate_json(event.data) for event in events]
    assert [event.type for event in read] == [event.name for event in events]
    return read


def streamed(*replies: inference_pb2.GenerateResponse, **fields: Any) -> list[Any]:
    plan = begun(**fields)
    events = [
        event for reply in replies for part in plan.choices[0].take(reply) for event in plan.streamed.add(part, "m")
    ]
    return told([*events, *plan.streamed.end()])


def output(response: Response) -> list[tuple[str, ...]]:
    """In short."""
    short: list[tuple[str, ...]] = []
    for item in response.output:
        if isinstance(item, ResponseOutputMessage):
            (part,) = item.content
            assert part.type == "output_text"
            short.append(("text", part.text, str(item.status)))
        else:
            assert isinstance(item, ResponseFunctionToolCall)
            short.append((item.name, item.arguments, str(item.status)))
    return short


def test_a_response_tells_what_was_asked_for_and_what_came() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": "Any."}
    asked = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "tools": [*TOOLS, {"name": "g"}],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "text": {"format": form, "verbosity": "low"},
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "top_logprobs": 3,
        "top_p": 0.5,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "store": True,
    }
    response = whole(started(20, 16), delta("he"), finished(text="y", usage=(20, 16, 2)), **asked)
    assert (response.id, response.status, response.model) == ("resp_id", "completed", "m")
    assert output(response) == [("text", "hey", "completed")]
    assert response.output_text == "hey"
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (20, 2, 22)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (16, 0)
    shown = json.loads(response.model_dump_json(by_alias=True))
    assert {name: shown[name] for name in asked} == asked | {
        "store": False,
        "tools": [shown["tools"][0] | TOOLS[0], shown["tools"][1] | {"type": "function", "name": "g"}],
    }


def test_what_is_not_asked_for_is_told_as_openai_does() -> None:
    shown = json.loads(whole(started(), finished()).model_dump_json())
    expected = {"text": {"format": {"type": "text"}, "verbosity": None}, "tools": [], "tool_choice": "auto"}
    assert expected.items() <= shown.items()
    assert json.loads(whole(started(), finished(), text={"verbosity": "high"}).model_dump_json())["text"] == {
        "format": {"type": "text"},
        "verbosity": "high",
    }


def test_a_response_tells_when_it_began_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.openai.responses.answer.time.time", lambda: 1234.5)
    response = whole(started(), finished())
    assert (response.created_at, response.completed_at) == (1234, 1)
    last = streamed(started(), finished())[-1].response
    assert (last.created_at, last.completed_at) == (1234, 1234)
    assert whole(started(), finished(LENGTH)).completed_at is None


def test_depth_is_bounded_before_anything_is_told() -> None:
    """Tools that come back were too deep to be written: neither events nor the one that tells the failure."""
    for depth in range(900, 1010):
        deep = "[" * depth + "]" * depth
        body = f'{{"input": "hi", "tool_choice": "none", "tools": [{{"type": "function", "name": "f", "x": {deep}}}]}}'
        try:
            plan = response_plan(parse(body.encode(), ResponsesRequest), "id")
        except InvalidRequest as error:
            assert "nested too deeply" in str(error)  # noqa: PT017  it may be raised, and may not
        else:
            on_a_longer_stack(20, lambda plan=plan: plan.streamed.fail(Overloaded("too much")))


def on_a_longer_stack(calls: int, work: Callable[[], object]) -> None:
    if calls:
        on_a_longer_stack(calls - 1, work)
    else:
        work()


def test_the_events_of_a_text_come_in_the_published_order_and_are_counted() -> None:
    events = streamed(started(), delta("he"), delta("y"), finished(usage=(2, 1, 2)))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    created, last = events[0].response, events[-1].response
    assert (created.status, created.output, created.usage, created.model) == ("in_progress", [], None, "m")
    assert output(last) == [("text", "hey", "completed")]
    assert events[-2].item == last.output[0]
    assert last.usage.output_tokens == 2


def test_the_events_of_a_call_come_in_the_published_order() -> None:
    events = streamed(started(), delta(CALL[:-20]), delta(CALL[-20:]), finished(), tools=TOOLS)
    assert [event.type for event in events[2:]] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert (events[2].item.arguments, events[2].item.status) == ("", "in_progress")
    assert [event.delta for event in events[3:5]] == ["{", '"a": 1}']
    assert events[5].arguments == events[6].item.arguments == '{"a": 1}'
    assert {event.item_id for event in events[3:6]} == {events[2].item.id} == {events[6].item.id}


def test_a_call_that_broke_off_is_incomplete() -> None:
    broken = CALL.replace("1}}", "1")
    ends = ((started(), delta(broken), finished()), (started(), delta(broken.partition("</")[0]), finished(LENGTH)))
    for replies in ends:
        for response in (whole(*replies, tools=TOOLS), streamed(*replies, tools=TOOLS)[-1].response):
            assert output(response) == [("f", '{"a": 1', "incomplete")]
    replies = (started(), delta(f"{broken}And "), delta(CALL.partition("</")[0]), finished(LENGTH))
    assert output(whole(*replies, tools=TOOLS)) == [
        ("f", '{"a": 1', "incomplete"),
        ("text", "And ", "completed"),
        ("f", '{"a": 1}', "completed"),
    ]


def test_a_call_may_have_any_name() -> None:
    """What is no tool's, too, as engines tell it."""
    text = '<tool_call>{"name": "", "arguments": {"a": 1}}</tool_call>'
    assert output(streamed(started(), delta(text), finished(), tools=TOOLS)[-1].response) == [
        ("", '{"a": 1}', "completed")
    ]


def test_text_between_calls_is_a_message_in_its_place() -> None:
    replies = (started(), delta(f"Well.{CALL}"), delta(f"And {CALL}"), finished(text="!"))
    expected = [
        ("text", "Well.", "completed"),
        ("f", '{"a": 1}', "completed"),
        ("text", "And ", "completed"),
        ("f", '{"a": 1}', "completed"),
        ("text", "!", "completed"),
    ]
    response = whole(*replies, tools=TOOLS)
    assert output(response) == expected
    assert len({item.id for item in response.output}) == 5
    events = streamed(*replies, tools=TOOLS)
    assert output(events[-1].response) == expected
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == list(range(5))


def test_a_response_that_the_limit_cut_is_incomplete() -> None:
    replies = (started(), delta("he"), finished(LENGTH))
    for response in (whole(*replies), streamed(*replies)[-1].response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert output(response) == [("text", "he", "incomplete")]
    assert streamed(*replies)[-1].type == "response.incomplete"


def test_an_empty_answer_is_an_empty_message() -> None:
    assert output(whole(started(), finished())) == [("text", "", "completed")]
    assert [event.type for event in streamed(started(), finished())[2:]] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def logprobs(events: list[Any]) -> list[str]:
    return [entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]


def test_log_probabilities_are_those_of_the_text() -> None:
    half = inference_pb2.Delta(token_ids=[0xC3], text="", logprobs=[inference_pb2.TokenLogprobs(logprob=-1.0)])
    other = inference_pb2.Delta(token_ids=[0xA9], text="é", logprobs=[inference_pb2.TokenLogprobs(logprob=-2.0)])
    end = inference_pb2.Delta(token_ids=[256], text="", logprobs=[inference_pb2.TokenLogprobs(logprob=-3.0)])
    replies = [
        started(),
        *(inference_pb2.GenerateResponse(delta=event) for event in (half, other, end)),
        finished(usage=(2, 0, 3)),
    ]
    response = whole(*replies, logprobs=True)
    (item,) = response.output
    assert isinstance(item, ResponseOutputMessage)
    (part,) = item.content
    assert part.type == "output_text"
    assert [entry.logprob for entry in part.logprobs or ()] == [-1.0, -2.0, -3.0]
    events = streamed(*replies, logprobs=True)
    assert logprobs(events) == [entry.token for entry in part.logprobs or ()]
    assert events[-1].response.output[0].content == item.content
    text_done, part_done, item_done = events[-4:-1]
    assert item_done.item.content == item.content
    assert (text_done.logprobs, part_done.part.logprobs) == ([], []), "twice at the end is enough"


def test_log_probabilities_of_calls_are_left_out() -> None:
    pieces = [delta(character, logprob=-0.5) for character in f"ab{CALL}"]
    assert logprobs(streamed(started(), *pieces, finished(), logprobs=True, tools=TOOLS)) == ["a", "b"]
    assert logprobs(streamed(started(), *pieces[2:], finished(), logprobs=True, tools=TOOLS)) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("the worker was lost"), "server_error"),
        (Overloaded("too much"), "rate_limit_exceeded"),
        (InvalidRequest("too long"), "invalid_prompt"),
    ],
)
def test_a_failure_after_the_first_byte_is_the_last_event(error: Any, code: str) -> None:
    plan = begun()
    events = [
        event
        for reply in (started(), delta("he"))
        for part in plan.choices[0].take(reply)
        for event in plan.streamed.add(part, "m")
    ]
    last = told([*events, *plan.streamed.fail(error)])[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == (code, str(error))
    assert output(last.response) == [("text", "he", "incomplete")]
    assert (last.response.usage.input_tokens, last.response.usage.output_tokens) == (2, 2)


def test_a_failure_behind_comments_alone_is_told_after_the_first_events() -> None:
    """The head was sent because nothing had come for long."""
    events = told([*begun(model="m").streamed.fail(Overloaded("too much"))])
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert {event.response.model for event in events} == {"m"}
    assert events[-1].response.usage is None, "nothing was counted"


PIECES = st.lists(
    st.sampled_from(["Well.", " ", "\n", CALL, CALL[:40], "</tool_call>", "<tool_call>", "é", "{}"]), max_size=6
).map("".join)


@given(text=PIECES, cuts=st.lists(st.integers(1, 60), max_size=8), reason=st.sampled_from([0, LENGTH]))
def test_deltas_put_together_are_the_whole_answer(text: str, cuts: list[int], reason: int) -> None:
    """As clients do it: an item is what its events say, and all of them together the last event's response."""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [delta(text[begin:end]) for begin, end in pairwise(edges)]
    end = finished(reason or inference_pb2.FINISH_REASON_STOP)
    events = streamed(started(), *pieces, end, tools=TOOLS)
    assert {event.response.id for event in (*events[:2], events[-1])} == {"resp_id"}
    open_items: list[Any] = []
    items: list[list[str]] = []
    done: list[Any] = []
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert len(items) == len(done), "one after another"
            items.append([])
            open_items.append(event.item)
        assert event.output_index == len(items) - 1
        is_of_item = event.type in ("response.output_item.added", "response.output_item.done")
        assert (event.item.id if is_of_item else event.item_id) == open_items[-1].id
        assert getattr(event, "content_index", 0) == 0
        if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            items[-1].append(event.delta)
        elif event.type == "response.output_text.done":
            assert event.text == "".join(items[-1])
        elif event.type == "response.content_part.done":
            assert event.part.text == "".join(items[-1])
        elif event.type == "response.function_call_arguments.done":
            assert (event.name, event.arguments) == (open_items[-1].name, "".join(items[-1]))
        elif event.type == "response.output_item.done":
            done.append(event.item)
    response = events[-1].response
    assert done == response.output
    assert len({item.id for item in done}) == len(done)
    call_ids = [item.call_id for item in done if isinstance(item, ResponseFunctionToolCall)]
    assert len(set(call_ids)) == len(call_ids)
    assert [item.call_id for item in open_items if isinstance(item, ResponseFunctionToolCall)] == call_ids
    assert [text for _, text, _ in output(response)] == ["".join(item) for item in items]
    same = whole(started(), *pieces, end, tools=TOOLS)
    assert output(same) == output(response)
    assert same.status == response.status
