"""An engine's answer, which is token ids alone, as the messages of our own `Inference.Generate`.

Text, stop strings and the order of messages are made here, with what our workers make them of. Engines are not told the
stop strings, so an engine computes a token or two beyond one before it hears that the answer is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixfleet import convert
from radixfleet.clock import Clock
from radixfleet.errors import InternalError
from radixfleet.output_text.output import OutputText
from radixfleet.output_text.texts import texts_of
from radixfleet.text import Tokenizer
from radixfleet.types import FinishReason, SamplingParams, TokenArray
from radixfleet.v1 import inference_pb2
from router.dialects.finish_reasons import finish_reason
from router.dialects.speaker import Faulty
from router.dialects.words import Part

_RUN_TOKENS = 1024


@dataclass(slots=True)
class _Choice:
    """One of the n completions."""

    text: OutputText
    num_tokens: int = 0
    last_token: int | None = None
    is_finished: bool = False
    ended_by_engine: bool = False


@dataclass(slots=True)
class _Times:
    sent_s: float
    first_s: float | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """What the answer's first message says of it."""

    request_id: str
    execution_id: str
    worker_id: str


class Answer:
    """One request's. Feed it `Part`s until `is_complete`."""

    def __init__(
        self,
        names: Names,
        prompt: TokenArray,
        generated: TokenArray,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        clock: Clock,
    ) -> None:
        """`generated`: the beginning of the answer, that the client has already. `sampling` has a max_new_tokens."""
        self._names = names
        self._prompt_tokens = len(prompt)
        self._generated_tokens = len(generated)
        self._most_tokens = (sampling.max_new_tokens or 0) - len(generated)
        self._sampling = sampling
        self._clock = clock
        self._times = _Times(clock.now())
        self._stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(tokenizer.eos_token_ids)
        )
        self._choices = [_Choice(text) for text in texts_of(tokenizer, sampling, self._stop_ids, prompt)]
        self._cached_tokens: int | None = None
        self.ending = self._replay(generated.tolist())
        """Where the client has all of the answer, its end: the engine is not asked, and what it cached is not known."""

    @property
    def is_complete(self) -> bool:
        """All completions have ended; what the engine says further is of no interest."""
        return all(choice.is_finished for choice in self._choices)

    @property
    def ended_by_engine(self) -> bool:
        """The engine knows that it is over: nothing needs to be aborted there."""
        return all(choice.ended_by_engine for choice in self._choices)

    def emitted(self, index: int) -> int:
        """Tokens that came of a completion so far. Raises Faulty for one that was not asked for."""
        if index >= len(self._choices):
            raise Faulty(f"it sent completion {index} of {len(self._choices)}")
        return self._choices[index].num_tokens

    def take(self, part: Part) -> Iterator[inference_pb2.GenerateResponse]:
        """The messages that a part becomes. Raises InternalError for an answer that the engine gave up, or that lacks
        the log probabilities.
        """
        choice = self._choices[part.index]
        choice.ended_by_engine |= bool(part.reason)
        if choice.is_finished:
            return
        if self._cached_tokens is None:
            yield self._start(part.cached_tokens)
        if part.prompt_logprobs is not None and not part.index:
            yield from _prompt_logprobs(part.prompt_logprobs, self._sampling.prompt_logprobs)
        room = self._most_tokens - choice.num_tokens
        if len(part.token_ids) > room:  # an engine that goes past the limit does not know it
            part = replace(part, reason="length")
        if part.token_ids and room:
            yield self._delta(choice, part, room)
        if choice.text.matched_stop is not None or part.reason:
            yield self._finish(choice, part)

    def _replay(self, generated: Sequence[int]) -> Part | None:
        """Bring the text to where the client's own ends; the end of the answer, when that is it."""
        text = self._choices[0].text
        for count, token_id in enumerate(generated, start=1):
            text.push(token_id)
            if text.matched_stop is not None:
                return Part(0, (), 0, reason="stop")
            if token_id in self._stop_ids and count > self._sampling.min_new_tokens:
                return Part(0, (), 0, reason="stop", matched_token_id=token_id)
        limit = self._sampling.max_new_tokens
        return Part(0, (), 0, reason="length") if limit is not None and len(generated) >= limit else None

    def _start(self, cached_tokens: int) -> inference_pb2.GenerateResponse:
        self._cached_tokens = min(cached_tokens, self._prompt_tokens)
        started = inference_pb2.Started(
            request_id=self._names.request_id,
            execution_id=self._names.execution_id,
            worker_id=self._names.worker_id,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            counts_follow=self.ending is not None,
            is_whole=self.ending is not None,
        )
        return inference_pb2.GenerateResponse(started=started)

    def _delta(self, choice: _Choice, part: Part, room: int) -> inference_pb2.GenerateResponse:
        """New tokens, up to the one that completes a stop string; `room` of them at most."""
        if self._times.first_s is None:
            self._times.first_s = self._clock.now()
        texts = []
        for token_id in part.token_ids[:room]:
            texts.append(choice.text.push(token_id))
            if choice.text.matched_stop is not None:
                break
        count = len(texts)
        choice.num_tokens += count
        choice.last_token = part.token_ids[count - 1]
        logprobs = _output_logprobs(part, self._sampling.logprobs)[:count]
        delta = inference_pb2.Delta(token_ids=part.token_ids[:count], text="".join(texts), logprobs=logprobs)
        return inference_pb2.GenerateResponse(delta=delta, index=part.index)

    def _finish(self, choice: _Choice, part: Part) -> inference_pb2.GenerateResponse:
        choice.is_finished = True
        tail = choice.text.finish()
        matched_stop = choice.text.matched_stop
        reason = FinishReason.STOP if matched_stop is not None else finish_reason(part.reason)
        finished = inference_pb2.Finished(reason=convert.finish_reason_to_pb(reason), text=tail)
        if matched_stop is not None:
            finished.matched_stop = matched_stop
        elif reason is FinishReason.STOP:
            matched = part.matched_token_id
            if matched is None and choice.last_token in self._stop_ids:
                matched = choice.last_token
            if matched is not None:
                finished.matched_token_id = matched
        if self.is_complete:
            finished.usage.CopyFrom(self._usage())
        return inference_pb2.GenerateResponse(finished=finished, index=part.index)

    def _usage(self) -> inference_pb2.Usage:
        """Times as they are seen from here: what the engine queued and what it computed cannot be told apart."""
        now_s = self._clock.now()
        first_s = now_s if self._times.first_s is None else self._times.first_s
        return inference_pb2.Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens or 0,
            cached_tokens_unknown=self.ending is not None,
            completion_tokens=self._generated_tokens + sum(choice.num_tokens for choice in self._choices),
            prefill_s=first_s - self._times.sent_s,
            decode_s=now_s - first_s,
        )


def _output_logprobs(part: Part, num_tops: int | None) -> list[inference_pb2.TokenLogprobs]:
    """One for each of the part's tokens, where they were asked for. Raises InternalError."""
    if num_tops is None:
        return []
    values, num_new = list(getattr(part.logprobs, "token_logprobs", ())), len(part.token_ids)
    tops = list(getattr(part.logprobs, "top_logprobs", ())) or [None] * len(values)
    if not num_new <= len(values) == len(tops):
        raise InternalError(f"the engine told {len(values)} log probabilities of {num_new} tokens")
    return [_told(value, top, num_tops) for value, top in zip(values[-num_new:], tops[-num_new:], strict=True)]


def _prompt_logprobs(theirs: Any, num_tops: int | None) -> Iterator[inference_pb2.GenerateResponse]:
    """Runs from the second token on."""
    if num_tops is None:
        return
    tops = list(theirs.top_logprobs) or [None] * len(theirs.token_logprobs)
    told = [
        _told(logprob.value, top, num_tops)
        for logprob, top in zip(theirs.token_logprobs, tops, strict=True)
        if logprob.HasField("value")
    ]
    for start in range(0, len(told), _RUN_TOKENS):
        run = inference_pb2.PromptLogprobs(start=1 + start, tokens=told[start : start + _RUN_TOKENS])
        yield inference_pb2.GenerateResponse(prompt_logprobs=run)


def _told(logprob: float, top: Any, num_tops: int) -> inference_pb2.TokenLogprobs:
    """The likeliest first, and no more than were asked for: some engines add the token itself."""
    ranked = sorted(zip(top.values, top.token_ids, strict=True), reverse=True)[:num_tops] if top is not None else []
    return inference_pb2.TokenLogprobs(
        logprob=logprob,
        top_token_ids=[token_id for _, token_id in ranked],
        top_logprobs=[value for value, _ in ranked],
    )
