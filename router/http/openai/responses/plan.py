"""What a request for a response comes to."""

from __future__ import annotations

from dataclasses import replace

from radixfleet.errors import InvalidRequest
from router.http.openai.plan import Plan, chat_plan
from router.http.openai.responses.answer import StreamedResponse, WholeResponse, begun
from router.http.openai.responses.request import ResponsesRequest
from router.http.openai.responses.translation import chat_of, in_responses_names


def response_plan(request: ResponsesRequest, request_id: str) -> Plan:
    """Of POST /v1/responses: a chat's, which is told in other shapes. Raises InvalidRequest."""
    chat = chat_of(request)
    try:
        plan = chat_plan(chat, request_id)
    except InvalidRequest as error:
        raise in_responses_names(error) from None
    base = begun(request, request_id)
    return replace(
        plan,
        answer_id=base.id,
        whole=WholeResponse(base, request_id),
        streamed=StreamedResponse(base, request_id, plan.choices),
        in_client_names=in_responses_names,
    )
