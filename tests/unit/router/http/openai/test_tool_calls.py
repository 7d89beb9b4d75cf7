"""Calls of tools in the text of answers, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.openai.shapes import FunctionDelta, ToolCallDelta
from router.http.openai.tool_calls import ToolCallFinder

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
HEAD = '<tool_call>{"name": "f", "arguments": '
TOOLS = frozenset({"weather", "f"})
WEATHER = ("weather", '{"city": "Bern"}')


def read(*pieces: str, names: frozenset[str] = TOOLS) -> list[str | tuple[str, str]]:
    """What comes out, neighbouring texts joined, and the pieces of each call."""
    return read_by(ToolCallFinder(names), *pieces)


def read_by(finder: ToolCallFinder, *pieces: str) -> list[str | tuple[str, str]]:
    found = [item for piece in pieces for item in finder.push(piece)] + finder.finish()
    joined: list[str | tuple[str, str]] = []
    num_calls = 0
    for item in found:
        last = joined[-1] if joined else None
        if isinstance(item, str):
            joined[-1:] = [last + item] if isinstance(last, str) else [*joined[-1:], item]
        elif isinstance(item.id, str):
            assert (item.index, item.type) == (num_calls, "function")
            num_calls += 1
            assert isinstance(item.function.name, str)
            joined.append((item.function.name, item.function.arguments))
        else:
            assert item.index == num_calls - 1, "calls come one after another"
            assert isinstance(last, tuple), "no text comes between the pieces of a call"
            joined[-1] = (last[0], last[1] + item.function.arguments)
    return joined


def in_pieces(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_text_around_calls_stays_text() -> None:
    assert read(f"Let me see.\n{CALL}") == ["Let me see.\n", WEATHER]
    assert read(f"{CALL}\n{CALL}\n") == [WEATHER] * 2
    assert read("no call < here <tool") == ["no call < here <tool"]


@pytest.mark.parametrize("names", [TOOLS, frozenset({"other"})])
def test_calls_have_numbers_and_names_of_their_own(names: frozenset[str]) -> None:
    finder = ToolCallFinder(names)
    found = [item for item in finder.push(CALL + CALL) if isinstance(item, ToolCallDelta)]
    first, second = (item for item in found if item.id)
    assert (first.index, second.index) == (0, 1)
    assert first.id != second.id
    assert finder.has_whole_calls


def test_a_call_is_told_as_it_comes() -> None:
    finder = ToolCallFinder(TOOLS)
    pieces = ("<tool_call>\n{", '"name": "f", ', '"arguments": ', '{"a', '": "{<', '\\"', '"', "}", "}\n", "</tool_")
    told = [[item.function.arguments for item in finder.push(p) if isinstance(item, ToolCallDelta)] for p in pieces]
    assert told == [[], [], [], ['{"a'], ['": "{<'], ['\\"'], ['"'], [], [], []]
    assert finder.push("call>") == [ToolCallDelta(0, FunctionDelta("}"))]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "other", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "f", "parameters": {"a": [}}</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
        "<tool_call>unfinished",
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_text_with_its_marks(text: str) -> None:
    assert read(text) == [text]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": 1', '{"a": 1'),
        ('{"a": "</tool_call> and more', '{"a": "</tool_call> and more'),
        ('{"a": 1\n</tool_call>', '{"a": 1\n'),
        ('{"a": {"b": 1}</tool_call>', '{"a": {"b": 1}'),
        ('{"a": nothing}}</tool_call>', '{"a": nothing}'),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}}", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
    ],
)
def test_a_call_that_breaks_off_ends_as_it_came(text: str, arguments: str) -> None:
    finder = ToolCallFinder(TOOLS)
    assert read_by(finder, f"{CALL}{HEAD}{text}") == [WEATHER, ("f", arguments)]
    assert not finder.has_whole_calls


@pytest.mark.parametrize("tail", ["", "</tool_call>", "} and more</tool_call>", ', "id": 1}</tool_call>', "}</tool"])
def test_a_call_is_whole_whose_arguments_are(tail: str) -> None:
    finder = ToolCallFinder(TOOLS)
    assert read_by(finder, f'{HEAD}{{"a": "}}"}}{tail}') == [("f", '{"a": "}"}')]
    assert finder.has_whole_calls


def test_a_mark_in_a_string_is_none() -> None:
    arguments = json.dumps({"code": "</tool_call>\n<tool_call>", "b": {}})
    assert read(f"{HEAD}{arguments}}}</tool_call>!") == [("f", arguments), "!"]


def test_a_call_without_its_closing_mark_counts() -> None:
    for names in (TOOLS, frozenset({"other"})):
        assert read(CALL.removesuffix("</tool_call>"), names=names) == [WEATHER]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "parameters": {"a": 1}}',
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "\\u0066", "arguments": {"a": 1}}',
        '{"name": "f",' + " " * 2000 + '"arguments": {"a": 1}}',
    ],
)
def test_other_forms_come_whole(call: str) -> None:
    finder = ToolCallFinder(TOOLS)
    assert [*finder.push(f"<tool_call>{call[:-1]}"), *finder.push("}")] == []
    (found,) = finder.push("</tool_call>")
    assert isinstance(found, ToolCallDelta)
    assert (found.function.name, found.function.arguments) == ("f", '{"a": 1}')
    assert finder.has_whole_calls


@pytest.mark.parametrize("name", ["f", "other"])
def test_arguments_stay_as_the_model_wrote_them(name: str) -> None:
    """Numbers that a double cannot hold among them."""
    arguments = '{"a":1.50,  "b": 1e2,\n"c": [1e999, "\\u00e9é"]}'
    text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    assert read(text) == [(name, arguments)]


def test_text_is_not_held_back_longer_than_a_mark_may_begin() -> None:
    finder = ToolCallFinder(TOOLS)
    assert finder.push("abc") == ["abc"]
    assert finder.push("d<") == ["d"]
    assert finder.push("tool_c") == []
    assert finder.push("at") == ["<tool_cat"]


def test_white_space_belongs_to_the_text_that_has_begun_behind_a_call() -> None:
    assert read(CALL, "\n", "text", "\n") == read(f"{CALL}\ntext\n") == [WEATHER, "\ntext\n"]


def test_white_space_behind_a_call_is_not_read_again_with_every_piece() -> None:
    """A model that goes on with nothing else would keep the event loop busy, for longer with every token."""
    finder = ToolCallFinder(TOOLS)
    finder.push(CALL)
    for _ in range(1000):
        assert finder.push(" ") == []
        assert len(finder._held) <= 1
    assert finder.push("<tool_ca") == []
    assert "".join(map(str, finder.push("x"))) == " " * 1000 + "<tool_cax"


PARTS = ["x", "<", "<tool_call>", "</tool_call>", CALL, "\n", "tool_call>", '{"name": "f"}', HEAD, "{", "}", '"', "\\"]


@given(st.lists(st.sampled_from(PARTS)), st.data())
def test_pieces_do_not_matter(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    assert read(*in_pieces(text, data)) == read(text)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.lists(st.sampled_from([*'a{}[]"\\<é\n🎈', "</tool_call>"])).map("".join),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.tuples(st.sampled_from(["", "Well. ", "é"]), st.dictionaries(st.text(max_size=3), JSON, max_size=3))),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.data(),
)
def test_every_call_is_read_and_what_is_told_of_it_is_its_beginning(
    answer: list[tuple[str, dict[str, Any]]], indent: int | None, is_ascii: Any, data: st.DataObject
) -> None:
    expected: list[str | tuple[str, str]] = []
    text = ""
    for before, arguments in answer:
        written = json.dumps(arguments, indent=indent, ensure_ascii=is_ascii)
        text += f"{before}{HEAD}{written}}}\n</tool_call>"
        expected += [*([before] if before else []), ("f", written)]
    finder = ToolCallFinder(TOOLS)
    assert read_by(finder, *in_pieces(text, data)) == expected
    assert finder.has_whole_calls == bool(answer)
    cut = read(*in_pieces(text[: data.draw(st.integers(0, len(text)))], data))
    told = [item[1] for item in expected if isinstance(item, tuple)]
    for got, whole in zip([item[1] for item in cut if isinstance(item, tuple)], told, strict=False):
        assert whole.startswith(got)
