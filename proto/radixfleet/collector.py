"""Puts the events of one generation together."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixfleet.answers import Choice, Completion, Delta, Event, Finished, PromptLogprobs, Started, TokenLogprobs
from radixfleet.errors import InternalError
from radixfleet.types import Usage


@dataclass(slots=True)
class _Growing:
    """One of the n completions, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None

    def choice(self, index: int) -> Choice:
        if self.finished is None:
            raise InternalError(f"the stream ended without the Finished message of completion {index}")
        return Choice(index, "".join(self.texts), tuple(self.token_ids), tuple(self.logprobs), self.finished)


class Collector:
    """Takes the events in order; `completion` gives the whole."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._usage: Usage | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._growing: dict[int, _Growing] = {}

    def take(self, event: Event) -> None:
        """The next event."""
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, PromptLogprobs):
            self._prompt_logprobs += event.tokens
        else:
            growing = self._growing.setdefault(event.index, _Growing())
            growing.texts.append(event.text)
            if isinstance(event, Delta):
                growing.token_ids += event.token_ids
                growing.logprobs += event.logprobs
            else:
                growing.finished = event
                self._usage = event.usage or self._usage

    def completion(self, *, ttft_s: float, total_s: float) -> Completion:
        """After the last event. Raises InternalError when one of them was missing."""
        if self._started is None or self._usage is None:
            raise InternalError("the stream has no Started message, or no usage in its last one")
        return Completion(
            started=self._started,
            choices=tuple(growing.choice(index) for index, growing in sorted(self._growing.items())),
            usage=self._usage,
            prompt_logprobs=tuple(self._prompt_logprobs),
            ttft_s=ttft_s,
            total_s=total_s,
        )
