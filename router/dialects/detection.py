"""Finds out what a worker speaks, by asking for the health of each service: the wrong ones are UNIMPLEMENTED."""

from __future__ import annotations

from importlib.util import find_spec

import grpc.aio

from radixfleet.clock import Clock
from radixfleet.v1 import worker_pb2
from router.dialects.native import NativeSpeaker
from router.dialects.speaker import Archives, Speaker

_UNKNOWN = "what listens there speaks neither radixfleet.v1 nor an engine's gRPC dialect"


async def recognise(
    channel: grpc.aio.Channel, address: str, clock: Clock, archives: Archives, *, timeout_s: float
) -> tuple[Speaker, worker_pb2.WorkerInfo]:
    """The speaker for the worker at `address`, and what it said of itself.

    Raises AioRpcError or TimeoutError when it cannot be asked, ValueError when it speaks nothing that we know.
    """
    native = NativeSpeaker(channel, timeout_s=timeout_s)
    try:
        return native, await native.info()
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
    if find_spec("smg_grpc_proto") is None:
        raise ValueError(f"{_UNKNOWN}; for those of SGLang and vLLM: pip install 'radixfleet[engines]'")
    from router.dialects.engine import EngineSpeaker
    from router.dialects.words import SglangWords, VllmWords, Words

    words: tuple[Words, ...] = (SglangWords(), VllmWords())
    for each in words:
        try:
            await each.stub(channel).HealthCheck(each.pb.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        else:
            engine = EngineSpeaker(each, channel, address, clock, archives, timeout_s=timeout_s)
            return engine, await engine.info()
    raise ValueError(_UNKNOWN)
