"""Answers that are streamed: the same pieces as those of `whole`, each as the events that tell it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from radixfleet.errors import RadixfleetError
from router.http.errors import error_answer
from router.http.openai.answers import Choices, Part, usage_of
from router.http.openai.requests import StreamOptions
from router.http.openai.shapes import ChatChunk, CompletionChunk, Usage


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    data: bytes
    name: str = ""
    """Empty: it has none."""


class Streamed(Protocol):
    """An answer on its way."""

    def add(self, part: Part, model: str) -> Sequence[Event]:
        """Of the next piece of one of its choices."""
        ...

    def end(self) -> Sequence[Event]:
        """All has been told."""
        ...

    def fail(self, error: RadixfleetError) -> Sequence[Event]:
        """It ends here, and is not complete."""
        ...


class Chunks:
    """Of a chat, or of completions: an event a piece, then [DONE]; an error object where it failed."""

    def __init__(
        self,
        answer_id: str,
        chunk: type[ChatChunk | CompletionChunk],
        choices: Sequence[Choices],
        options: StreamOptions,
    ) -> None:
        """`choices`: whose tokens count."""
        self._answer_id = answer_id
        self._chunk = chunk
        self._choices = choices
        self._has_last_usage = bool(options.include_usage)
        """One more event at the end, with the usage; null in the others."""
        self._has_running_usage = bool(options.continuous_usage_stats)
        self._created = int(time.time())
        self._model = ""
        self._no_usage: msgspec.UnsetType | None = None if options.include_usage else msgspec.UNSET

    def add(self, part: Part, model: str) -> Sequence[Event]:
        """See `Streamed`."""
        self._model = model
        return [self._event([part], self._usage() if self._has_running_usage else self._no_usage)]

    def end(self) -> Sequence[Event]:
        """See `Streamed`."""
        done = Event(b"[DONE]")
        return [self._event([], self._usage()), done] if self._has_last_usage else [done]

    def fail(self, error: RadixfleetError) -> Sequence[Event]:
        """See `Streamed`. No [DONE] follows."""
        return [Event(msgspec.json.encode(error_answer(error)))]

    def _event(self, parts: list[Part], usage: Usage | msgspec.UnsetType | None) -> Event:
        chunk = self._chunk(self._answer_id, self._created, self._model, parts, usage)  # type: ignore[arg-type]
        return Event(msgspec.json.encode(chunk))

    def _usage(self) -> Usage:
        return usage_of([choices.meter for choices in self._choices])
