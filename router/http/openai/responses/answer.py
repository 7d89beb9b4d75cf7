"""Responses, whole and streamed, from the pieces of a chat."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET

from radixfleet.errors import InvalidRequest, Overloaded, RadixfleetError
from router.http.openai.answers import Choices, Part, usage_of
from router.http.openai.requests import TextFormat
from router.http.openai.responses.output import ResponseOutput
from router.http.openai.responses.request import ResponsesRequest, TextOptions
from router.http.openai.responses.shapes import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseUsage,
)
from router.http.openai.shapes import ChatPart, Usage
from router.http.openai.streamed import Event


def begun(request: ResponsesRequest, request_id: str) -> Response:
    """A response without output, which tells what was asked for. Raises InvalidRequest."""
    return Response(
        id=f"resp_{request_id}",
        created_at=int(time.time()),
        model=request.model or "",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        top_logprobs=request.top_logprobs or 0,
        text=_text(request.text or TextOptions()),
        tools=_encoded([{"type": "function"} | tool for tool in request.tools or ()]),
        tool_choice=_encoded(request.tool_choice or "auto"),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        metadata=request.metadata or {},
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
    )


def _text(asked: TextOptions) -> TextOptions:
    return TextOptions(asked.format or TextFormat(), asked.verbosity)


def _encoded(given: object) -> msgspec.Raw:
    """Once, and where it can still be refused: what was read on a shorter stack may be too deep to be written."""
    try:
        return msgspec.Raw(msgspec.json.encode(given))
    except RecursionError:
        raise InvalidRequest("the body is not served: it is nested too deeply") from None


class WholeResponse:
    """A response in the making; see `Whole`."""

    def __init__(self, base: Response, request_id: str) -> None:
        """`base`: see `begun`."""
        self._base = base
        self._output = ResponseOutput(request_id)

    def add(self, part: Part) -> None:
        """See `Whole`."""
        assert isinstance(part, ChatPart), "made by ChatChoices"
        self._output.add(part)

    def answer(self, answer_id: str, now: int, model: str, usage: Usage) -> Response:
        """See `Whole`."""
        return _ended(msgspec.structs.replace(self._base, id=answer_id, model=model), self._output, now, usage)


class StreamedResponse:
    """A response on its way; see `Streamed`."""

    def __init__(self, base: Response, request_id: str, choices: Sequence[Choices]) -> None:
        """`base`: see `begun`. `choices`: whose tokens count."""
        self._base = base
        self._output = ResponseOutput(request_id)
        self._choices = choices
        self._num_events = 0

    def add(self, part: Part, model: str) -> list[Event]:
        """See `Streamed`."""
        assert isinstance(part, ChatPart), "made by ChatChoices"
        first = self._first(model)
        return [*first, *map(self._event, self._output.add(part))]

    def end(self) -> list[Event]:
        """See `Streamed`."""
        response = _ended(self._base, self._output, int(time.time()), self._usage())
        kind = ResponseIncomplete if self._output.is_cut else ResponseCompleted
        return [self._event(kind(response=response))]

    def fail(self, error: RadixfleetError) -> list[Event]:
        """See `Streamed`. Nothing but comments may have been written."""
        first, usage = self._first(self._base.model), self._usage()
        failed = msgspec.structs.replace(
            self._base,
            status="failed",
            error=ResponseError(_code(error), str(error)),
            output=self._output.items(),
            usage=_response_usage(usage) if usage.prompt_tokens else None,
        )
        return [*first, self._event(ResponseFailed(response=failed))]

    def _first(self, model: str) -> list[Event]:
        if self._num_events:
            return []
        self._base = msgspec.structs.replace(self._base, model=model)
        return [
            self._event(ResponseCreated(response=self._base)),
            self._event(ResponseInProgress(response=self._base)),
        ]

    def _event(self, event: ResponseEvent) -> Event:
        event.sequence_number = self._num_events
        self._num_events += 1
        return Event(msgspec.json.encode(event), str(event.__struct_config__.tag))

    def _usage(self) -> Usage:
        return usage_of([choices.meter for choices in self._choices])


def _ended(base: Response, output: ResponseOutput, now: int, usage: Usage) -> Response:
    return msgspec.structs.replace(
        base,
        status="incomplete" if output.is_cut else "completed",
        completed_at=None if output.is_cut else now,
        incomplete_details=IncompleteDetails() if output.is_cut else None,
        output=output.items(),
        usage=_response_usage(usage),
    )


def _response_usage(usage: Usage) -> ResponseUsage:
    details = usage.prompt_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(0 if details is UNSET else details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=usage.total_tokens,
    )


def _code(error: RadixfleetError) -> Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]:
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
