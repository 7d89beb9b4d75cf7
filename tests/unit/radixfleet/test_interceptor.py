"""What a servicer raises, and what a client then hears; requests that cannot be decoded."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest
import structlog

from radixfleet import errors
from radixfleet.channel import listen, make_server, open_channel
from radixfleet.interceptor import bad_utf8_field
from radixfleet.status import error_from_rpc
from radixfleet.v1 import fleet_pb2, inference_pb2, inference_pb2_grpc
from tests.support.fake_inference import SERVICE, FakeInference, Silence, serving, started

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
ONE = inference_pb2.TokenizeRequest(model="one")


class Echo:
    """A service with a method of each kind, which raises `error` or gives the request's model back."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def _answer(self, request):
        if self.error is not None:
            raise self.error
        return inference_pb2.TokenizeRequest(model=request.model)

    async def unary_unary(self, request, context):
        return self._answer(request)

    async def unary_stream(self, request, context):
        yield self._answer(request)

    async def stream_unary(self, requests, context):
        return [self._answer(request) async for request in requests][-1]

    async def stream_stream(self, requests, context):
        async for request in requests:
            yield self._answer(request)

    async def writes_itself(self, request, context):
        await context.write(self._answer(request))


@asynccontextmanager
async def serving_echo(echo: Echo):
    codec = {
        "request_deserializer": inference_pb2.TokenizeRequest.FromString,
        "response_serializer": inference_pb2.TokenizeRequest.SerializeToString,
    }
    handlers = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(echo, kind), **codec) for kind in KINDS} | {
        "writes_itself": grpc.unary_stream_rpc_method_handler(echo.writes_itself, **codec)
    }
    server, _ = await make_server([])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def call(channel: grpc.aio.Channel, method: str, data: bytes) -> list[str]:
    """Call Echo with one encoded request; the models of the answers."""
    kind = "unary_stream" if method == "writes_itself" else method
    function = getattr(channel, kind)(f"/Echo/{method}", response_deserializer=inference_pb2.TokenizeRequest.FromString)
    request = iter([data]) if kind.startswith("stream") else data
    if kind.endswith("unary"):
        return [(await function(request)).model]
    return [message.model async for message in function(request)]


METHODS = (*KINDS, "writes_itself")


async def failure_of(method: str, error: BaseException | None, data: bytes = ONE.SerializeToString()):
    async with serving_echo(Echo(error)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, data)
    return error_from_rpc(caught.value)


@pytest.mark.parametrize("method", METHODS)
async def test_answers_pass_unchanged(method):
    async with serving_echo(Echo()) as channel:
        assert await call(channel, method, ONE.SerializeToString()) == ["one"]
        assert await call(channel, method, ONE.SerializeToString()) == ["one"]


@pytest.mark.parametrize("method", METHODS)
async def test_our_errors_become_their_status(method):
    error = await failure_of(method, errors.Overloaded("full", retry_after_s=2))
    assert type(error) is errors.Overloaded
    assert (str(error), error.retry_after_s) == ("full", 2)


@pytest.mark.parametrize("method", METHODS)
async def test_faults_are_logged_once_and_tell_the_client_nothing(method):
    with structlog.testing.capture_logs() as logs:
        error = await failure_of(method, KeyError("secret"))
    assert type(error) is errors.InternalError
    assert "secret" not in str(error)
    (entry,) = logs
    assert entry["log_level"] == "error"
    assert entry["method"] == f"/Echo/{method}"
    assert entry["incident"] in str(error)
    assert isinstance(entry["exc_info"], KeyError)


async def test_a_failed_call_to_another_server_passes_on():
    metadata = grpc.aio.Metadata()
    failed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, details="worker gone")
    error = await failure_of("unary_stream", failed)
    assert type(error) is errors.Unavailable
    assert str(error) == "worker gone"


async def test_a_servicer_may_still_abort_by_itself():
    class Aborting(Echo):
        async def unary_unary(self, request, context):
            await context.abort(grpc.StatusCode.DATA_LOSS, "mine")

    with structlog.testing.capture_logs() as logs:
        async with serving_echo(Aborting()) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="mine") as caught:
                await call(channel, "unary_unary", b"")
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert logs == []


async def test_cancellation_reaches_the_servicer_and_is_no_fault():
    """Behaviour 6: a client that goes away ends the handler at once; nothing is logged as an error."""
    fake = FakeInference([[started(), Silence()]])
    with structlog.testing.capture_logs() as logs:
        async with serving(fake) as address, open_channel(address) as channel:
            stream = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
            await stream.read()
            stream.cancel()
            await asyncio.wait_for(fake.ended.wait(), 60)
    assert fake.outcomes == ["cancelled"]
    assert logs == []


async def test_an_error_after_the_first_response_ends_the_stream():
    fake = FakeInference([[started(), errors.Unavailable("worker died")]])
    async with serving(fake) as address, open_channel(address) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
        assert (await stream.read()).HasField("started")
        with pytest.raises(grpc.aio.AioRpcError, match="worker died"):
            await stream.read()


async def test_a_method_that_is_not_there_stays_unimplemented():
    async with serving(FakeInference()) as address, open_channel(address) as channel:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Nothing")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def spoiled(message, text: str = "spoil") -> bytes:
    """The encoded message with the bytes of `text` replaced by bytes that are no UTF-8."""
    data = message.SerializeToString()
    assert text.encode() in data
    return data.replace(text.encode(), b"\xff\xc3\x28\xa0\xed")


@pytest.mark.parametrize("method", METHODS)
async def test_invalid_utf8_is_refused_by_name(method):
    """Behaviour 42: in requests of every kind of method."""
    error = await failure_of(method, None, spoiled(inference_pb2.TokenizeRequest(model="spoil")))
    assert type(error) is errors.InvalidRequest
    assert error.field == "model"
    assert "UTF-8" in str(error)


CHAT = inference_pb2.Chat(
    messages=[{"role": "user", "content": "good"}, {"role": "user", "content": "spoil"}, {"role": "spoil"}]
)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (inference_pb2.GenerateRequest(request_id="spoil"), "request_id"),
        (inference_pb2.GenerateRequest(prompt={"text": "spoil"}), "prompt.text"),
        (inference_pb2.GenerateRequest(prompt={"chat": CHAT}), "prompt.chat.messages[1].content"),
        (inference_pb2.GenerateRequest(sampling={"stop": ["a", "b", "spoil"]}), "sampling.stop[2]"),
        (fleet_pb2.RouteRequest(request={"prompt": {"text": "spoil"}}), "request.prompt.text"),
    ],
)
def test_the_field_that_is_not_utf8(message, field):
    """Behaviour 42: lone surrogates and invalid UTF-8 are refused with the field's name, wherever it stands."""
    assert bad_utf8_field(message.DESCRIPTOR, spoiled(message)) == field


def test_a_surrogate_encoded_as_if_it_were_a_character():
    """Behaviour 42: some languages send a lone surrogate as three bytes, which is not UTF-8."""
    data = inference_pb2.GenerateRequest(prompt={"text": "abc"}).SerializeToString().replace(b"abc", b"\xed\xa0\x80")
    assert bad_utf8_field(inference_pb2.GenerateRequest.DESCRIPTOR, data) == "prompt.text"


def test_bytes_fields_need_not_be_utf8():
    message = inference_pb2.GenerateRequest(prompt={"token_ids": {"packed": b"\xff\xff\xff\xff"}}, model="spoil")
    assert bad_utf8_field(message.DESCRIPTOR, spoiled(message)) == "model"
    assert bad_utf8_field(message.DESCRIPTOR, message.SerializeToString()) is None


async def test_bytes_that_are_no_message_are_refused():
    error = await failure_of("unary_unary", None, b"\x0a\xff\xff\xff\xff\x0f")
    assert type(error) is errors.InvalidRequest
    assert "radixfleet.v1.TokenizeRequest" in str(error)
