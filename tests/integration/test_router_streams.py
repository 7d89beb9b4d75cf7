"""What one stream may do to the others: slow readers, giant prompts."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
import pytest

from radixfleet.channel import open_channel
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fake_worker import Call, Script
from tests.support.router_fixture import Fleet, fake_worker, running_fleet
from tests.support.waiting import until

TEXT_BYTES = 10_000
MAX_BYTES_IN_FLIGHT = 16 * 1024**2


def script(call: Call) -> Script:
    """A torrent of 1 GB for those who ask for it, else a few tokens."""
    if call.request.request_id == "torrent":
        return Script(tokens=100_000, text_bytes=TEXT_BYTES)
    return Script()


async def settled_count(call: Call) -> int:
    """Tokens that the worker could send before it was held back: their number when it no longer grows."""
    while True:
        before = call.tokens_sent
        for _ in range(10):  # a machine that stands still lets one pass, not each of them
            await asyncio.sleep(0.03)
        if call.tokens_sent == before:
            return before


async def test_a_slow_reader_is_held_back_and_others_are_not() -> None:
    """Behaviour 57: flow control reaches through the router to the worker, so memory per stream is bounded."""
    worker = fake_worker("w0", script=script)
    async with running_fleet([worker]) as fleet, open_channel(fleet.router.address) as channel:
        request = inference_pb2.GenerateRequest(request_id="torrent", prompt=inference_pb2.Prompt(text="hello"))
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        await stream.read()
        await until(lambda: worker.calls)
        sent = await settled_count(worker.calls[0])
        assert sent * TEXT_BYTES < MAX_BYTES_IN_FLIGHT
        for _ in range(10):
            await fleet.client.complete("another", timeout_s=60.0)
        assert worker.calls[0].tokens_sent * TEXT_BYTES < MAX_BYTES_IN_FLIGHT
        # It reads on: what was held back flows again, in order and whole.
        received = 0
        while received < sent + 1000:
            reply = await stream.read()
            assert isinstance(reply, inference_pb2.GenerateResponse)
            received += len(reply.delta.token_ids)
        stream.cancel()
        await until(lambda: worker.count("cancelled") == 1)


async def beside_a_giant(fleet: Fleet, text: str) -> tuple[float, float, int]:
    """While `text` is tokenized: the loop's longest stop and the time it took, in seconds, and requests served."""
    done = asyncio.Event()
    longest_s = 0.0

    async def beat() -> None:
        nonlocal longest_s
        last = time.monotonic()
        while not done.is_set():
            await asyncio.sleep(0.001)
            now = time.monotonic()
            longest_s = max(longest_s, now - last)
            last = now

    beats = asyncio.create_task(beat())
    began_s = time.monotonic()
    giant = asyncio.create_task(fleet.client.explain(text))
    served = 0
    while not giant.done():
        await fleet.client.complete("hello")
        served += 1
    assert (await giant).prompt_tokens == len(text)
    duration_s = time.monotonic() - began_s
    done.set()
    await beats
    return longest_s, duration_s, served


async def test_the_event_loop_goes_on_while_a_giant_prompt_is_tokenized() -> None:
    """Behaviour 59: two million characters are tokenized and hashed beside the loop, which serves others meanwhile."""
    async with running_fleet(1) as fleet:
        for number in range(3):  # a busy machine may stand still in one of them
            text = f"{number} {'the quick brown fox jumps over the lazy dog ' * 45_000}"
            longest_s, duration_s, served = await beside_a_giant(fleet, text)
            if longest_s < duration_s / 2 and served >= 5:
                return
        pytest.fail(f"the loop stopped for {longest_s:.2f} of {duration_s:.2f} s, and served {served} requests")


@pytest.mark.parametrize("num_tokens", [1_000_000])
async def test_a_prompt_of_a_million_tokens_passes(num_tokens: int) -> None:
    """Behaviour 41: and it is not gRPC's default of 4 MiB that decides."""
    worker = fake_worker("w0", max_context_tokens=1 << 21)
    async with running_fleet([worker]) as fleet:
        done = await fleet.client.complete("x" * num_tokens)
        assert done.started.prompt_tokens == num_tokens
        assert len(worker.calls[0].tokens) == num_tokens


async def test_a_message_larger_than_the_limit_is_refused_with_a_clear_status() -> None:
    """Behaviour 41."""
    async with running_fleet(1, max_message_bytes=1024**2) as fleet, open_channel(fleet.router.address) as channel:
        request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="x" * (2 * 1024**2)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(request).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (caught.value.details() or "")
        assert fleet.workers[0].calls == []
