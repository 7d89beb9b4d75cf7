"""Who is taken for a Ray head."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from deploy.fleet.reach import reach

_gcs: Any = gcs_service_pb2  # generated without types
HOST = "127.0.0.2"
"""Of 127.0.0.1 Ray makes this machine's address in its network."""
LONG_S = 60.0
"""Time for an answer that comes at once, on a busy machine."""


class Gcs(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def CheckAlive(self, request: object, context: grpc.ServicerContext) -> Any:
        if self._code is not grpc.StatusCode.OK:
            context.abort(self._code, "what the head says")
        return _gcs.CheckAliveReply()


@contextmanager
def grpc_server(gcs: Gcs | None) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    if gcs is not None:
        gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(gcs, server)
    port = server.add_insecure_port(f"{HOST}:0")
    server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def listening(says: bytes) -> Iterator[str]:
    """A server that greets whoever comes, and says nothing else."""
    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(1) as pool:

        def greet() -> list[socket.socket]:
            met = []
            while True:
                try:
                    met.append(server.accept()[0])
                except OSError:
                    return met
                met[-1].send(says)

        greeting = pool.submit(greet)
        try:
            yield f"{HOST}:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for each in greeting.result():
                each.close()


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED])
def test_a_head_is_a_head_also_when_it_wants_a_token(code: grpc.StatusCode) -> None:
    with grpc_server(Gcs(code)) as address:
        reach(address, LONG_S)


def test_nobody_listens() -> None:
    with socket.create_server((HOST, 0)) as server:
        address = f"{HOST}:{server.getsockname()[1]}"
    with pytest.raises(OSError, match=f"nobody listens at {address}"):
        reach(address, LONG_S)


def test_another_grpc_server_is_none() -> None:
    """A router of ours, say, whose port was given in place of the head's."""
    with grpc_server(None) as address, pytest.raises(OSError, match=f"what listens at {address} is no Ray head"):
        reach(address, LONG_S)


def test_a_server_that_speaks_something_else_is_none() -> None:
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, pytest.raises(OSError, match="does not speak as"):
        reach(address, LONG_S)


def test_a_server_that_says_nothing_is_none_soon() -> None:
    """Ray itself tries for 22 s."""
    with listening(b"") as address, pytest.raises(OSError, match=r"has not answered as a Ray head does for 0\.2 s"):
        reach(address, 0.2)
