"""Servers and channels on real sockets: pings, big messages, ports, health, reflection."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from radixfleet import convert
from radixfleet.channel import client_options, listen, make_server, open_channel, server_options
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fake_inference import SERVICE, FakeInference, serving
from tests.support.ports import held_port

PING_S = 1.0
SILENCE_S = 6.0
"""gRPC sends keepalive pings at most each second, and a server without our options gives up at the fifth."""
MISSPELLED = [("grpc.http2.min_recv_ping_interval_without_data_ms", 10), ("grpc.keepalive_permit_without_calls", 1)]


class SilentInference(inference_pb2_grpc.InferenceServicer):
    """Generate says nothing until told to; Tokenize gives the prompt back."""

    def __init__(self) -> None:
        self.speak = asyncio.Event()
        self.called = asyncio.Event()

    async def Generate(self, request, context):
        self.called.set()
        await self.speak.wait()
        yield inference_pb2.GenerateResponse()

    async def Tokenize(self, request, context):
        tokens = convert.unpack_tokens(request.prompt.token_ids)
        return inference_pb2.TokenizeResponse(token_ids=tokens)


async def silent_stream(options, *, asks: bool = False) -> grpc.StatusCode:
    """The client pings during the silence; OK when the stream is still there to speak after it.

    `asks`: it also makes short calls on the same channel, as a router does that follows an engine.
    """
    servicer = SilentInference()
    server = grpc.aio.server(options=options)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options(keepalive_s=PING_S))
    try:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest())
        answer = asyncio.ensure_future(call.read())
        await servicer.called.wait()
        asking = asyncio.create_task(_ask_on(stub)) if asks else None
        await asyncio.wait([answer], timeout=SILENCE_S)
        if asking is not None:
            asking.cancel()
        servicer.speak.set()
        try:
            await answer
        except grpc.aio.AioRpcError as error:
            return error.code()
        return await call.code()
    finally:
        await channel.close()
        await server.stop(None)


async def _ask_on(stub: inference_pb2_grpc.InferenceStub) -> None:
    while True:
        await stub.Tokenize(inference_pb2.TokenizeRequest())
        await asyncio.sleep(PING_S)


async def idle_connection_survives(options) -> bool:
    """The client pings a connection without calls."""
    server = grpc.aio.server(options=options)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options(keepalive_s=PING_S)) as channel:
        await channel.channel_ready()
        lost = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        done, _ = await asyncio.wait([lost], timeout=SILENCE_S)
        lost.cancel()
    await server.stop(None)
    return not done


async def test_pings_end_neither_silent_streams_nor_idle_connections():
    """Behaviour 56: server keepalive.

    Without our options, or with the variant that has "recv" in its name (gRPC ignores it without a word), the same
    pings do end the stream. Unlimited strikes would hide that: so the option is shown without them, too.
    """
    by_interval = [(name, value) for name, value in server_options() if name != "grpc.http2.max_ping_strikes"]
    ours, interval_alone, default, misspelled, idle, idle_default = await asyncio.gather(
        silent_stream(server_options()),
        silent_stream(by_interval),
        silent_stream([]),
        silent_stream(MISSPELLED),
        idle_connection_survives(server_options()),
        idle_connection_survives([]),
    )
    assert ours is interval_alone is grpc.StatusCode.OK
    assert default is misspelled is grpc.StatusCode.UNAVAILABLE
    assert (idle, idle_default) == (True, False)


async def test_a_server_of_others_is_not_hung_up_on_by_pings_between_its_answers():
    """A router's silent streams to engines outlive gRPC's limit of a ping in five minutes: it asks for their state."""
    assert await silent_stream([], asks=True) is grpc.StatusCode.OK


async def test_a_million_tokens_pass_both_ways():
    """Behaviour 41: a prompt of a million tokens and the answer to it pass; gRPC's default of 4 MiB says nothing."""
    tokens = np.full(1_000_000, 200_000, dtype=np.uint32)
    request = inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(token_ids=convert.pack_tokens(tokens)))
    assert request.ByteSize() >= 4_000_000
    async with serving(SilentInference()) as address, open_channel(address) as channel:
        response = await inference_pb2_grpc.InferenceStub(channel).Tokenize(request)
    assert len(response.token_ids) == 1_000_000


async def test_a_proxy_of_the_environment_is_not_for_the_fleet(monkeypatch):
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with held_port() as nobodys:
        monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{nobodys}")
        async with serving(FakeInference()) as address, open_channel(address) as channel:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(inference_pb2.TokenizeRequest())


@pytest.mark.parametrize("num_bytes", [5 * 1024**2, 40 * 1024**2])
async def test_messages_over_the_default_size_pass(num_bytes):
    async with serving(FakeInference()) as address, open_channel(address) as channel:
        request = inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(token_ids={"packed": bytes(num_bytes)}))
        response = await inference_pb2_grpc.InferenceStub(channel).Tokenize(request)
    assert len(response.token_ids) == 0


async def test_the_limit_can_be_set():
    server, _ = await make_server([SERVICE], max_message_bytes=1024)
    inference_pb2_grpc.add_InferenceServicer_to_server(FakeInference(), server)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        request = inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(text="x" * 2048))
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(request)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)


async def test_health_says_what_it_is_told():
    """Behaviour 60: NOT_SERVING until told otherwise, for the server and each service, and watchers hear of it."""
    server, health = await make_server([SERVICE])
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    statuses = health_pb2.HealthCheckResponse
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == statuses.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == statuses.NOT_SERVING
        await health.set(serving=True)
        assert (await watch.read()).status == statuses.SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == statuses.SERVING
        await health.set(serving=False)
        assert (await watch.read()).status == statuses.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch.cancel()
    await server.stop(None)


async def test_reflection_describes_the_services():
    async with serving(FakeInference()) as address:
        names, fields = await asyncio.to_thread(_reflect, address)
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert "prompt" in fields


def _reflect(address: str) -> tuple[set[str], set[str]]:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        file = database.FindFileContainingSymbol("radixfleet.v1.GenerateRequest")
        message = next(message for message in file.message_type if message.name == "GenerateRequest")
        return set(database.get_services()), {field.name for field in message.field}


async def test_a_port_that_is_taken_is_an_error_and_nothing_else_is_said(capfd):
    """Two processes must not share a port, as gRPC lets them by default; and gRPC's own lines help nobody."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server, _ = await make_server([])
        with pytest.raises(OSError, match=r"Address already in use\): choose another"):
            listen(server, "127.0.0.1", taken.getsockname()[1])
    first, _ = await make_server([])
    port = listen(first, "127.0.0.1", 0)
    await first.start()
    second, _ = await make_server([])
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        listen(second, "127.0.0.1", port)
    await first.stop(None)
    with pytest.raises(OSError, match=r"nowhere\.invalid:7070 \(.+\): choose another"):
        listen(second, "nowhere.invalid", 7070)
    assert capfd.readouterr().err == ""


async def test_a_port_may_be_shared_on_purpose_only(capfd):
    """A router's processes share ports that their supervisor holds; a router of somebody else's must not join them."""
    first, _ = await make_server([], shared_port=True)
    port = listen(first, "127.0.0.1", 0, shared_port=True)
    second, _ = await make_server([], shared_port=True)
    assert listen(second, "127.0.0.1", port, shared_port=True) == port
    alone, _ = await make_server([])
    with pytest.raises(OSError, match="Address already in use"):
        listen(alone, "127.0.0.1", port)
    assert capfd.readouterr().err == ""
    await asyncio.gather(first.stop(None), second.stop(None))


async def test_a_server_that_comes_back_is_found_soon():
    """Behaviour 55: a worker that was away is found again in about two seconds, without a new channel."""
    async with serving(FakeInference()) as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(text="a"))
        await stub.Tokenize(request)
    port = int(address.rsplit(":", 1)[1])
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(request)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        server, _ = await make_server([SERVICE])
        inference_pb2_grpc.add_InferenceServicer_to_server(FakeInference(), server)
        assert listen(server, "127.0.0.1", port) == port
        await server.start()
        response = await stub.Tokenize(request, wait_for_ready=True, timeout=60)
        assert list(response.token_ids) == [97]
    await server.stop(None)


CLOSED_UNDER_CALLS = """
import asyncio
from radixfleet.client import Client
from radixfleet.errors import Unavailable
from tests.support.fake_inference import FakeInference, Silence, delta, serving, started

async def main():
    for _ in range(8):
        fake = FakeInference([[started(), delta(1), Silence()]])
        async with serving(fake) as address:
            client = Client(address)
            streams = [client.generate("x"), client.generate("x")]
            for stream in streams:
                await anext(stream)
                await anext(stream)
        for stream in streams:
            try:
                await anext(stream)
            except Unavailable as error:
                print("unavailable")
        await client.close()

asyncio.run(main())
"""


def test_a_server_that_leaves_writes_nothing_to_the_terminal():
    """A worker that stops is everyday business for a router; gRPC's core would report it on stderr most of the time."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    result = subprocess.run(
        [sys.executable, "-c", CLOSED_UNDER_CALLS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.split() == ["unavailable"] * 16
    assert result.stderr == ""
