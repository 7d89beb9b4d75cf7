"""Makes the worker known to its routers, again and again, so that it does not matter who starts first or restarts."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

import grpc.aio
import structlog

from radixfleet.channel import open_channel
from radixfleet.endpoint import Endpoint
from radixfleet.status import error_from_rpc
from radixfleet.types import WorkerId
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc
from radixfleet.watched_file import UnusableFile

REGISTER_EVERY_S = 5.0
_RETRY_FIRST_S = 0.2
_CALL_S = 5.0
_LEAVE_S = 2.0
_BRIEF_S = 10.0
"""A router that is started again is away for so long, which is no trouble."""

_log = structlog.get_logger(__name__)


class Registration:
    """Keeps the worker registered at every router while the block lasts, and takes it off their lists at the end."""

    def __init__(
        self,
        routers: Sequence[str],
        worker_id: WorkerId,
        port: int,
        address: str | None,
        endpoint: Callable[[str], Endpoint] = Endpoint,
    ) -> None:
        """`address`: host:port at which routers reach the worker; None: this machine's address towards each router.

        `endpoint` makes of a router's address what is dialled: with TLS and the admin token, where they are used.
        """
        self._routers = routers
        self._worker_id = worker_id
        self._port = port
        self._address = address
        self._endpoint = endpoint
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, tuple[str, float]] = {}
        """By router: why it is not registered there now, and since when (in the event loop's time)."""

    @property
    def trouble(self) -> str:
        """Where it has not been registered for a while, and why; empty: nowhere. On the event loop."""
        until_s = asyncio.get_running_loop().time() - _BRIEF_S
        lasting = [(router, why) for router, (why, since_s) in sorted(self._failures.items()) if since_s <= until_s]
        return "; ".join(f"not registered at {router}: {why}" for router, why in lasting)

    async def __aenter__(self) -> Self:
        await self.follow(self._routers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.follow(())

    async def follow(self, routers: Sequence[str]) -> None:
        """Be registered at these routers from now on, and leave the others."""
        dropped = [router for router in self._tasks if router not in routers]
        tasks = [self._tasks.pop(router) for router in dropped]
        for router in routers:
            if router not in self._tasks:
                registering = self._keep_registered(router)
                self._tasks[router] = asyncio.create_task(registering, name=f"registration at {router}")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for router in dropped:
            self._failures.pop(router, None)
        await asyncio.gather(*(self._leave(router) for router in dropped))

    async def _keep_registered(self, router: str) -> None:
        """Registering again is harmless, and finds out a router that was restarted and has forgotten.

        Most often that shows at once, as the end of the connection: then a call waits for who listens there next.
        Certificates that cannot be read now may be later.
        """
        while True:
            try:
                await self._register_by_channel(router)
            except UnusableFile as error:
                if self._failed(router, str(error)):
                    _log.error("cannot register; trying on", router=router, error=str(error))
                await asyncio.sleep(_spread(REGISTER_EVERY_S))

    async def _register_by_channel(self, router: str) -> None:
        async with open_channel(self._endpoint(router)) as channel:
            lost = asyncio.Event()
            watching = asyncio.create_task(_watch(channel, lost), name=f"connection to {router}")
            try:
                await self._register(router, channel, lost)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _register(self, router: str, channel: grpc.aio.Channel, lost: asyncio.Event) -> None:
        """Again and again; at once when the connection is `lost`."""
        stub = fleet_pb2_grpc.FleetStub(channel)
        pause_s = _RETRY_FIRST_S
        known = True
        while True:
            lost.clear()
            try:
                request = fleet_pb2.RegisterRequest(address=await self._address_for(router), repeats=True)
                response = await stub.Register(request, timeout=_CALL_S, wait_for_ready=not known)
            except (grpc.aio.AioRpcError, OSError) as error:
                self._failed(router, _words(error))
                if known:
                    _log.warning("cannot register; trying on", router=router, error=_words(error))
                pause_s = _RETRY_FIRST_S if known or _is_away(error) else min(2 * pause_s, REGISTER_EVERY_S)
                known = False
            else:
                self._failures.pop(router, None)
                if response.added or not known:
                    _log.info("registered", router=router, address=request.address)
                known = True
                pause_s = REGISTER_EVERY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(_spread(pause_s)):
                    await lost.wait()

    def _failed(self, router: str, why: str) -> bool:
        """Whether it is for another reason than before."""
        before, since_s = self._failures.get(router, ("", asyncio.get_running_loop().time()))
        self._failures[router] = (why, since_s)
        return why != before

    async def _leave(self, router: str) -> None:
        """Best effort: a router that is not there has nothing to forget."""
        with suppress(grpc.aio.AioRpcError, UnusableFile):
            async with open_channel(self._endpoint(router)) as channel:
                stub = fleet_pb2_grpc.FleetStub(channel)
                await stub.Remove(fleet_pb2.RemoveRequest(worker_id=self._worker_id), timeout=_LEAVE_S)

    async def _address_for(self, router: str) -> str:
        if self._address is not None:
            return self._address
        host = await asyncio.to_thread(_own_address_towards, router)
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"


async def _watch(channel: grpc.aio.Channel, lost: asyncio.Event) -> None:
    """Set `lost` whenever a connection ends. One watch for all its life: gRPC keeps what is given up."""
    while True:
        state = channel.get_state()
        await channel.wait_for_state_change(state)
        if state is grpc.ChannelConnectivity.READY:
            lost.set()


def _spread(pause_s: float) -> float:
    """So that a fleet's calls do not come all at once."""
    return pause_s * random.uniform(0.8, 1.2)  # noqa: S311


def _is_away(error: Exception) -> bool:
    """Nobody listens there, or nobody did in time."""
    away = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in away


def _own_address_towards(router: str) -> str:
    """The address from which this machine reaches the router. Connecting a datagram socket sends nothing."""
    host, _, port = router.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def _words(error: Exception) -> str:
    return str(error_from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error)
