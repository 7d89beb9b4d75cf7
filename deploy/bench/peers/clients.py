"""One question to a server and what came of it: over our gRPC, or over the completions of OpenAI's HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from loadtest.callers import CallFailed
from loadtest.http_caller import Chunk, Usage, completion_body, completion_chunks
from radixfleet.answers import Delta, Finished
from radixfleet.client import Client
from radixfleet.errors import RadixfleetError
from radixfleet.types import TokenArray


class WrongAnswer(Exception):
    """An answer that is none, or not what was asked for: its figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Times in seconds from when the question was sent."""

    first_token_s: float
    end_s: float
    prompt_tokens: int
    """As the server counted them."""
    output_tokens: int
    text: str


class Asks(Protocol):
    """One server."""

    async def ask(self, prompt: TokenArray, new_tokens: int) -> Answer:
        """Generate greedily, to the length. Raises WrongAnswer."""
        ...


class AsksGrpc:
    """A worker of ours."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def ask(self, prompt: TokenArray, new_tokens: int) -> Answer:
        """See `Asks`."""
        sent_s, first_s, text = time.perf_counter(), 0.0, list[str]()
        events = self._client.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True, temperature=0.0)
        try:
            async for event in events:
                if isinstance(event, Delta | Finished):
                    first_s = first_s or time.perf_counter()
                    text.append(event.text)
                if isinstance(event, Finished) and event.usage is not None:
                    end_s = time.perf_counter()
                    used = event.usage
                    return Answer(
                        first_s - sent_s, end_s - sent_s, used.prompt_tokens, used.completion_tokens, "".join(text)
                    )
        except RadixfleetError as error:
            raise WrongAnswer(str(error)) from error
        raise AssertionError("the client raises when a stream ends without usage")


class StreamReading:
    """What the chunks of one streamed completion tell. The first token is there with the first text, or with the first
    count of tokens, whichever comes; a chunk that has neither only opens the stream.
    """

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._usage = Usage()
        self._text: list[str] = []

    def take(self, chunk: Chunk, now_s: float) -> None:
        """The next one."""
        self._usage = chunk.counts_after(self._usage)
        for choice in chunk.choices or ():
            if self._first_s is None and (choice.text or self._usage.completion_tokens):
                self._first_s = now_s
            self._text.append(choice.text or "")

    def answer(self, now_s: float) -> Answer:
        """After the last one. Raises WrongAnswer when there was no token, or no count of them."""
        used = self._usage
        if self._first_s is None or used.prompt_tokens is None or used.completion_tokens is None:
            raise WrongAnswer("the answer ended without a token, or without its usage")
        return Answer(
            first_token_s=self._first_s - self._sent_s,
            end_s=now_s - self._sent_s,
            prompt_tokens=used.prompt_tokens,
            output_tokens=used.completion_tokens,
            text="".join(self._text),
        )


class AsksHttp:
    """Any server with OpenAI's `/v1/completions` that takes prompts of token ids."""

    def __init__(self, session: aiohttp.ClientSession, port: int, model: str) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._model = model

    async def ask(self, prompt: TokenArray, new_tokens: int) -> Answer:
        """See `Asks`."""
        body = completion_body(self._model, prompt, new_tokens)
        reading = StreamReading(time.perf_counter())
        try:
            async for chunk in completion_chunks(self._session, self._url, body):
                reading.take(chunk, time.perf_counter())
        except CallFailed as error:
            raise WrongAnswer(str(error)) from error
        return reading.answer(time.perf_counter())


def session() -> aiohttp.ClientSession:
    """A client for all HTTP servers of a run; close it.

    Each question has a connection of its own: a server that was frozen meanwhile hangs up on those it finds idle.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
