"""HTTP on a router, byte for byte: what is served, what is refused and how, and how answers and streams look."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from radixfleet.errors import Overloaded
from radixfleet.types import WorkerStatus
from router.app import drain, running_router
from router.http.openai import event_stream
from tests.support.fake_worker import Script
from tests.support.http_client import connected, get, post
from tests.support.http_fleet import http_fleet
from tests.support.router_fixture import fake_worker, running_fleet, settings
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
ROLE = {"role": "assistant", "content": ""}


async def test_health_says_whether_anybody_serves() -> None:
    """Behaviour 60."""
    async with running_router(settings(http_port=0)) as router:
        answer = await get(router.http_port, "/health")
        assert (answer.status, answer.json) == (503, {"status": "unavailable", "workers": 0})
        assert (await get(router.http_port, "/v1/models")).json == {"data": [], "object": "list"}
        refused = await post(router.http_port, CHAT, HI)
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.error["type"] == "service_unavailable_error"
    async with running_fleet(2, http_port=0) as fleet:
        assert (await get(fleet.router.http_port, "/health")).json == {"status": "serving", "workers": 2}


async def test_a_worker_that_still_loads_is_not_there_yet_and_the_prompt_is_not_at_fault() -> None:
    """Behaviour 60."""
    worker = fake_worker("w0", status=WorkerStatus.LOADING, max_context_tokens=0)
    async with running_router(settings(http_port=0)) as router:
        await worker.start()
        router.registry.add(worker.address)
        await until(lambda: router.registry.models, "the worker has told its model")
        refused = await post(router.http_port, CHAT, HI)
        assert (refused.status, refused.error["code"]) == (503, "unavailable")
        assert "w0: loading); the model is being loaded" in refused.error["message"]
        assert refused.headers["retry-after"] == "5"
        assert (await get(router.http_port, "/health")).status == 503
        await worker.kill()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_that_waits_for_long_is_kept_alive(*, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.05)
    start = asyncio.Event()
    error = Overloaded("too much") if fails else None
    worker = fake_worker(script=lambda _: Script(before_first_token=start, error=error, error_after=0))
    async with running_fleet([worker], http_port=0) as fleet, connected(fleet.router.http_port) as connection:
        await connection.send("POST", CHAT, json.dumps({**HI, "stream": True}).encode())
        status, headers = await connection.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert [await connection.chunk() for _ in range(3)] == [b":\n\n"] * 3
        start.set()
        body = b""
        while part := await connection.chunk():
            body += part
        last = body.replace(b":\n\n", b"").split(b"\n\n")[-2]
        assert (b"too much" in last) is fails
        assert (last == b"data: [DONE]") is not fails


async def test_the_metrics_are_those_of_the_router() -> None:
    async with running_fleet(1, http_port=0) as fleet:
        await post(fleet.router.http_port, CHAT, HI)
        await fleet.until_settled()
        page = await get(fleet.router.http_port, "/metrics")
        assert 'radixfleet_router_requests_total{outcome="ok"} 1.0' in page.body.decode()
        assert b"radixfleet_router_worker_eligible" in page.body, "gauges that are read on the event loop"


async def test_a_stream_is_events_and_one_done() -> None:
    async with running_fleet(1, http_port=0) as fleet:
        answer = await post(
            fleet.router.http_port, CHAT, HI | {"stream": True, "stream_options": {"include_usage": True}}
        )
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, usage, done = answer.events
        assert done == "[DONE]"
        first, *pieces, last = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert (first, last) == (ROLE, {})
        assert "".join(piece["content"] for piece in pieces) == "xxxx"  # tokens that come together may be joined
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4


async def test_usage_in_every_event_for_those_who_ask() -> None:
    async with running_fleet(1, http_port=0) as fleet:
        options = {"continuous_usage_stats": True, "include_usage": True}
        answer = await post(fleet.router.http_port, CHAT, HI | {"stream": True, "stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in answer.events[:-1]]
        assert counts == sorted(counts)
        assert counts[0] == counts[1] >= 1, "the role comes with the first token"
        assert counts[-3:] == [4, 4, 4], "last token, finish reason, usage"
        plain = await post(fleet.router.http_port, CHAT, HI | {"stream": True})
        assert all("usage" not in chunk for chunk in plain.events[:-1])


async def test_a_request_has_one_name_from_the_client_to_the_worker() -> None:
    async with running_fleet(1, http_port=0) as fleet:
        answer = await post(fleet.router.http_port, CHAT, HI, {"X-Request-ID": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json["id"] == "chatcmpl-mine-1"
        assert fleet.workers[0].calls[0].request.request_id == "mine-1"
        for path in ("/nowhere", "/v1/models/none"):
            assert (await get(fleet.router.http_port, path, **{"X-Request-ID": "other"})).headers[
                "x-request-id"
            ] == "other"
        made = [(await post(fleet.router.http_port, CHAT, HI)).headers["x-request-id"] for _ in range(2)]
        assert len(set(made)) == 2


async def test_headers_that_only_tell_where_a_request_belongs_are_accepted() -> None:
    async with running_fleet(1, http_port=0) as fleet:
        headers = {
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "X-Session-ID": "s" * 500,
            "X-Session-Affinity": "w0",
        }
        assert (await post(fleet.router.http_port, CHAT, HI, headers)).status == 200
        assert (await post(fleet.router.http_port, CHAT, HI, {"traceparent": "nonsense"})).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/server_info", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_what_is_not_served_says_so_cleanly(method: str, path: str, status: int) -> None:
    async with running_fleet(0, http_port=0) as fleet, connected(fleet.router.http_port) as connection:
        await connection.send(method, path, b"{}")
        answer = await connection.answer()
        assert answer.status == status
        assert set(answer.error) == {"message", "type", "param", "code"}


async def test_what_a_browser_could_send_by_itself_is_refused_and_says_what_to_send() -> None:
    async with running_fleet(1, http_port=0) as fleet:
        answer = await post(fleet.router.http_port, CHAT, HI, {"Content-Type": "text/plain"})
        assert answer.status == 415
        assert "Content-Type: application/json" in answer.error["message"]


async def test_inputs_at_the_edges() -> None:
    """Behaviours 40, 42 and 43: a defined answer, or a clear refusal with the field's name; others are unaffected."""
    context = 65_536
    edges: list[tuple[str, Any, int, str | None]] = [
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 99_999_999}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "n": 2**63 - 1}, 400, "n"),
        ("/v1/completions", {"prompt": [257]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x" * context, "max_tokens": 1}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x" * (context + 1), "max_tokens": 1}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x" * (context - 1), "max_tokens": 1}, 200, None),
        ("/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 20}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
        ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop[0]"),
        ("/v1/completions", {"prompt": "x", "cache_salt": "s" * 1025}, 400, "cache_salt"),
        (CHAT, HI | {"max_completion_tokens": context}, 400, "max_completion_tokens"),
        (CHAT, {"messages": [], "max_tokens": 1}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}], "max_tokens": 1}, 400, "messages[0].content"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, "messages[0].content"),
        (CHAT, b"{", 400, None),
        (CHAT, HI | {"n": 4, "max_tokens": 2}, 200, None),
    ]
    async with http_fleet() as fleet:
        for path, body, status, param in edges:
            answer = await post(fleet.port, path, body)
            assert answer.status == status, (body if len(str(body)) < 200 else path, answer.body)
            if status != 200:
                assert answer.error["param"] == param, answer.error
            assert (await post(fleet.port, CHAT, HI)).status == 200


async def test_a_completion_whose_client_names_no_limit_gets_what_the_context_leaves() -> None:
    """As a chat does: 16 tokens that nobody asked for are no reason to refuse a prompt. A named limit is one."""
    context, path = 65_536, "/v1/completions"
    near = {"prompt": "x" * (context - 5), "ignore_eos": True}
    async with http_fleet() as fleet:
        answer = await post(fleet.port, path, near)
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["completion_tokens"] == 5
        assert (await post(fleet.port, path, near | {"prompt": "x"})).json["usage"]["completion_tokens"] == 16
        refused = await post(fleet.port, path, near | {"max_tokens": 16})
        assert (refused.status, refused.error["param"]) == (400, "max_tokens")
        full = await post(fleet.port, path, near | {"prompt": "x" * context})
        assert (full.status, full.error["param"]) == (400, "prompt")


async def test_a_body_that_is_too_large_is_refused_by_the_setting() -> None:
    """Behaviour 41."""
    async with running_fleet(1, http_port=0, max_message_bytes=1024**2) as fleet:
        answer = await post(fleet.router.http_port, "/v1/completions", {"prompt": "x" * 1024**2})
        assert answer.status == 413
        assert "--max-message-bytes" in answer.error["message"]


async def test_a_million_tokens_pass() -> None:
    """Behaviour 41."""
    async with running_fleet(1, http_port=0) as fleet:
        for prompt in ("x" * 1_000_000, [120] * 1_000_000):
            answer = await post(fleet.router.http_port, "/v1/completions", {"prompt": prompt, "max_tokens": 4})
            assert answer.status == 200
            assert answer.json["usage"]["prompt_tokens"] == 1_000_000


async def test_tokens_and_back() -> None:
    async with running_fleet(1, http_port=0) as fleet:
        port = fleet.router.http_port
        plain = (await post(port, "/tokenize", {"model": "fake-model", "prompt": "hi", "return_token_strs": True})).json
        assert plain == {"count": 2, "max_model_len": 1 << 21, "tokens": [104, 105], "token_strs": ["h", "i"]}
        chat = (await post(port, "/tokenize", {"messages": HI["messages"]})).json
        assert bytes(chat["tokens"]).decode() == "user: hi\nassistant: "
        assert (await post(port, "/detokenize", {"tokens": [104, 105, 256]})).json == {"prompt": "hi<|end|>"}
        assert (await post(port, "/detokenize", {"tokens": [257]})).status == 400
        assert (await post(port, "/tokenize", {})).error["param"] == "prompt"


async def test_a_worker_that_is_full_says_when_to_come_back() -> None:
    error = Overloaded("the queue is full", retry_after_s=2.5)
    async with running_fleet([fake_worker("w0", script=lambda _: Script(error=error))], http_port=0) as fleet:
        answer = await post(fleet.router.http_port, CHAT, HI | {"stream": True})
        assert answer.status == 429
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")
        assert answer.error["code"] == "overloaded"


async def test_a_failure_in_the_middle_of_a_stream_is_an_event_and_no_done_follows() -> None:
    """Behaviour 53."""
    async with running_fleet([fake_worker("w0", script=lambda _: Script(finish=False))], http_port=0) as fleet:
        answer = await post(fleet.router.http_port, CHAT, HI | {"stream": True})
        assert answer.status == 200
        *_, last = answer.events
        assert last["error"]["code"] == "unavailable"
        assert "4 tokens" in last["error"]["message"]


async def test_one_prompt_of_several_that_fails_ends_them_all() -> None:
    gate = asyncio.Event()

    def script(call: Any) -> Script:
        bad = len(call.tokens) == 2
        return Script(error=Overloaded("full")) if bad else Script(before_finish=gate)

    worker = fake_worker("w0", script=script)
    async with running_fleet([worker], http_port=0, max_retries=0) as fleet:
        answer = await post(fleet.router.http_port, "/v1/completions", {"prompt": ["a", "bb", "ccc"]})
        assert answer.status == 429
        await until(lambda: worker.count("cancelled") == 2, "the others are ended")


async def test_connections_are_kept_and_carry_one_request_after_another() -> None:
    async with running_fleet(1, http_port=0) as fleet, connected(fleet.router.http_port) as connection:
        for body, status in ((HI, 200), (HI | {"stream": True}, 200), ({}, 400), (HI, 200)):
            await connection.send("POST", CHAT, json.dumps(body).encode())
            assert (await connection.answer()).status == status


async def test_a_port_that_is_taken_is_an_error_that_names_the_setting() -> None:
    async with running_router(settings(http_port=0)) as router:
        with pytest.raises(OSError, match="--http-port"):
            async with running_router(settings(http_port=router.http_port)):
                pass


async def test_a_drain_takes_no_new_connection_and_lets_streams_end() -> None:
    """Behaviour 54."""
    gate = asyncio.Event()
    worker = fake_worker("w0", script=lambda _: Script(before_finish=gate))
    async with running_fleet([worker], http_port=0) as fleet:
        port = fleet.router.http_port
        async with connected(port) as connection, connected(port) as idle:
            await connection.send("POST", CHAT, json.dumps(HI | {"stream": True}).encode())
            await connection.head()
            await connection.chunk()
            draining = asyncio.create_task(drain(fleet.router, 20.0))
            assert await idle.until_closed() == b""
            with pytest.raises(OSError, match=str(port)):
                async with connected(port):
                    pass
            gate.set()
            rest = await connection.until_closed()
            assert b"[DONE]" in rest
            await draining


async def test_a_drain_without_grace_tells_what_it_cuts() -> None:
    """Behaviour 54."""
    worker = fake_worker("w0", script=lambda _: Script(before_finish=asyncio.Event()))
    async with running_fleet([worker], http_port=0) as fleet, connected(fleet.router.http_port) as connection:
        await connection.send("POST", CHAT, json.dumps(HI | {"stream": True}).encode())
        await connection.head()
        await connection.chunk()
        await drain(fleet.router, 0.0)
        rest = await connection.until_closed()
        assert b"the router stops" in rest
        assert b"[DONE]" not in rest


async def test_the_document_describes_what_is_served() -> None:
    async with running_fleet(0, http_port=0) as fleet:
        document = (await get(fleet.router.http_port, "/openapi.json")).json
    assert document["openapi"].startswith("3.1")
    served = {f"{method} {path}" for path, item in document["paths"].items() for method in item}
    assert served >= {"post /v1/chat/completions", "post /v1/completions", "get /v1/models", "get /health"}
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 64}
