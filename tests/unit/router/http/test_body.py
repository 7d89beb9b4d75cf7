"""Bodies of requests: what is refused, by which name, and that nothing is guessed."""

from __future__ import annotations

import msgspec
import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from radixfleet.errors import InvalidRequest
from router.http.body import parse, read_body
from router.http.errors import TooLarge
from router.http.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NamedSchema,
    TokenizeRequest,
)
from router.http.presence import ClientGone

HI = b'{"messages": [{"role": "user", "content": "hi"}]'


def receiving(*messages: dict):
    waiting = list(messages)

    async def receive():
        return waiting.pop(0)

    return receive


def part(body: bytes, *, more: bool = False) -> dict:
    return {"type": "http.request", "body": body, "more_body": more}


def refusal(body: bytes, kind: type = ChatRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, kind)
    return caught.value


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"messages": [{"role": "user", "content": "a\\ud800"}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "a\xff"}]}', "messages[0].content"),
        (HI + b', "unknown": {"deep": ["\xff"]}}', "unknown.deep[0]"),
        (HI + b', "unknown": "\\udfff"}', "unknown"),
        (HI + b', "stop": ["ok", "\\ud83d"]}', "stop[1]"),
        (HI + b', "chat_template_kwargs": {"\\ud800": 1}}', "chat_template_kwargs"),
    ],
)
def test_text_that_is_not_unicode_is_refused_by_name(body: bytes, field: str) -> None:
    """Behaviour 42, also in fields that nobody reads."""
    error = refusal(body)
    assert error.field == field
    assert "not Unicode" in str(error)


def test_in_a_large_body_nobody_looks_for_it() -> None:
    """Reading 64 MB once more, in Python, stopped the event loop for half a minute."""
    for bad in (b"\xff", b"\\ud800"):
        error = refusal(HI + b', "padding": "' + b"x" * 300_000 + bad + b'"}')
        assert (error.field, str(error)[:9]) == ("", "the body ")


@pytest.mark.parametrize(
    ("rest", "field"),
    [
        (b'"temperature": NaN', ""),
        (b'"temperature": Infinity', ""),
        (b'"temperature": 1e999', "temperature"),
        (b'"temperature": "1"', "temperature"),
        (b'"max_tokens": true', "max_tokens"),
        (b'"max_tokens": 1.5', "max_tokens"),
        (b'"max_tokens": 99999999999', "max_tokens"),
        (b'"n": 9223372036854775807', "n"),
        (b'"n": 99999999999999999999999999', "n"),
        (b'"n": 0', "n"),
        (b'"seed": -9223372036854775809', "seed"),
        (b'"stop": [1]', "stop[0]"),
        (b'"logit_bias": {"x": 1}', "logit_bias"),
        (b'"logit_bias": {"1": 101}', "logit_bias"),
        (b'"response_format": {"type": "xml"}', "response_format.type"),
        (b'"response_format": {"type": "json_schema"}', "response_format.json_schema"),
        (b'"tools": "none"', "tools"),
        (b'"messages": []', "messages"),
        (b'"messages": [{"content": "hi"}]', "messages[0].role"),
        (b'"messages": [{"role": "", "content": "hi"}]', "messages[0].role"),
        (b'"messages": [{"role": "wizard", "content": "hi"}]', "messages[0].role"),
        (b'"stream": 1', "stream"),
    ],
)
def test_wrong_values_are_refused_by_name(rest: bytes, field: str) -> None:
    """Behaviours 40 and 43."""
    assert refusal(HI + b", " + rest + b"}").field == field


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', HI, HI + b"} x", b"\xef\xbb\xbf{}", b"\xff\xfe"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert str(refusal(body)).startswith("the body ")


@pytest.mark.parametrize("body", [b"[" * 100_000, HI + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_depth_is_bounded(body: bytes) -> None:
    refusal(body)


def test_the_last_of_two_equal_names_counts_and_null_is_absent() -> None:
    request = parse(HI + b', "max_tokens": 3, "max_tokens": 4, "top_p": null, "whatever": [1]}', ChatRequest)
    assert (request.max_tokens, request.top_p) == (4, None)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, NamedSchema])
def test_null_is_not_given_wherever_a_field_may_be_left_out(kind: type[msgspec.Struct]) -> None:
    """OpenAI's clients and those of other languages write null for what nobody has set, the model included."""
    given = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "tokens": [1], "schema": {}}
    fields = msgspec.structs.fields(kind)
    needed = {field.name: given[field.name] for field in fields if field.required}
    optional = {field.name: None for field in fields if not field.required}
    assert parse(msgspec.json.encode(optional | needed), kind) == parse(msgspec.json.encode(needed), kind)


def test_every_form_of_a_prompt() -> None:
    for given in (b'"a"', b'["a", "b"]', b"[1, 2]", b"[[1], [2, 3]]"):
        parse(b'{"prompt": ' + given + b"}", CompletionRequest)
    for given in (b"[]", b"null", b"1", b"[true]", b"[-1]", b"[4294967296]", b"[[1.5]]", b"[{}]"):
        assert refusal(b'{"prompt": ' + given + b"}", CompletionRequest).field.startswith("prompt")


async def test_parts_are_joined() -> None:
    receive = receiving(part(b'{"a":', more=True), part(b"1}"))
    assert await read_body(receive, Headers({}), 100) == b'{"a":1}'


async def test_more_than_the_limit_is_refused_announced_or_not() -> None:
    with pytest.raises(TooLarge, match="--max-message-bytes"):
        await read_body(receiving(), Headers({"content-length": "101"}), 100)
    with pytest.raises(TooLarge):
        await read_body(receiving(part(b"x" * 60, more=True), part(b"x" * 60, more=True)), Headers({}), 100)


async def test_a_client_that_leaves_in_the_middle_of_its_request() -> None:
    with pytest.raises(ClientGone):
        await read_body(receiving(part(b"{", more=True), {"type": "http.disconnect"}), Headers({}), 100)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_what_a_browser_sends_without_asking_is_refused(kind: str) -> None:
    with pytest.raises(HTTPException) as caught:
        await read_body(receiving(part(b"{}")), Headers({"content-type": kind}), 100)
    assert caught.value.status_code == 415


async def test_a_packed_body_is_refused_for_what_it_is() -> None:
    with pytest.raises(HTTPException, match="Content-Encoding 'gzip'") as caught:
        await read_body(receiving(part(b"\x1f\x8b")), Headers({"content-encoding": "gzip"}), 100)
    assert caught.value.status_code == 415
    assert await read_body(receiving(part(b"{}")), Headers({"content-encoding": "identity"}), 100) == b"{}"


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
async def test_json_by_any_name(kind: str) -> None:
    assert await read_body(receiving(part(b"{}")), Headers({"content-type": kind}), 100) == b"{}"
