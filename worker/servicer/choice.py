"""One of the n completions of a request, and what the client is still to be sent of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from radixfleet.output_text.output import OutputText
from radixfleet.v1 import inference_pb2
from worker.core.logits import TokenLogprobs
from worker.core.messages import PromptLogprobs
from worker.engine.handle import RequestStream

_RUN_TOKENS = 1024
"""Prompt tokens in a message: with 20 of the likeliest for each, it has about 200 kB."""


@dataclass(slots=True)
class Choice:
    """Where one completion stands."""

    index: int
    stream: RequestStream
    text: OutputText
    last_token_s: float | None = None


@dataclass(slots=True)
class _Pending:
    """New tokens of one completion."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def message(self) -> inference_pb2.Delta:
        return inference_pb2.Delta(
            token_ids=self.token_ids,
            text="".join(self.texts),
            logprobs=[_told(each.logprob, each.top_ids, each.top_logprobs) for each in self.logprobs],
        )


@dataclass(slots=True)
class Outbox:
    """What the client has not been sent yet. What piles up is joined: one Delta for each completion."""

    started: inference_pb2.Started | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pending: dict[int, _Pending] = field(default_factory=dict)
    finished: list[tuple[int, inference_pb2.Finished]] = field(default_factory=list)
    """In the order in which they finished: the last has usage."""

    def add(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs], texts: list[str]) -> None:
        """New tokens."""
        pending = self.pending.setdefault(index, _Pending())
        pending.token_ids += token_ids
        pending.logprobs += logprobs
        pending.texts += texts

    def take(self) -> list[inference_pb2.GenerateResponse]:
        """Empty the box into messages, in the order of the contract."""
        responses = []
        if self.started is not None:
            responses.append(inference_pb2.GenerateResponse(started=self.started))
        for told in self.prompt_logprobs:
            responses += [inference_pb2.GenerateResponse(prompt_logprobs=message) for message in _runs(told)]
        for index, pending in self.pending.items():
            responses.append(inference_pb2.GenerateResponse(delta=pending.message(), index=index))
        responses += [inference_pb2.GenerateResponse(finished=each, index=index) for index, each in self.finished]
        self.started, self.prompt_logprobs, self.pending, self.finished = None, [], {}, []
        return responses


def _runs(told: PromptLogprobs) -> Iterator[inference_pb2.PromptLogprobs]:
    """Messages of bounded size."""
    num_tokens = len(told.logprobs)
    tops = np.reshape(told.top_ids, (num_tokens, -1)), np.reshape(told.top_logprobs, (num_tokens, -1))
    entries = (_told(*entry) for entry in zip(told.logprobs.tolist(), *(top.tolist() for top in tops), strict=True))
    for start in range(told.start, told.start + num_tokens, _RUN_TOKENS):
        yield inference_pb2.PromptLogprobs(start=start, tokens=islice(entries, _RUN_TOKENS))


def _told(logprob: float, top_ids: Iterable[int], top_logprobs: Iterable[float]) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(logprob=logprob, top_token_ids=top_ids, top_logprobs=top_logprobs)
