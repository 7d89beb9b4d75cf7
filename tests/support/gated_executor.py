"""Threads that wait until the test lets them work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future


class GatedExecutor(Executor):
    """Does nothing with its work until it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[object], Callable[[], object]]] = []

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[object]:
        future: Future[object] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def release(self) -> None:
        """Do all the work that waits and was not cancelled."""
        for future, work in self.waiting:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001  as a pool of threads does
                future.set_exception(error)
        self.waiting.clear()
