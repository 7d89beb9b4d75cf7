"""The comparison with peers: what one streamed answer is taken for."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.bench.peers.clients import AsksHttp, StreamReading, WrongAnswer, session
from loadtest.http_caller import Chunk, ChunkChoice, Usage
from tests.support.fake_peer import FakePeer, serving

PROMPT = np.arange(100, 140, dtype=np.uint32)


def chunk(text: str | None, completion_tokens: int | None = None) -> Chunk:
    """`text` None: it tells of no completion."""
    usage = None if completion_tokens is None else Usage(prompt_tokens=7, completion_tokens=completion_tokens)
    return Chunk([] if text is None else [ChunkChoice(text)], usage)


class TestReading:
    """Times and counts of a stream's chunks."""

    def test_the_first_token_is_not_the_chunk_that_opens_the_stream(self) -> None:
        reading = StreamReading(10.0)
        reading.take(chunk(""), 11.0)
        reading.take(chunk(None, 0), 11.5)
        reading.take(chunk(" a"), 12.0)
        reading.take(chunk(" b"), 13.0)
        reading.take(chunk(None, 2), 14.0)
        answer = reading.answer(15.0)
        assert (answer.first_token_s, answer.end_s) == (2.0, 5.0)
        assert (answer.prompt_tokens, answer.output_tokens, answer.text) == (7, 2, " a b")

    def test_a_token_without_text_counts_where_the_server_says_so(self) -> None:
        reading = StreamReading(10.0)
        reading.take(chunk("", 0), 11.0)
        reading.take(chunk("", 1), 12.0)
        reading.take(chunk(" a", 2), 13.0)
        assert reading.answer(14.0).first_token_s == 2.0

    def test_tokens_are_what_the_server_counted_and_not_the_chunks(self) -> None:
        reading = StreamReading(0.0)
        reading.take(chunk(" many words at once", 5), 1.0)
        reading.take(chunk(" and more", 9), 2.0)
        assert reading.answer(2.0).output_tokens == 9

    def test_a_usage_that_counts_nothing_erases_nothing(self) -> None:
        reading = StreamReading(0.0)
        reading.take(chunk(" a b", 2), 1.0)
        reading.take(Chunk([], Usage()), 2.0)
        assert reading.answer(2.0).output_tokens == 2

    @pytest.mark.parametrize("chunks", [[], [chunk(" a")], [chunk(None, 0)]])
    def test_an_answer_without_token_or_usage_is_none(self, chunks: list[Chunk]) -> None:
        reading = StreamReading(0.0)
        for each in chunks:
            reading.take(each, 1.0)
        with pytest.raises(WrongAnswer, match="without"):
            reading.answer(2.0)


class TestHttp:
    """Over a real connection."""

    @pytest.mark.parametrize("counts", [True, False])
    async def test_everybody_is_asked_for_the_same(self, *, counts: bool) -> None:
        peer = FakePeer(counts=counts)
        async with serving(peer) as port, session() as http:
            answer = await AsksHttp(http, port, "model").ask(PROMPT, 5)
        assert (answer.prompt_tokens, answer.output_tokens) == (40, 5)
        assert answer.text == " w100 w101 w102 w103 w104"
        assert 0 < answer.first_token_s <= answer.end_s
        (body,) = peer.bodies
        assert (body["prompt"], body["max_tokens"]) == (PROMPT.tolist(), 5)
        assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0.0, True, True)

    async def test_every_question_has_a_connection_of_its_own(self) -> None:
        """A server that was frozen hangs up on connections that it finds idle."""
        peer = FakePeer()
        async with serving(peer) as port, session() as http:
            for _ in range(3):
                await AsksHttp(http, port, "model").ask(PROMPT, 2)
        assert len(peer.connections) == 3

    async def test_errors_are_told_with_their_text(self) -> None:
        async with serving(FakePeer(error="out of pages")) as port, session() as http:
            with pytest.raises(WrongAnswer, match="out of pages"):
                await AsksHttp(http, port, "model").ask(PROMPT, 5)
        async with serving(FakePeer(status=503)) as port, session() as http:
            with pytest.raises(WrongAnswer, match="503: no room"):
                await AsksHttp(http, port, "model").ask(PROMPT, 5)

    async def test_a_server_that_is_gone(self) -> None:
        async with serving(FakePeer()) as port:
            pass
        async with session() as http:
            with pytest.raises(WrongAnswer, match="UNAVAILABLE"):
                await AsksHttp(http, port, "model").ask(PROMPT, 5)
