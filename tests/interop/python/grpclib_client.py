"""grpclib, a gRPC implementation without gRPC's C core: ADDRESS and SILENCE_S in the environment."""

import asyncio
import os
import time
from collections.abc import Awaitable

from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from radixfleet.v1 import inference_pb2 as pb


def request(model: str, max_new_tokens: int, **prompt) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_new_tokens=max_new_tokens, temperature=0)
    return pb.GenerateRequest(model=model, prompt=pb.Prompt(**(prompt or {"text": "hello"})), sampling=sampling)


async def refusal(call: Awaitable[object]) -> Status | None:
    """The status that a call ends with; None: it ends well. grpclib raises TimeoutError for a deadline."""
    try:
        await call
    except TimeoutError:
        return Status.DEADLINE_EXCEEDED
    except GRPCError as error:
        return error.status
    return None


async def main() -> None:
    host, port = os.environ["ADDRESS"].rsplit(":", 1)
    # A ping every 10 s, also while a stream is silent.
    pings = Configuration(_keepalive_time=10, _keepalive_timeout=5, _keepalive_permit_without_calls=True)
    async with Channel(host, int(port), config=pings) as channel:
        service = "/radixfleet.v1.Inference"
        generate = UnaryStreamMethod(channel, f"{service}/Generate", pb.GenerateRequest, pb.GenerateResponse)
        info = UnaryUnaryMethod(channel, f"{service}/GetModelInfo", pb.GetModelInfoRequest, pb.ModelInfo)

        assert (await info(pb.GetModelInfoRequest(model="tiny"))).model == "tiny"
        messages = await generate(request("tiny", 12))
        assert messages[0].WhichOneof("event") == "started"
        assert messages[-1].finished.usage.completion_tokens == 12

        async with generate.open() as stream:  # left in the middle
            await stream.send_message(request("tiny", 1_000_000), end=True)
            while (await stream.recv_message()).WhichOneof("event") != "delta":
                pass
            await stream.cancel()

        assert await refusal(generate(request("silent", 60), timeout=0.5)) is Status.DEADLINE_EXCEEDED
        assert await refusal(generate(request("none", 1))) is Status.NOT_FOUND

        ids = pb.TokenIds(packed=bytes([3, 0, 0, 0]) * 1_000_000)
        started = (await generate(request("tiny", 1, token_ids=ids)))[0].started
        assert started.prompt_tokens == 1_000_000

        silence_s = int(os.environ["SILENCE_S"])
        began_s = time.monotonic()
        messages = await generate(request("silent", silence_s))
        assert messages[-1].WhichOneof("event") == "finished"
        assert time.monotonic() - began_s > silence_s - 0.5
    print("done")


asyncio.run(main())
