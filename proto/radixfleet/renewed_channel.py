"""A channel whose certificates may change: gRPC in Python fixes those of a channel when it is made.

So calls that begin after a change go to a new channel. The old one ends with the last call on it, be that the stream
that links a router and a worker for weeks: a connection that stands needs no certificate any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from radixfleet.watched_file import Watched

Opener = Callable[[grpc.ChannelCredentials], grpc.aio.Channel]


@dataclass(eq=False, slots=True)
class _Inner:
    credentials: grpc.ChannelCredentials
    channel: grpc.aio.Channel
    num_calls: int = 0


class RenewedChannel(grpc.aio.Channel):
    """Opens by `open_with` a channel for each state of the `credentials`."""

    def __init__(self, credentials: Watched[grpc.ChannelCredentials], open_with: Opener) -> None:
        self._credentials = credentials
        self._open_with = open_with
        now = credentials.current()
        self._inner = _Inner(now, open_with(now))
        self._old: set[_Inner] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As in grpc.aio.Channel, and so are the others."""
        return self._method(lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See unary_unary."""
        return self._method(lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See unary_unary."""
        return self._method(lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See unary_unary."""
        return self._method(lambda channel: channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """End all calls after the grace."""
        await asyncio.gather(*(inner.channel.close(grace) for inner in (self._inner, *self._old)), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002  gRPC's own
        """Whether the newest channel is connected."""
        return self._inner.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the newest channel's state is another."""
        await self._inner.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when the newest channel is connected."""
        await self._inner.channel.channel_ready()

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _method(self, of: Callable[[grpc.aio.Channel], Callable[..., Any]]) -> Callable[..., Any]:
        inner, method = self._inner, of(self._inner.channel)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inner, method
            newest = self._newest()
            if newest is not inner:
                inner, method = newest, of(newest.channel)
            begun = method(*args, **kwargs)
            self._count(newest, begun)
            return begun

        return call

    def _newest(self) -> _Inner:
        credentials = self._credentials.current()
        if credentials is not self._inner.credentials:
            old, self._inner = self._inner, _Inner(credentials, self._open_with(credentials))
            self._old.add(old)
            self._end_if_unused(old)
        return self._inner

    def _count(self, inner: _Inner, call: grpc.aio.Call) -> None:
        def ended(_: object) -> None:
            inner.num_calls -= 1
            self._end_if_unused(inner)

        inner.num_calls += 1
        call.add_done_callback(ended)

    def _end_if_unused(self, inner: _Inner) -> None:
        if inner in self._old and not inner.num_calls:
            self._old.remove(inner)
            task = asyncio.get_running_loop().create_task(inner.channel.close(None), name="close an old channel")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
