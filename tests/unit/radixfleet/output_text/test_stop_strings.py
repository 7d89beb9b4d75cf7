"""Stop strings, case by case. The general laws are in tests/properties."""

from __future__ import annotations

import pytest

from radixfleet.output_text.detokenizer import Detokenizer
from radixfleet.output_text.output import OutputText
from radixfleet.output_text.stop_strings import StopMatcher, StopStrings


def matcher(*stops: str) -> StopMatcher:
    return StopMatcher(StopStrings(stops))


def test_a_stop_string_across_pieces_never_leaks() -> None:
    """Behaviour 37: no part of the stop string is given out, whatever the pieces."""
    stream = matcher("</answer>")
    assert [stream.push(piece) for piece in ("42", "</", "ans", "wer", "> and more")] == ["42", "", "", "", ""]
    assert stream.matched == "</answer>"
    assert stream.finish() == ""


def test_what_turns_out_not_to_be_a_stop_string_is_given_out_at_once() -> None:
    """Behaviour 37: no more is held back than the longest suffix that could still begin one."""
    stream = matcher("aab")
    assert [stream.push(character) for character in "aaac"] == ["", "", "a", "aac"]


def test_the_held_back_text_comes_at_the_end() -> None:
    stream = matcher("END")
    assert stream.push("the EN") == "the "
    assert (stream.finish(), stream.matched) == ("EN", None)


@pytest.mark.parametrize(
    ("stops", "text", "matched", "before"),
    [
        (("bc", "abcd"), "xabcd", "bc", "xa"),
        (("abc", "bc"), "xabc", "abc", "x"),
        (("c", "bc", "abc"), "abc", "abc", ""),
        (("she", "he", "hers"), "ushers", "she", "u"),
        (("\n\n",), "one\ntwo\n\n\nthree", "\n\n", "one\ntwo"),
        (("日本",), "今日は日本語", "日本", "今日は"),
    ],
)
def test_the_first_stop_string_to_be_complete_wins(
    stops: tuple[str, ...], text: str, matched: str, before: str
) -> None:
    whole, by_character = matcher(*stops), matcher(*stops)
    assert whole.push(text) == "".join(by_character.push(character) for character in text) == before
    assert whole.matched == by_character.matched == matched


def test_a_stop_token_ends_the_text_and_is_not_in_it() -> None:
    output = OutputText(Detokenizer(lambda ids: "".join(map(chr, ids))), None, frozenset([ord("!")]))
    assert [output.push(ord(character)) for character in "hi!"] == ["h", "i", ""]
    assert output.finish() == ""


def test_a_stop_string_completed_by_the_last_held_back_bytes_is_found() -> None:
    """The detokenizer's tail passes the stop strings too."""
    output = OutputText(Detokenizer(lambda ids: bytes(ids).decode(errors="replace")), matcher("x\ufffd"), frozenset())
    assert output.push(ord("a")) + output.push(ord("x")) + output.push(0xE4) == "a"
    assert (output.finish(), output.matched_stop) == ("", "x\ufffd")
