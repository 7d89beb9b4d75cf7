"""Requests over OpenAI's `/v1/completions`, streamed: our router's HTTP port, or anybody's who takes token ids there.

What a server does not tell is not made up: workers have no names here, and the tokens that were cached count where the
usage names them (`prompt_tokens_details`), which some servers do only when they are asked to at their start.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import orjson

from loadtest.callers import CallFailed, Ended, NewTokens, Placed, Said
from loadtest.words import as_words
from loadtest.workloads import Arrival
from radixfleet.types import TokenArray

_MAX_ERROR_CHARACTERS = 300
_LINE_BYTES = 1 << 20
_OK = 200


class PromptDetails(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """What a server has counted; None: it does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one completion."""

    text: str | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """An event of a streamed completion, as far as it is read here."""

    choices: list[ChunkChoice] | None = None
    usage: Usage | None = None
    error: Any = None

    def counts_after(self, before: Usage) -> Usage:
        """The counts known after this chunk: its own where it has any, else those before. Some servers send {}."""
        return before if self.usage is None or self.usage.completion_tokens is None else self.usage


_CHUNKS = msgspec.json.Decoder(Chunk)


class _ListedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Listing(msgspec.Struct):
    data: list[_ListedModel]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says of a model."""

    name: str
    max_context_tokens: int | None
    """None: it does not say."""


class HttpCaller:
    """One server. The session must not limit connections."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        model: str,
        timeout_s: float | None = None,
        key: str = "",
        as_text: bool = False,
    ) -> None:
        """`url`: http://host:port, with or without /v1. `as_text`: prompts are words, see `loadtest.words`."""
        self._session = session
        self._url = base(url) + "/completions"
        self._model = model
        self._timeout_s = timeout_s
        self._key = key
        self._as_text = as_text
        self.told_cached = False
        """Whether any answer named the tokens that were cached."""

    async def call(self, arrival: Arrival) -> AsyncGenerator[Said, None]:
        """See `loadtest.callers.Caller`."""
        usage = Usage()
        counted = 0
        finished = False
        token_ids = arrival.token_ids
        body = completion_body(self._model, as_words(token_ids) if self._as_text else token_ids, arrival.max_new_tokens)
        async for chunk in completion_chunks(self._session, self._url, body, key=self._key, timeout_s=self._timeout_s):
            if not counted:
                yield Placed("", 0)
            choices = chunk.choices or ()
            finished = finished or any(choice.finish_reason for choice in choices)
            told = chunk.usage.completion_tokens if chunk.usage is not None else None
            usage = chunk.counts_after(usage)
            # Without a running count, a chunk with text is a token: so servers that name no numbers stream.
            count = told - counted if told else int(any(choice.text for choice in choices))
            if count > 0:
                counted += count
                yield NewTokens(count)
        if not finished:
            raise CallFailed(f"UNAVAILABLE: the answer ended after {counted} tokens without a reason")
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
        self.told_cached = self.told_cached or cached is not None
        yield Ended(
            usage.completion_tokens or counted, cached_tokens=cached or 0, prompt_tokens=usage.prompt_tokens or None
        )


def completion_body(model: str, prompt: str | TokenArray, max_new_tokens: int) -> bytes:
    """Of a greedy completion that is streamed, goes on to its length, and counts its tokens where the server can.

    `prompt`: text, or token ids.
    """
    return orjson.dumps(
        {
            "model": model,
            "prompt": prompt if isinstance(prompt, str) else prompt.tolist(),
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    )


async def completion_chunks(
    session: aiohttp.ClientSession, url: str, body: bytes, *, key: str = "", timeout_s: float | None = None
) -> AsyncGenerator[Chunk, None]:
    """The events of a streamed completion. `url`: of the completions. Raises CallFailed."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(
            url, data=body, headers=headers(key), timeout=timeout, read_bufsize=_LINE_BYTES
        ) as response:
            if response.status != _OK:
                raise CallFailed(f"{response.status}: {_reason(await response.text())}")
            async for line in response.content:
                field, _, data = line.partition(b":")
                if field == b"data" and data.strip() != b"[DONE]":
                    yield _checked(_CHUNKS.decode(data))
    except TimeoutError as error:
        raise CallFailed("DEADLINE_EXCEEDED: the answer took too long") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise CallFailed(f"UNAVAILABLE: {error or type(error).__name__}") from error


async def served_models(session: aiohttp.ClientSession, url: str, key: str = "") -> list[ServedModel]:
    """What a server serves. Raises CallFailed."""
    try:
        async with session.get(base(url) + "/models", headers=headers(key)) as response:
            if response.status != _OK:
                raise CallFailed(f"{response.status}: {_reason(await response.text())}")
            listed = msgspec.json.decode(await response.read(), type=_Listing).data
            return [ServedModel(each.id, each.max_model_len) for each in listed]
    except aiohttp.ClientResponseError as error:  # gRPC begins with frames of HTTP/2, which help nobody in a message
        raise CallFailed(f"UNAVAILABLE: {url} does not speak HTTP/1.1: is it the port of gRPC?") from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise CallFailed(f"UNAVAILABLE: {url} lists no models: {error or type(error).__name__}") from error


def base(url: str) -> str:
    """The base URL of OpenAI's API at `url`: it ends in /v1."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def headers(key: str) -> dict[str, str]:
    """HTTP headers of a request; `key`: the API key, empty for none."""
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def _checked(chunk: Chunk) -> Chunk:
    if error := chunk.error:
        code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        raise CallFailed(f"{str(code or 'error').upper()}: {message}")
    return chunk


def _reason(text: str) -> str:
    """Why a server refuses, by its error object, or by what it wrote."""
    try:
        error = orjson.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:_MAX_ERROR_CHARACTERS]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:_MAX_ERROR_CHARACTERS]
