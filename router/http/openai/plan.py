"""What a request for completions or for a chat comes to: requests for the fleet, and how their replies are answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixfleet.errors import InvalidRequest
from radixfleet.v1 import inference_pb2
from router.http.openai.answers import ChatChoices, Choices, CompletionChoices
from router.http.openai.constraints import constraint_field, grammar_of_few
from router.http.openai.requests import ChatRequest, ChoicesRequest, CompletionRequest, StreamOptions
from router.http.openai.shapes import ChatChunk, CompletionChunk
from router.http.openai.streamed import Chunks, Streamed
from router.http.openai.tools import shown_tools
from router.http.openai.translation import chat_request, completion_requests
from router.http.openai.whole import Whole, WholeChat, WholeCompletion

_LIMITS = ("max_completion_tokens", "max_tokens")
"""The first that is given counts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One HTTP request."""

    answer_id: str
    requests: Sequence[inference_pb2.GenerateRequest]
    choices: Sequence[Choices]
    """Of each of `requests`."""
    whole: Whole
    streamed: Streamed
    is_stream: bool
    """Which of the two the client gets."""
    limit: str
    """The client's name for how long an answer may be; "": it does not say, so what the context leaves is enough."""
    constraint: str
    """The client's name for what the answer has to keep to."""
    grammar_of_few: inference_pb2.Grammar | None
    """See there."""
    in_client_names: Callable[[InvalidRequest], InvalidRequest] = lambda error: error
    """The same error, where the client's names for fields are not those of `limit`, `constraint` and a chat."""


def chat_plan(request: ChatRequest, request_id: str) -> Plan:
    """Of POST /v1/chat/completions. Raises InvalidRequest."""
    message = chat_request(request)
    choices = ChatChoices({tool["function"]["name"] for tool in shown_tools(request)})
    return _plan(f"chatcmpl-{request_id}", request, [message], [choices], WholeChat(), ChatChunk)


def completion_plan(request: CompletionRequest, request_id: str) -> Plan:
    """Of POST /v1/completions. Raises InvalidRequest."""
    messages = completion_requests(request)
    choices = [
        CompletionChoices(
            number * (request.n or 1),
            echo=bool(request.echo),
            echo_text=message.prompt.text,
            prompt_only=request.max_tokens == 0,
        )
        for number, message in enumerate(messages)
    ]
    return _plan(f"cmpl-{request_id}", request, messages, choices, WholeCompletion(), CompletionChunk)


def _plan(
    answer_id: str,
    request: ChoicesRequest,
    messages: Sequence[inference_pb2.GenerateRequest],
    choices: Sequence[Choices],
    whole: Whole,
    chunk: type[ChatChunk | CompletionChunk],
) -> Plan:
    return Plan(
        answer_id=answer_id,
        requests=messages,
        choices=choices,
        whole=whole,
        streamed=Chunks(answer_id, chunk, choices, request.stream_options or StreamOptions()),
        is_stream=bool(request.stream),
        limit=next((name for name in _LIMITS if getattr(request, name, None) is not None), ""),
        constraint=constraint_field(request),
        grammar_of_few=grammar_of_few(request) if isinstance(request, ChatRequest) else None,
    )
