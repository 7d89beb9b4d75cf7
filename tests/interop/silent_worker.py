"""A worker that falls silent: `python -m tests.interop.silent_worker ROUTER` registers it there, as the model "silent".

It answers four tokens at once, and ends the stream as many seconds later as the request allows tokens.
"""

from __future__ import annotations

import asyncio
import sys

from radixfleet.channel import open_channel
from radixfleet.v1 import fleet_pb2, fleet_pb2_grpc
from tests.support.byte_tokenizer import byte_spec
from tests.support.fake_worker import Call, FakeWorker, Script


def script(call: Call) -> Script:
    """Four tokens, then silence."""
    end = asyncio.Event()
    asyncio.get_running_loop().call_later(call.request.sampling.max_new_tokens, end.set)
    return Script(before_finish=end)


async def main(router: str) -> None:
    """Until the process is ended."""
    worker = await FakeWorker(byte_spec(), "silent-0", model="silent", script=script).start()
    async with open_channel(router) as channel:
        await fleet_pb2_grpc.FleetStub(channel).Register(fleet_pb2.RegisterRequest(address=worker.address))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
