"""Commands that are told to end, and what they started."""

from __future__ import annotations

import asyncio
import os
import signal

import click
import pytest

from deploy.interruptible import ctrl_c_calls, run_interruptible


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_work_that_is_told_to_end_puts_its_things_in_order(number: signal.Signals) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("in order")

    with pytest.raises(click.Abort):
        run_interruptible(work())
    assert ended == ["in order"]


def test_work_that_ends_by_itself_gives_what_it_has() -> None:
    async def work() -> int:
        return 7

    assert run_interruptible(work()) == 7


def test_a_cancellation_that_nobody_asked_for_is_no_interruption() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_interruptible(work())


def test_the_first_ctrl_c_stops_a_part_and_the_second_one_all() -> None:
    stopped: list[str] = []

    async def work(interrupts: int) -> str:
        part = asyncio.Event()
        with ctrl_c_calls(part.set):
            for _ in range(interrupts):
                os.kill(os.getpid(), signal.SIGINT)
            await part.wait()
            stopped.append("part")
        await asyncio.sleep(0)
        return "what there is"

    assert run_interruptible(work(1)) == "what there is"
    with pytest.raises(click.Abort):
        run_interruptible(work(2))
    assert stopped[0] == "part"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
