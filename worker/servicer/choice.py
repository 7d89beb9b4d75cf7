"""One of the n completions of a request, and what the client is still to be sent of all of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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

    def write(self, delta: inference_pb2.Delta) -> None:
        delta.token_ids.extend(self.token_ids)
        delta.text = "".join(self.texts)
        for each in self.logprobs:
            delta.logprobs.add(logprob=each.logprob, top_token_ids=each.top_ids, top_logprobs=each.top_logprobs)


@dataclass(slots=True)
class Outbox:
    """What the client has not been sent yet. What piles up is joined: one Delta for each completion."""

    started: inference_pb2.Started | None = None
    prompt_logprobs: deque[PromptLogprobs] = field(default_factory=deque)
    pending: dict[int, _Pending] = field(default_factory=dict)
    finished: deque[tuple[int, inference_pb2.Finished]] = field(default_factory=deque)
    """In the order in which they finished: the last has usage."""

    @property
    def is_empty(self) -> bool:
        """Nothing to take."""
        return not (self.pending or self.finished or self.started is not None or self.prompt_logprobs)

    def tell_prompt(self, told: PromptLogprobs) -> None:
        """Log probabilities of a run of the prompt, which may be long."""
        num_tokens = len(told.logprobs)
        top_ids = told.top_ids.reshape(num_tokens, -1)
        top_logprobs = told.top_logprobs.reshape(num_tokens, -1)
        for at in range(0, num_tokens, _RUN_TOKENS):
            run = slice(at, at + _RUN_TOKENS)
            self.prompt_logprobs.append(
                PromptLogprobs(told.uid, told.start + at, told.logprobs[run], top_ids[run], top_logprobs[run])
            )

    def add(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs], texts: list[str]) -> None:
        """New tokens."""
        pending = self.pending.get(index)
        if pending is None:
            self.pending[index] = _Pending(token_ids, logprobs, texts)
            return
        pending.token_ids += token_ids
        pending.logprobs += logprobs
        pending.texts += texts

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        """Move what comes next, in the order of the contract, into an empty message. There must be something."""
        if self.started is not None:
            response.started.CopyFrom(self.started)
            self.started = None
        elif self.prompt_logprobs:
            _write_run(self.prompt_logprobs.popleft(), response.prompt_logprobs)
        elif self.pending:
            index = next(iter(self.pending))
            self.pending.pop(index).write(response.delta)
            response.index = index
        else:
            index, finished = self.finished.popleft()
            response.finished.CopyFrom(finished)
            response.index = index


def _write_run(told: PromptLogprobs, message: inference_pb2.PromptLogprobs) -> None:
    message.start = told.start
    columns = (told.logprobs.tolist(), told.top_ids.tolist(), told.top_logprobs.tolist())
    for logprob, ids, logprobs in zip(*columns, strict=True):
        message.tokens.add(logprob=logprob, top_token_ids=ids, top_logprobs=logprobs)
