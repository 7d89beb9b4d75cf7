"""Incremental detokenizing, case by case. The general laws are in tests/properties."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer

from radixfleet import text
from radixfleet.output_text.detokenizer import Detokenizer
from radixfleet.output_text.texts import texts_of
from radixfleet.types import SamplingParams
from tests.support.small_tokenizers import spec_of
from tests.support.token_texts import byte_fallback_tokenizer, byte_level_tokenizer, piece_ids


def detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return Detokenizer(decode, frozenset(special if skip_special_tokens else ()))


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = detokenizer(tokenizer)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


def test_a_character_split_over_tokens_arrives_with_its_last_token() -> None:
    """Behaviour 36: an emoji of four one-byte tokens is never shown in part."""
    tokenizer = byte_level_tokenizer([])
    assert deltas(tokenizer, list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


def test_text_before_an_unfinished_character_is_not_held_back() -> None:
    """Behaviour 36: only the character that is not whole waits."""
    pieces = [b"hello \xe4\xbd", b"\xa0 there"]
    tokenizer = byte_level_tokenizer(pieces)
    assert deltas(tokenizer, piece_ids(tokenizer, pieces)) == ["hello ", "你 there", ""]


def test_an_unfinished_character_at_the_end_shows_as_one_replacement_character() -> None:
    """Behaviour 36: what the full decode shows, no more and no less."""
    tokenizer = byte_level_tokenizer([])
    assert deltas(tokenizer, list(b"ok\xf0\x9f\x98")) == ["o", "k", "", "", "", "\ufffd"]


def test_a_replacement_character_that_is_truly_there_is_kept() -> None:
    """Behaviour 36: U+FFFD as the model's own text comes out, once, when the next token shows that it is whole."""
    tokenizer = byte_level_tokenizer(["\ufffd".encode()])
    assert deltas(tokenizer, [256, ord("x"), 256]) == ["", "\ufffdx", "", "\ufffd"]


def test_endless_bytes_that_are_no_text_come_out_as_they_go() -> None:
    """Behaviour 39: the held-back text stays short however long the run of invalid bytes is."""
    tokenizer = byte_level_tokenizer([])
    stream = detokenizer(tokenizer)
    ids = [0x80, 0xF0, 0x9F] * 500
    given = ""
    for count, token_id in enumerate(ids, start=1):
        given += stream.push(token_id)
        assert len(tokenizer.decode(ids[:count])) - len(given) <= 3
    assert given + stream.finish() == tokenizer.decode(ids)


def test_cost_of_a_token_does_not_grow_with_the_output() -> None:
    """Behaviour 39: the tokens decoded for each new one are bounded, for text, for junk and for special tokens."""
    tokenizer = byte_level_tokenizer([], special=["<end>"])
    end = tokenizer.token_to_id("<end>")
    for unit in (list("añ😀".encode()), [0x80], [end], [0xE4, 0xBD], [end, 0xF0]):
        decoded = 0

        def decode(ids: list[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids)

        stream = Detokenizer(decode, frozenset([end]))
        ids = unit * 2000
        for token_id in ids:
            stream.push(token_id)
        assert decoded <= 32 * len(ids)


def test_special_tokens_are_invisible_or_not_by_request() -> None:
    """Behaviour 38: the option belongs to the request, so two requests over one vocabulary do not mix."""
    tokenizer = byte_level_tokenizer([], special=["<end>"])
    ids = [ord("a"), tokenizer.token_to_id("<end>"), ord("b")]
    hiding, showing = detokenizer(tokenizer), detokenizer(tokenizer, skip_special_tokens=False)
    hidden, shown = "", ""
    for token_id in ids:
        hidden += hiding.push(token_id)
        shown += showing.push(token_id)
    assert hidden + hiding.finish() == "ab"
    assert shown + showing.finish() == tokenizer.decode(ids, skip_special_tokens=False) == "a<end>b"


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    tokenizer = byte_level_tokenizer([], special=["<end>"])
    end = tokenizer.token_to_id("<end>")
    assert "".join(deltas(tokenizer, [0xE4, end, 0xBD, end, 0xA0])) == "你"


@pytest.mark.parametrize("text", [" leading", "  two", "a  b", " ", "", "tail "])
def test_leading_and_inner_spaces_of_a_sentencepiece_vocabulary(text: str) -> None:
    tokenizer = byte_fallback_tokenizer([" ", *"abdegilnotw"])
    ids = [tokenizer.token_to_id(character.replace(" ", "▁")) for character in text]
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("answer", [" two", "o", "  a", " ", " a b"])
@pytest.mark.parametrize("prompt", ["a", "a b", "on ", " "])
def test_an_answer_goes_on_with_the_text_of_its_prompt(prompt: str, answer: str) -> None:
    """The space of its first word is no part of its own decoding, but of the whole text's."""
    tokenizer = byte_fallback_tokenizer([" ", *"abdegilnotw"])
    before, ids = ([tokenizer.token_to_id(c.replace(" ", "▁")) for c in text] for text in (prompt, answer))
    stream = Detokenizer(tokenizer.decode, context=before[-1:])
    assert "".join(map(stream.push, ids)) + stream.finish() == answer
    assert tokenizer.decode(before) + answer == tokenizer.decode(before + ids)


@pytest.mark.parametrize("end", ["é", "你", "😀", "😀😀"])
def test_an_answer_goes_on_with_a_prompt_that_ends_with_a_character_of_bytes(end: str) -> None:
    """The last of its tokens alone is no text, and without a context the answer would lose its first space."""
    plain = byte_fallback_tokenizer([" ", *"otw"])
    before, ids = list(end.encode()), [plain.token_to_id(character) for character in "▁two"]
    (output,) = texts_of(text.Tokenizer(spec_of(plain)), SamplingParams(), frozenset(), np.array(before, np.uint32))
    assert "".join(map(output.push, ids)) + output.finish() == " two"
    assert plain.decode(before + ids) == end + " two"


def test_a_prompt_that_ends_within_a_character_is_no_context() -> None:
    tokenizer = byte_level_tokenizer([])
    stream = Detokenizer(tokenizer.decode, context=[0xE4])
    assert [stream.push(byte) for byte in (0xBD, 0xA0, 0x61)] == ["", "", "\ufffd\ufffda"]


def test_byte_fallback_characters_one_after_another() -> None:
    """Each character comes out when it is whole, although the decoder calls the bytes in between all invalid."""
    tokenizer = byte_fallback_tokenizer(["x"])
    assert deltas(tokenizer, list("你好".encode())) == ["", "", "你", "", "", "好", ""]


def test_byte_fallback_keeps_the_characters_it_has_given_out() -> None:
    """A stray byte makes the decoder discard its neighbours in the whole sequence; text given out is not repeated."""
    tokenizer = byte_fallback_tokenizer(["x"])
    assert deltas(tokenizer, [*"你".encode(), 0xE5, 256]) == ["", "", "你", "", "\ufffdx", ""]
