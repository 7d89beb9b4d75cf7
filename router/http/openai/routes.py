"""The paths of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Route

from router.api.prompts import Prompts
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.record import RequestLog
from router.http.openai.generation import GenerateEndpoint, Generating
from router.http.openai.models import models_routes
from router.http.openai.plan import chat_plan, completion_plan
from router.http.openai.requests import ChatRequest, CompletionRequest
from router.http.openai.responses.plan import response_plan
from router.http.openai.responses.request import ResponsesRequest
from router.http.openai.tokens import TokenEndpoints
from router.http.openapi import openapi_routes


def openai_routes(
    prompts: Prompts, dispatcher: Dispatcher, log: RequestLog, *, max_body_bytes: int
) -> Sequence[BaseRoute]:
    """All of them."""
    generating = Generating(prompts, dispatcher, log, max_body_bytes=max_body_bytes)
    chat = GenerateEndpoint(generating, ChatRequest, chat_plan)
    responses = GenerateEndpoint(generating, ResponsesRequest, response_plan)
    completions = GenerateEndpoint(generating, CompletionRequest, completion_plan)
    tokens = TokenEndpoints(prompts, max_body_bytes=max_body_bytes)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        *models_routes(prompts),
        *openapi_routes(),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
    ]
