"""Which signals ask a process to end, and which insist."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from radixfleet.stop_signals import on_stop_signals

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (TERM, INT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "told"),
    [
        ([TERM], ["ask"]),
        ([INT], ["ask"]),
        ([TERM, TERM, TERM], ["ask"]),
        ([INT, INT], ["ask", "insist"]),
        ([TERM, INT], ["ask", "insist"]),
        ([INT, TERM], ["ask", "insist"]),  # two that come at once are in no order
        ([TERM, TERM, INT], ["ask", "insist"]),
    ],
)
async def test_sigterm_asks_however_often_it_comes(signals: list[signal.Signals], told: list[str]) -> None:
    heard: list[str] = []
    came = asyncio.Event()
    on_stop_signals(lambda: heard.append("ask"), lambda: heard.append("insist"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, came.set)
    for number in signals:
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGUSR1)  # is heard after it
        await came.wait()
        came.clear()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
    assert heard == told
