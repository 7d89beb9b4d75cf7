"""Work that goes on beside a block."""

import asyncio

import pytest

from radixfleet.background import beside


async def test_it_goes_on_while_the_block_lasts_and_has_ended_behind_it() -> None:
    turns: list[str] = []
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            turns.append("ended")

    async with beside(work(), "work") as task:
        await begun.wait()
        assert task.get_name() == "work"
        turns.append("block")
    assert turns == ["block", "ended"]


async def test_who_is_cancelled_while_it_ends_waits_for_its_end_and_stays_cancelled() -> None:
    turns: list[str] = []
    ending, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await ended.wait()
            turns.append("ended")

    async def block() -> None:
        try:
            async with beside(work(), "work"):
                await asyncio.sleep(0)
        finally:
            turns.append("behind the block")

    running = asyncio.create_task(block())
    await ending.wait()
    for _ in range(2):
        running.cancel()
        await asyncio.wait([running], timeout=0)
    ended.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert turns == ["ended", "behind the block"]


async def test_what_it_raises_comes_out_behind_the_block() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        async with beside(work(), "work") as task:
            await asyncio.wait([task])
