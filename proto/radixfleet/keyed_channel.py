"""A channel that sends a key with every call.

gRPC's own way, call credentials, works over TLS alone, and its interceptors replace the calls of a channel by wrappers
that cost time for each message. So the key is added where a call begins, and the call is gRPC's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

KEY_HEADER = "authorization"


class KeyedChannel(grpc.aio.Channel):
    """Wraps a channel. `key` is asked at each call."""

    def __init__(self, channel: grpc.aio.Channel, key: Callable[[], str | None]) -> None:
        self._channel = channel
        self._key = key

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As in grpc.aio.Channel, and so are the others."""
        return self._keyed(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See unary_unary."""
        return self._keyed(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See unary_unary."""
        return self._keyed(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See unary_unary."""
        return self._keyed(self._channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """End all calls after the grace."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002  gRPC's own
        """Whether it is connected."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the state is another."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when it is connected."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> KeyedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _keyed(self, multicallable: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            key = self._key()
            mine = () if key is None else ((KEY_HEADER, f"Bearer {key}"),)
            return multicallable(*args, metadata=(*(metadata or ()), *mine), **kwargs)

        return call
