"""What a failed call to a worker means for the request, and for the worker."""

from __future__ import annotations

import grpc.aio
import pytest

from radixfleet.errors import RadixfleetError, Unavailable
from radixfleet.status import status_from_error
from router.dispatch.link import failure_of


def failed(code: grpc.StatusCode, details: str, told: RadixfleetError | None = None) -> grpc.aio.AioRpcError:
    """`told`: what the worker itself said."""
    trailers = [] if told is None else [("grpc-status-details-bin", status_from_error(told).SerializeToString())]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=details)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"), "transport", "UNAVAILABLE"),
        (failed(grpc.StatusCode.CANCELLED, ""), "transport", "UNAVAILABLE"),
        (failed(grpc.StatusCode.INTERNAL, "RST_STREAM"), "transport", "UNAVAILABLE"),
        (failed(grpc.StatusCode.UNAVAILABLE, "draining", Unavailable("draining")), "answer", "UNAVAILABLE"),
        (failed(grpc.StatusCode.INVALID_ARGUMENT, "top_p"), "answer", "INVALID_ARGUMENT"),
        (failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), "deadline", "DEADLINE_EXCEEDED"),
        # Behaviour 52: not the worker's fault either, whatever gRPC makes of it.
        (failed(grpc.StatusCode.INTERNAL, "Stream removed (Deadline Exceeded)"), "deadline", "DEADLINE_EXCEEDED"),
        (failed(grpc.StatusCode.UNKNOWN, "Stream removed (Deadline Exceeded)"), "deadline", "DEADLINE_EXCEEDED"),
    ],
)
def test_what_a_failure_means(error: grpc.aio.AioRpcError, kind: str, said: str) -> None:
    failure = failure_of(error, "w0")
    assert (failure.kind, failure.error.code) == (kind, said)
