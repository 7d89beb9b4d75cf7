"""How one request is put to a fleet, and what the driver hears of it: a protocol, and our own gRPC.

OpenAI's HTTP, which other routers speak too, is `loadtest.http_caller`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from loadtest.workloads import Arrival
from radixfleet.answers import Delta, Finished, RouteDecision, Started
from radixfleet.client import Client
from radixfleet.errors import RadixfleetError


class CallFailed(Exception):
    """The request was refused, or its answer is not complete. The message begins with a status."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker has it."""

    worker_id: str
    cached_tokens: int
    route: RouteDecision | None = None


@dataclass(frozen=True, slots=True)
class NewTokens:
    """So many came at once."""

    count: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is complete."""

    output_tokens: int
    queue_s: float | None = None
    """None: not told."""
    cached_tokens: int | None = None
    """Where that is told at the end only; None: it was told before, or not at all."""
    prompt_tokens: int | None = None
    """As the server counted; None: as many as were sent."""


Said: TypeAlias = Placed | NewTokens | Ended


class Caller(Protocol):
    """Puts requests to one fleet. Used by one event loop, for many requests at once."""

    def call(self, arrival: Arrival) -> AsyncGenerator[Said, None]:
        """One request, tried once, greedy, to its length; `Ended` comes last. Raises CallFailed.

        Closing the iterator ends the request on the fleet.
        """
        ...


class GrpcCaller:
    """A router or worker of ours."""

    def __init__(self, client: Client, *, model: str = "", timeout_s: float | None = None) -> None:
        """`client` must not retry."""
        self._client = client
        self._model = model
        self._timeout_s = timeout_s

    async def call(self, arrival: Arrival) -> AsyncGenerator[Said, None]:
        """See `Caller`."""
        events = self._client.generate(
            arrival.token_ids,
            model=self._model,
            max_new_tokens=arrival.max_new_tokens,
            ignore_eos=True,
            temperature=0.0,
            timeout_s=self._timeout_s,
        )
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Started):
                        yield Placed(event.worker_id, event.cached_tokens, event.route)
                    elif isinstance(event, Delta) and event.token_ids:
                        yield NewTokens(len(event.token_ids))
                    elif isinstance(event, Finished) and event.usage is not None:
                        yield Ended(event.usage.completion_tokens, event.usage.queue_s)
        except RadixfleetError as error:
            raise CallFailed(f"{error.code}: {error}") from error
