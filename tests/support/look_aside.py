"""The two forms of look-aside routing, so that one test may run over both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.rpc import status_pb2
from grpc_status import rpc_status

from radixfleet.channel import open_channel
from radixfleet.client import Client
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2

FORMS = ("call", "stream")
both_forms = pytest.mark.parametrize("form", FORMS)


def asking_by(client: Client, form: str) -> Client:
    """The client, which asks for its routes so: by itself it asks by a stream."""
    if form == "call":
        client._calls_until_s = float("inf")
    return client


def ids_request(count: int = 100, **fields: Any) -> inference_pb2.GenerateRequest:
    """One whose prompt is so many token ids."""
    ids = inference_pb2.TokenIds(ids=[index % 250 for index in range(count)])
    return inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(token_ids=ids), **fields)


def text_request(text: str, **fields: Any) -> inference_pb2.GenerateRequest:
    """One whose prompt is this text."""
    return inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text=text), **fields)


class Stream:
    """`Fleet.RouteStream` by hand. What is asked has the numbers 1, 2, ..."""

    def __init__(self, channel: grpc.aio.Channel, **metadata: str) -> None:
        stub: Any = fleet_pb2_grpc.FleetStub(channel)
        self.call = stub.RouteStream(metadata=tuple(metadata.items()))
        self.num_messages = 0
        """Read so far."""
        self._numbers = 0
        self._read: list[fleet_pb2.RouteAnswer] = []

    async def ask(self, *requests: inference_pb2.GenerateRequest, timeout_s: float | None = None, **more: Any) -> None:
        """All in one message; `more`: fields of it."""
        asks = []
        for request in requests:
            self._numbers += 1
            asks.append(fleet_pb2.RouteAsk(number=self._numbers, request=request, timeout_s=timeout_s))
        await self.call.write(fleet_pb2.RouteStreamRequest(asks=asks, **more))

    async def answer(self) -> fleet_pb2.RouteAnswer:
        """The next one. Raises EOFError, or AioRpcError."""
        while not self._read:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                raise EOFError
            self.num_messages += 1
            self._read += message.answers
        return self._read.pop(0)


@asynccontextmanager
async def open_stream(address: str, **metadata: str) -> AsyncIterator[Stream]:
    """A stream to the router; leaving the block breaks it off."""
    async with open_channel(address) as channel:
        stream = Stream(channel, **metadata)
        yield stream
        stream.call.cancel()


async def outcome(
    address: str, form: str, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
) -> fleet_pb2.RouteResponse | status_pb2.Status:
    """Of one request, asked in this form."""
    if form == "stream":
        async with open_stream(address) as stream:
            await stream.ask(request, timeout_s=timeout_s, keep_leases=True)
            answer = await stream.answer()
            return answer.route if answer.HasField("route") else status_pb2.Status.FromString(answer.status)
    async with open_channel(address) as channel:
        stub = fleet_pb2_grpc.FleetStub(channel)
        try:
            routed: fleet_pb2.RouteResponse = await stub.Route(
                fleet_pb2.RouteRequest(request=request), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            status = rpc_status.from_call(error)  # type: ignore[arg-type]  # made for calls that are not awaited
            if status is None:
                raise
            return status
        return routed
