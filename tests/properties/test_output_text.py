"""Laws of streamed text over random vocabularies and splits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from radixfleet.output_text.detokenizer import REPLACEMENT, Detokenizer
from radixfleet.output_text.output import OutputText
from radixfleet.output_text.stop_strings import StopMatcher, StopStrings
from tests.support.token_texts import byte_fallback_tokenizer, byte_level_tokenizer, piece_ids

TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab \n.éñ你好日本語🙂🏽👩‍👩‍👧🇫🇷\ufffd\u0301\u200d\ufe0f"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """`data` cut at the given positions, without empty pieces."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


CUTS = st.one_of(st.lists(st.integers(0, 400), max_size=60), st.just(list(range(400))))


@given(text=TEXTS, cuts=CUTS)
def test_joined_deltas_are_the_text_however_it_is_split(text: str, cuts: list[int]) -> None:
    """Behaviour 36: characters split over tokens; nothing repeated, nothing lost, no U+FFFD that is not in the text."""
    pieces = split(text.encode(), cuts)
    tokenizer = byte_level_tokenizer(pieces)
    stream = Detokenizer(tokenizer.decode)
    given_out = ""
    for token_id in piece_ids(tokenizer, pieces):
        given_out += stream.push(token_id)
        assert text.startswith(given_out)
    assert given_out + stream.finish() == text


NEVER_WHOLE = st.lists(st.sampled_from([b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe4\xbd", b"\xe4", b"\xc3"]), max_size=60)
BYTES = st.one_of(st.binary(max_size=120), NEVER_WHOLE.map(b"".join))


@given(data=BYTES, cuts=CUTS)
def test_joined_deltas_equal_the_full_decode_of_any_bytes(data: bytes, cuts: list[int]) -> None:
    """Behaviour 36: also where the bytes are no text; never more than an unfinished character is missing."""
    pieces = split(data, cuts)
    tokenizer = byte_level_tokenizer(pieces)
    ids = piece_ids(tokenizer, pieces)
    stream = Detokenizer(tokenizer.decode)
    given_out = ""
    for count, token_id in enumerate(ids, start=1):
        given_out += stream.push(token_id)
        so_far = tokenizer.decode(ids[:count])
        assert so_far.startswith(given_out)
        assert len(so_far) - len(given_out) <= 3
        assert set(so_far[len(given_out) :]) <= {REPLACEMENT}
    assert given_out + stream.finish() == tokenizer.decode(ids)


@given(text=TEXTS, whole=st.lists(st.booleans(), min_size=40, max_size=40))
def test_joined_deltas_equal_the_full_decode_with_byte_fallback(text: str, whole: list[bool]) -> None:
    """Behaviour 36: SentencePiece-like vocabularies; each character is a token of its own or spelled in byte tokens."""
    tokenizer = byte_fallback_tokenizer(sorted(set(text) - {"▁"}))
    ids: list[int] = []
    for character, is_token in zip(text, whole, strict=False):
        token_id = tokenizer.token_to_id(character.replace(" ", "▁"))
        ids += [token_id] if is_token and token_id is not None else list(character.encode())
    stream = Detokenizer(tokenizer.decode)
    given_out = "".join(stream.push(token_id) for token_id in ids) + stream.finish()
    assert given_out == tokenizer.decode(ids)


STOPS = st.lists(st.text("ab你", min_size=1, max_size=5), min_size=1, max_size=4)


def first_complete(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, found the slow way."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=st.text("ab你 ", max_size=60), stops=STOPS, cuts=CUTS)
def test_streamed_text_equals_unstreamed_text_with_stop_strings(text: str, stops: list[str], cuts: list[int]) -> None:
    """Behaviour 37: whatever the tokens, what is given out is the text before the first complete stop string, and no
    more is held back than the longest suffix that begins one."""
    pieces = split(text.encode(), cuts)
    tokenizer = byte_level_tokenizer(pieces)
    output = OutputText(Detokenizer(tokenizer.decode), StopMatcher(StopStrings(stops)), frozenset())
    before, matched = first_complete(text, stops)
    given_out = ""
    read = b""
    for piece, token_id in zip(pieces, piece_ids(tokenizer, pieces), strict=True):
        given_out += output.push(token_id)
        read += piece
        if output.matched_stop is not None:
            break
        so_far = read.decode(errors="ignore")
        beginnings = [n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])]
        assert given_out == so_far[: len(so_far) - max(beginnings)]
    assert given_out + output.finish() == before
    assert output.matched_stop == matched


@given(seed=st.integers(0, 2**32), stops=STOPS)
def test_interleaved_requests_do_not_mix(seed: int, stops: list[str]) -> None:
    """Behaviour 38: requests with different options, interleaved as in a batch, read as they would alone."""
    generator = random.Random(seed)
    tokenizer = byte_level_tokenizer([], special=["<end>"])
    end = tokenizer.token_to_id("<end>")
    automaton = StopStrings(stops)

    def outputs() -> list[OutputText]:
        return [
            OutputText(Detokenizer(tokenizer.decode, frozenset([end])), StopMatcher(automaton), frozenset()),
            OutputText(Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=False)), None, frozenset()),
            OutputText(Detokenizer(tokenizer.decode, frozenset([end])), None, frozenset([ord("b")])),
        ]

    tokens = [[generator.choice([*b"ab", *"你".encode(), end]) for _ in range(20)] for _ in range(3)]
    alone = [
        "".join(output.push(token_id) for token_id in ids) + output.finish()
        for output, ids in zip(outputs(), tokens, strict=True)
    ]
    together = outputs()
    texts = ["", "", ""]
    for step in range(20):
        for index in generator.sample(range(3), 3):
            texts[index] += together[index].push(tokens[index][step])
    assert [text + output.finish() for text, output in zip(texts, together, strict=True)] == alone
