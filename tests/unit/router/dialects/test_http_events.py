from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dialects.http_events import count_told, error_message, read_event, server_sent_events
from router.dialects.speaker import Unreachable


async def in_pieces(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def events(*pieces: bytes) -> list[bytes]:
    return [event async for event in server_sent_events(in_pieces(pieces))]


async def test_events_wherever_the_network_cuts_them() -> None:
    stream = b": hello\n\ndata: one\n\nevent: x\nid: 3\ndata: two\ndata:  three\r\n\r\ndata:four\n\n"
    expected = [b"one", b"two\n three", b"four"]
    assert await events(stream) == expected
    for cut in range(len(stream)):
        assert await events(stream[:cut], stream[cut:]) == expected
    assert await events(*(bytes([byte]) for byte in stream)) == expected


async def test_the_last_event_counts_without_its_empty_line() -> None:
    assert await events(b"data: one\n\ndata: two\n") == [b"one", b"two"]
    assert await events() == []


async def test_an_endless_event_is_none() -> None:
    with pytest.raises(Unreachable, match="more than"):
        await events(b"data: ", *[b"x" * 1_000_000] * 9)
    with pytest.raises(Unreachable, match="more than"):  # in lines, of which none is too long
        await events(*[b"data: " + b"x" * 1_000_000 + b"\n"] * 9)
    assert len(await events(*[b"data: " + b"x" * 1_000_000 + b"\n\n"] * 9)) == 9


@pytest.mark.parametrize(("number", "told"), [(5, 5), (5.0, 5), (0, 0), (None, None), (-5, None), (2**40, None)])
def test_counts_that_can_be_none(number: float | None, told: int | None) -> None:
    assert count_told(number) == told


@given(st.binary(max_size=60))
def test_whatever_is_sent_is_an_event_or_a_broken_engine(data: bytes) -> None:
    try:
        read_event(data)
    except Unreachable:
        return
    assert isinstance(json.loads(data), dict)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": {"message": "too hot", "code": 3}}', "too hot"),
        (b'{"error": "too hot"}', "too hot"),
        (b'{"object": "error", "message": "too hot"}', "too hot"),
        (b'{"detail": "too hot"}', "too hot"),
        (b'{"detail": [{"loc": ["n"]}]}', '[{"loc":["n"]}]'),
        (b"<html>too hot", "<html>too hot"),
        (b"", "status 500"),
        (b"{}", "status 500"),
        (b"[" * 100_000, "[" * 500),
        (b"\xff", "\ufffd"),
    ],
)
def test_what_an_engine_says_is_wrong_in_any_form(body: bytes, told: str) -> None:
    assert error_message(body, "status 500") == told
