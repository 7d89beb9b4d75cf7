"""Fleets behind OpenAI's HTTP, ours or another router's: how they are named, what they serve, how they are asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from deploy.bench.fleet import Demand, Target, UnfitWorkload
from loadtest.http_caller import HttpCaller, ServedModel, served_models

_UNKNOWN_CONTEXT = 1 << 20
_NAMELESS = "unknown"
"""What sglang-router calls the model of workers that do not tell it."""


@dataclass(frozen=True, slots=True)
class HttpFleet:
    """One that is asked over HTTP."""

    name: str
    url: str
    key: str = ""
    """Shown as a bearer token."""

    @classmethod
    def named(cls, text: str, key: str = "") -> HttpFleet:
        """Of "NAME=URL" or a URL, which then names it by its host and port. Raises ValueError."""
        name, equals, url = text.partition("=")
        if not equals or "://" in name:
            name, url = "", text
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise ValueError(f"write http://HOST:PORT, or NAME=http://HOST:PORT; got {text!r}")
        return cls(name or parts.netloc, url, key)


@asynccontextmanager
async def http_caller(
    fleet: HttpFleet, demand: Demand, model: ServedModel, *, as_text: bool
) -> AsyncIterator[HttpCaller]:
    """What puts the requests to it. `as_text`: as words instead of token ids."""
    async with _session() as session:
        yield HttpCaller(
            session, fleet.url, model=model.name, timeout_s=demand.timeout_s, key=fleet.key, as_text=as_text
        )


async def survey_http(
    fleet: HttpFleet, model: str, *, vocab_size: int, kv_tokens: int, num_workers: int
) -> tuple[Target, ServedModel]:
    """What serves there, and what it is assumed to be behind that: HTTP tells nothing of workers.

    Raises UnfitWorkload and CallFailed.
    """
    async with _session() as session:
        served = await served_models(session, fleet.url, fleet.key)
    if model and [each.name for each in served] == [_NAMELESS]:
        served = [ServedModel(model, None)]
    chosen = [each for each in served if not model or each.name == model]
    if not chosen or (len(chosen) > 1 and not model):
        names = ", ".join(each.name for each in served) or "none"
        raise UnfitWorkload(f"{fleet.name} serves {names}: name one with --model")
    context = chosen[0].max_context_tokens or _UNKNOWN_CONTEXT
    return Target(fleet.name, ("",) * num_workers, kv_tokens, vocab_size, context), chosen[0]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
