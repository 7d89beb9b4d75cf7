"""When a process shall end, and when at once.

SIGTERM, however often   end in order: service managers send it to every process of a group, and a process that
                         started others of the group passes it on to them
SIGINT (Ctrl-C)          the same, once; the second of two signals, one of which it is, says: at once
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def on_stop_signals(ask: Callable[[], object], insist: Callable[[], object]) -> None:
    """Have `ask` called by the first signal, and `insist` by those that say so. On the main thread's event loop."""
    came: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        came.append(number)
        if len(came) == 1:
            ask()
        elif signal.SIGINT in came:
            insist()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
