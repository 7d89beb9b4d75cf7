"""GET /v1/models: what the fleet serves."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from radixfleet.types import ModelInfo
from router.api.prompts import Prompts
from router.http.errors import json_response


class Model(msgspec.Struct, kw_only=True):
    """One served model."""

    id: str
    object: str = "model"
    created: int
    """When this router started, in Unix time."""
    owned_by: str = "radixfleet"
    """By which routers know each other, and take none for a worker."""
    root: str
    max_model_len: int | UnsetType = UNSET
    """Longest prompt and answer together, in tokens; left out where the engine does not tell."""


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[Model]
    object: str = "list"


def models_routes(prompts: Prompts) -> Sequence[BaseRoute]:
    """The list, and each of them."""
    started = int(time.time())

    def described(info: ModelInfo) -> Model:
        return Model(id=info.model, created=started, root=info.model, max_model_len=info.max_context_tokens or UNSET)

    async def list_all(_: Request) -> Response:
        # At once, also while a router has just started: what it does not know yet comes with the next question.
        return json_response(ModelList([described(info) for info in prompts.models()]))

    async def one(request: Request) -> Response:
        await prompts.until_served(request.path_params["model"])
        return json_response(described(prompts.model(request.path_params["model"]).info))

    return [Route("/v1/models", list_all), Route("/v1/models/{model:path}", one)]
