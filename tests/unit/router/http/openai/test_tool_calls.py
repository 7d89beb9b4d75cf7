"""Calls of tools in the text of answers, however it is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.openai.shapes import ToolCall
from router.http.openai.tool_calls import ToolCallFinder

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def read(*pieces: str) -> list[str | tuple[str, dict]]:
    """What comes out, neighbouring texts joined."""
    finder = ToolCallFinder()
    found = [item for piece in pieces for item in finder.push(piece)] + finder.finish()
    joined: list[str | tuple[str, dict]] = []
    for item in found:
        if isinstance(item, ToolCall):
            joined.append((item.function.name, json.loads(item.function.arguments)))
        elif joined and isinstance(joined[-1], str):
            joined[-1] += item
        else:
            joined.append(item)
    return joined


def test_text_around_calls_stays_text() -> None:
    assert read(f"Let me see.\n{CALL}") == ["Let me see.\n", ("weather", {"city": "Bern"})]
    assert read(f"{CALL}\n{CALL}\n") == [("weather", {"city": "Bern"})] * 2
    assert read("no call < here <tool") == ["no call < here <tool"]


def test_calls_have_numbers_and_names_of_their_own() -> None:
    finder = ToolCallFinder()
    first, second = (item for item in finder.push(CALL + CALL) if isinstance(item, ToolCall))
    assert (first.index, second.index) == (0, 1)
    assert first.id != second.id
    assert finder.num_calls == 2


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
        "<tool_call>unfinished",
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_text_with_its_marks(text: str) -> None:
    assert read(text) == [text]


def test_a_call_without_its_closing_mark_counts() -> None:
    assert read(CALL.removesuffix("</tool_call>")) == [("weather", {"city": "Bern"})]


def test_parameters_is_another_word_for_arguments() -> None:
    assert read('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>') == [("f", {"a": 1})]


def test_arguments_stay_as_the_model_wrote_them() -> None:
    """Numbers that a double cannot hold among them."""
    finder = ToolCallFinder()
    (call,) = finder.push('<tool_call>{"name": "f", "arguments": {"a": 1.50, "b": 1e2, "c": [1e999]}}</tool_call>')
    assert isinstance(call, ToolCall)
    assert call.function.arguments == '{"a":1.50,"b":1e2,"c":[1e999]}'


def test_text_is_not_held_back_longer_than_a_mark_may_begin() -> None:
    finder = ToolCallFinder()
    assert finder.push("abc") == ["abc"]
    assert finder.push("d<") == ["d"]
    assert finder.push("tool_c") == []
    assert finder.push("at") == ["<tool_cat"]


def test_white_space_belongs_to_the_text_that_has_begun_behind_a_call() -> None:
    assert read(CALL, "\n", "text", "\n") == read(f"{CALL}\ntext\n") == [("weather", {"city": "Bern"}), "\ntext\n"]


@given(
    st.lists(st.sampled_from(["x", "<", "<tool_call>", "</tool_call>", CALL, "\n", "tool_call>", '{"name": "f"}'])),
    st.data(),
)
def test_pieces_do_not_matter(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(*pieces) == read(text)
