"""GET /openapi.json: what is served, as an OpenAPI document made of the very types that requests are decoded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import BaseRoute, Route

from router.http.errors import ErrorAnswer, json_response
from router.http.openai.models import Model, ModelList
from router.http.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.http.openai.responses.request import ResponsesRequest
from router.http.openai.responses.shapes import Response, ResponseEvent
from router.http.openai.shapes import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    DetokenizeAnswer,
    TokenizeAnswer,
)
from router.http.operations import HealthAnswer

_REFUSALS = {
    "400": "The request is wrong; param names the field.",
    "401": "No key, or a wrong one.",
    "403": "The key does not open this.",
    "404": "No such model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not said to be JSON.",
    "429": "Too many requests; see Retry-After.",
    "500": "A fault of the server's.",
    "503": "Nobody serves the model now; see Retry-After.",
    "504": "The worker did not answer in time.",
}


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    path: str
    name: str
    summary: str
    answer: type
    body: type | None = None
    chunk: Any = None
    """Type of the events' data, where the answer may be streamed."""
    stream: str = "Data of each event but the last, which is [DONE]; an error object instead where the answer failed."


_OPERATIONS = (
    _Operation("post", "/v1/chat/completions", "chat", "Answer a chat.", ChatAnswer, body=ChatRequest, chunk=ChatChunk),
    _Operation(
        "post",
        "/v1/responses",
        "respond",
        "Answer a conversation.",
        Response,
        body=ResponsesRequest,
        chunk=ResponseEvent,
        stream="Events that are named by the type of their data.",
    ),
    _Operation(
        "post",
        "/v1/completions",
        "complete",
        "Go on with prompts.",
        CompletionAnswer,
        body=CompletionRequest,
        chunk=CompletionChunk,
    ),
    _Operation("get", "/v1/models", "listModels", "What is served.", ModelList),
    _Operation("get", "/v1/models/{model}", "getModel", "One served model.", Model),
    _Operation("post", "/tokenize", "tokenize", "Token ids of a prompt.", TokenizeAnswer, body=TokenizeRequest),
    _Operation("post", "/detokenize", "detokenize", "Text of token ids.", DetokenizeAnswer, body=DetokenizeRequest),
    _Operation("get", "/health", "health", "Whether requests are served.", HealthAnswer),
)


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    types = [ErrorAnswer, *(kind for item in _OPERATIONS for kind in (item.answer, item.body, item.chunk) if kind)]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for item in _OPERATIONS:
        paths.setdefault(item.path, {})[item.method] = _described(item)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Radixfleet",
            "version": version("radixfleet"),
            "description": "OpenAI's API, served by a fleet.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def openapi_routes() -> Sequence[BaseRoute]:
    """/openapi.json."""

    async def show(_: Request) -> HttpResponse:
        return json_response(document())

    return [Route("/openapi.json", show)]


def _described(item: _Operation) -> dict[str, Any]:
    content = _json_of(item.answer)
    if item.chunk is not None:
        kinds = ", ".join(map(_ref, get_args(item.chunk) or (item.chunk,)))
        content["text/event-stream"] = {"schema": {"type": "string", "description": f"{item.stream} See {kinds}."}}
    described: dict[str, Any] = {
        "operationId": item.name,
        "summary": item.summary,
        "responses": {"200": {"description": "Done.", "content": content}}
        | {status: {"description": text, "content": _json_of(ErrorAnswer)} for status, text in _refusals(item).items()},
    }
    if item.name == "health":
        described["responses"]["503"]["content"] = content
    if item.body is not None:
        described["requestBody"] = {"required": True, "content": _json_of(item.body)}
    if "{model}" in item.path:
        schema = {"type": "string", "minLength": 1}
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schema}]
    return described


def _refusals(item: _Operation) -> Mapping[str, str]:
    if item.name == "health":
        return {"503": "Nobody serves now."}
    if item.body is None:
        return {status: text for status, text in _REFUSALS.items() if status not in ("408", "413", "415")}
    return _REFUSALS


def _json_of(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _ref(kind)}}}


def _ref(kind: type) -> str:
    return f"#/components/schemas/{kind.__name__}"
