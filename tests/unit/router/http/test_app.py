"""What holds for every answer, whoever gives it."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Scope

from radixfleet.errors import InvalidRequest
from radixfleet.guard import Guard
from radixfleet.keys import key_hash
from router.http.app import HttpApp

KEY = "rfk_1"


async def fine(_: Request) -> Response:
    return PlainTextResponse("fine")


async def wrong(_: Request) -> Response:
    raise InvalidRequest("wrong", field="n")


async def broken(_: Request) -> Response:
    raise KeyError("ours")


ROUTES = [Route("/fine", fine), Route("/wrong", wrong), Route("/broken", broken)]


async def ask(path: str, key: str = KEY, **headers: str) -> tuple[int, dict[str, str]]:
    sent: list[Message] = []
    given = {"authorization": f"Bearer {key}", **headers}
    scope: Scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
        "client": ("10.0.0.1", 5),
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await HttpApp(ROUTES, Guard(lambda: {key_hash(KEY): "alice"}))(scope, receive, send)
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/fine", KEY, 200),
        ("/wrong", KEY, 400),
        ("/broken", KEY, 500),
        ("/nowhere", KEY, 404),
        ("/fine", "rfk_2", 401),
    ],
)
async def test_every_answer_names_its_request(path: str, key: str, status: int) -> None:
    """Also that of the guard, which is asked about when something does not work."""
    for given in ({}, {"x_request_id": "mine"}):
        told, headers = await ask(path, key, **given)
        assert told == status
        assert headers["x-request-id"] == "mine" if given else headers["x-request-id"]
