"""An answer over OpenAI's HTTP as the messages of our own `Inference.Generate`.

Text is the engine's own; token ids are there where it tells them. What our contract has no other word for becomes text
in the notation that models write it in: calls of tools as <tool_call>, reasoning as <think>. Usage follows the last
finish_reason, so the last completion to end is held back until the stream is over.

An engine that goes past the limit of new tokens does not know it, and is cut off: exactly there where it tells token
ids, else when it has sent more pieces or characters than so many tokens can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from radixfleet import convert
from radixfleet.clock import Clock
from radixfleet.errors import InternalError, InvalidRequest, Overloaded, RadixfleetError, Unavailable
from radixfleet.types import FinishReason
from radixfleet.v1 import inference_pb2
from router.dialects.answer import Names
from router.dialects.finish_reasons import finish_reason
from router.dialects.http_events import (
    ChoicePiece,
    Event,
    MessagePiece,
    ToolCallPiece,
    count_told,
    error_message,
    error_status,
)
from router.dialects.speaker import Faulty

_ID_MARK = "token_id:"
_RETRY_AFTER_S = 1.0
_MOST_PIECES, _MOST_CHARACTERS = (8, 64), (128, 4096)
"""In so many tokens: so many for each, and so many more. Some servers send a letter at a time."""
_BY_THE_REQUEST = frozenset(
    {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY}
)


@dataclass(slots=True)
class _Call:
    """A call of a tool in the making."""

    index: int | None
    id: str | None
    name: str = ""
    arguments: str = ""

    def text(self) -> str:
        """The call as models write it, for the text of an answer."""
        try:
            arguments: Any = msgspec.json.decode(self.arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            arguments = self.arguments
        call = msgspec.json.encode({"name": self.name, "arguments": arguments}).decode()
        return f"<tool_call>\n{call}\n</tool_call>\n"

    @property
    def is_whole(self) -> bool:
        """Whether its arguments are complete JSON."""
        try:
            msgspec.json.decode(self.arguments)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


@dataclass(slots=True)
class _Choice:
    """One of the n completions."""

    num_tokens: int = 0
    num_ids: int = 0
    """The part of `num_tokens` whose ids were told."""
    num_pieces: int = 0
    num_characters: int = 0
    is_thinking: bool = False
    calls: list[_Call] = field(default_factory=list)
    was_cut: bool = False
    """The engine went past the limit."""
    end: inference_pb2.Finished | None = None


class HttpAnswer:
    """One request's. Feed it events until there are none, or until it `is_complete` and no more come; then `finish`."""

    def __init__(
        self,
        names: Names,
        clock: Clock,
        *,
        prompt_tokens: int | None,
        max_new_tokens: int,
        most_new_tokens: int | None = None,
        generated_tokens: int = 0,
        n: int = 1,
        num_logprobs: int | None = None,
    ) -> None:
        """`prompt_tokens`: None where they are not known. `generated_tokens`: those that the client has already, of
        `max_new_tokens` at most. `most_new_tokens`: where the engine is cut off, if not there.
        """
        self._names = names
        self._clock = clock
        self._prompt_tokens = prompt_tokens
        self._generated_tokens = generated_tokens
        self._num_logprobs = num_logprobs
        self._most_tokens = (max_new_tokens if most_new_tokens is None else most_new_tokens) - generated_tokens
        self._choices = [_Choice() for _ in range(n)]
        self._last = 0
        """The completion that ended last."""
        self._sent_s = clock.now()
        self._first_s: float | None = None
        self._told_prompt_tokens = 0
        self._told_completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        """What the engine told; None: nothing, so far."""
        self.is_whole = generated_tokens >= max_new_tokens
        """The client has all of it, and the engine is not to be asked."""
        if self.is_whole:
            self._choices[0].end = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH)

    @property
    def was_cut(self) -> bool:
        """The engine went past the limit: what it says further is of no interest."""
        return any(choice.was_cut for choice in self._choices)

    @property
    def is_complete(self) -> bool:
        """All completions have ended; usage may still come."""
        return all(choice.end is not None for choice in self._choices)

    def start(self) -> inference_pb2.GenerateResponse:
        """The first message: the engine has taken the request."""
        started = inference_pb2.Started(
            request_id=self._names.request_id,
            execution_id=self._names.execution_id,
            worker_id=self._names.worker_id,
            prompt_tokens=self._prompt_tokens or 0,
            counts_follow=True,
            is_whole=self.is_whole,
        )
        return inference_pb2.GenerateResponse(started=started)

    def take(self, event: Event) -> Iterator[inference_pb2.GenerateResponse]:
        """The messages that an event becomes. Raises RadixfleetError for an answer that the engine gave up."""
        if event.error is not None or event.object == "error":
            raise _given_up(event)
        self._count(event)
        for piece in event.choices or ():
            if not 0 <= piece.index < len(self._choices):
                raise Faulty(f"it sent completion {piece.index} of {len(self._choices)}")
            choice = self._choices[piece.index]
            if choice.end is not None:
                continue
            within = self._within(choice, piece)
            text, tokens = self._text(choice, within), (within.token_ids or [])
            if text or tokens:
                yield self._delta(choice, within, text, tokens)
            if within.finish_reason:
                choice.end = _finished(within)
                if not self.is_complete:
                    yield inference_pb2.GenerateResponse(finished=choice.end, index=piece.index)
                else:
                    self._last = piece.index

    def finish(self, *, tells_cached: bool) -> inference_pb2.GenerateResponse:
        """The last message. `tells_cached`: an engine that tells how much it had cached, and is silent of none.

        Raises Faulty where the answer has no end.
        """
        if not self.is_complete:
            if any(choice.end is not None for choice in self._choices):
                raise InvalidRequest("the engine that was chosen gives one completion at a time", field="sampling.n")
            raise Faulty("it ended the answer without saying why")
        if self.cached_tokens is None and tells_cached:
            self.cached_tokens = 0
        last = self._choices[self._last].end
        assert last is not None, "all have ended"
        last.usage.CopyFrom(self._usage())
        return inference_pb2.GenerateResponse(finished=last, index=self._last)

    def _count(self, event: Event) -> None:
        if event.usage is not None:
            self._told_prompt_tokens = count_told(event.usage.prompt_tokens) or 0
            self._told_completion_tokens = count_told(event.usage.completion_tokens)
            details = event.usage.prompt_tokens_details
            if details is not None and (cached := count_told(details.cached_tokens)) is not None:
                self.cached_tokens = cached
        timings = event.timings
        if timings is not None and self.cached_tokens is None:
            self.cached_tokens = count_told(timings.cache_n)
            if self.cached_tokens is not None:
                prompt_tokens = count_told(self.cached_tokens + (count_told(timings.prompt_n) or 0))
                self._told_prompt_tokens = self._told_prompt_tokens or prompt_tokens or 0
                if self._told_completion_tokens is None:
                    self._told_completion_tokens = count_told(timings.predicted_n)

    def _within(self, choice: _Choice, piece: ChoicePiece) -> ChoicePiece:
        """A piece, ended where it goes past the limit. The text of several tokens, of which some are, stays whole."""
        room = self._most_tokens - choice.num_ids
        choice.num_pieces += 1
        choice.num_characters += _characters(piece)
        is_over = len(piece.token_ids or ()) > room
        if not (is_over or self._is_far_past(choice)):
            return piece
        choice.was_cut = True
        if not is_over and choice.num_pieces == 1:  # a whole answer: its beginning
            return _beginning(piece, _most(_MOST_CHARACTERS, self._most_tokens))
        if not is_over or not room:
            is_chat = piece.delta is not None or piece.message is not None
            return ChoicePiece(index=piece.index, delta=MessagePiece() if is_chat else None, finish_reason="length")
        return msgspec.structs.replace(piece, token_ids=(piece.token_ids or [])[:room], finish_reason="length")

    def _is_far_past(self, choice: _Choice) -> bool:
        """By what can be told of text alone."""
        tokens = self._most_tokens
        return choice.num_pieces > _most(_MOST_PIECES, tokens) or choice.num_characters > _most(
            _MOST_CHARACTERS, tokens
        )

    def _text(self, choice: _Choice, piece: ChoicePiece) -> str:
        """What a piece adds, in the notation of models."""
        message = piece.delta or piece.message
        if message is None:
            return piece.text or ""
        text = _thought(choice, message, is_end=bool(piece.finish_reason)) + (message.content or "")
        for call in message.tool_calls or ():
            _add(choice.calls, call)
        if piece.finish_reason:
            text += "".join(call.text() for call in choice.calls if call.is_whole or not choice.was_cut)
        return text

    def _delta(
        self, choice: _Choice, piece: ChoicePiece, text: str, tokens: list[int]
    ) -> inference_pb2.GenerateResponse:
        if self._first_s is None:
            self._first_s = self._clock.now()
        choice.num_tokens += len(tokens) or 1
        choice.num_ids += len(tokens)
        logprobs = [] if self._num_logprobs is None else _logprobs(piece.logprobs, self._num_logprobs)
        if choice.was_cut:
            del logprobs[len(tokens) :]
        if len(logprobs) != (0 if self._num_logprobs is None else len(tokens)):
            raise InternalError(f"the engine told {len(logprobs)} log probabilities of {len(tokens)} tokens")
        try:
            delta = inference_pb2.Delta(token_ids=tokens, text=text, logprobs=logprobs)
        except ValueError as error:
            raise Faulty(f"it sent token ids that are none: {error}") from error
        return inference_pb2.GenerateResponse(delta=delta, index=piece.index)

    def _usage(self) -> inference_pb2.Usage:
        """The engine's own counts, else what was counted here, where an event is a token."""
        now_s = self._clock.now()
        first_s = now_s if self._first_s is None else self._first_s
        counted = sum(
            min(choice.num_tokens, self._most_tokens) if choice.was_cut else choice.num_tokens
            for choice in self._choices
        )
        told = None if self.was_cut else self._told_completion_tokens
        prompt_tokens = self._told_prompt_tokens or self._prompt_tokens or 0
        return inference_pb2.Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=min(self.cached_tokens or 0, prompt_tokens),
            cached_tokens_unknown=self.cached_tokens is None,
            completion_tokens=self._generated_tokens + (counted if told is None else told),
            prefill_s=first_s - self._sent_s,
            decode_s=now_s - first_s,
        )


def _most(measure: tuple[int, int], tokens: int) -> int:
    each, more = measure
    return each * tokens + more


def _characters(piece: ChoicePiece) -> int:
    """The characters of a piece: its text, and what becomes text at the end."""
    message = piece.delta or piece.message
    if message is None:
        return len(piece.text or "")
    calls = [call.function for call in message.tool_calls or () if call.function is not None]
    texts = [message.content, message.reasoning_content or message.reasoning]
    texts += [text for call in calls for text in (call.name, call.arguments)]
    return sum(len(text) for text in texts if text)


def _beginning(piece: ChoicePiece, characters: int) -> ChoicePiece:
    """Of its text, and its end; calls of tools that are not whole are none."""
    message = piece.delta or piece.message
    text = (piece.text if message is None else message.content) or ""
    return ChoicePiece(index=piece.index, text=text[:characters], finish_reason="length")


def _thought(choice: _Choice, message: MessagePiece, *, is_end: bool) -> str:
    """Reasoning, between marks."""
    thought = message.reasoning_content or message.reasoning or ""
    text = thought
    if thought and not choice.is_thinking:
        choice.is_thinking, text = True, f"<think>\n{thought}"
    if choice.is_thinking and (message.content or message.tool_calls or is_end):
        choice.is_thinking, text = False, f"{text}\n</think>\n\n"
    return text


def _add(calls: list[_Call], piece: ToolCallPiece) -> None:
    """Some engines give all calls one index, or none: then another id, or where there is none another name, is another
    call. A piece without a name goes on with one, whatever its id.
    """
    name = (piece.function.name if piece.function is not None else None) or ""
    call = next((call for call in reversed(calls) if call.index == piece.index), None)
    if call is not None:
        is_named_again = call.name and (piece.index is None or call.arguments)
        is_other = piece.id != call.id if piece.id and call.id else is_named_again
        call = None if name and is_other else call
    if call is None:
        call = _Call(piece.index, piece.id)
        calls.append(call)
    if piece.function is not None:
        call.name += name
        call.arguments += piece.function.arguments or ""


def _given_up(event: Event) -> RadixfleetError:
    """Whose fault it is by the status that an engine has put into its words, having said 200 before it looked."""
    detail = event.error if event.error is not None else event.message
    told = error_message(msgspec.json.encode(detail), "no reason")
    where: Any = event.error if isinstance(event.error, dict) else {"code": event.code, "type": event.type}
    status = error_status(where.get("code"), where.get("type"))
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return Overloaded(f"the engine is busy: {told}", retry_after_s=_RETRY_AFTER_S)
    if status in _BY_THE_REQUEST:
        return InvalidRequest(told)
    return Unavailable(f"the engine gave the answer up: {told}")


def _finished(piece: ChoicePiece) -> inference_pb2.Finished:
    """Raises InternalError for an answer that failed."""
    reason = finish_reason(piece.finish_reason or "")
    finished = inference_pb2.Finished(reason=convert.finish_reason_to_pb(reason))
    matched = piece.stop_reason if piece.stop_reason is not None else piece.matched_stop
    if reason is FinishReason.STOP:
        if isinstance(matched, str):
            finished.matched_stop = matched
        elif isinstance(matched, int) and 0 <= matched < 2**32:
            finished.matched_token_id = matched
    return finished


def _logprobs(told: Any, num_tops: int) -> list[inference_pb2.TokenLogprobs]:
    """Of completions, with token ids in the place of texts. Raises InternalError."""
    if not told:
        return []
    try:
        tops = told.get("top_logprobs") or [None] * len(told["token_logprobs"])
        return [
            _token_logprobs(logprob, top or {}, num_tops)
            for logprob, top in zip(told["token_logprobs"], tops, strict=True)
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InternalError(f"the engine told log probabilities in another form: {error}") from error


def _token_logprobs(logprob: float, top: Mapping[str, float], num_tops: int) -> inference_pb2.TokenLogprobs:
    ranked = sorted(((value, int(name.removeprefix(_ID_MARK))) for name, value in top.items()), reverse=True)[:num_tops]
    return inference_pb2.TokenLogprobs(
        logprob=logprob,
        top_token_ids=[token_id for _, token_id in ranked],
        top_logprobs=[value for value, _ in ranked],
    )
