"""Grammars compiled beside the steps of a runner process: one thread, in the order in which they were asked for."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import structlog

from radixfleet.types import Grammar
from worker.core.step import Compile, Compiled

log = structlog.get_logger(__name__)


class Preparation:
    """Used by one thread, which waits for it (by its `fileno`) beside its socket."""

    def __init__(self, compile_grammar: Callable[[Grammar], str]) -> None:
        """`compile_grammar`: tells why a grammar cannot be used, or ""; called on the other thread."""
        self._compile = compile_grammar
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._lock = threading.Lock()  # an answer and its byte come and go as one
        self._answers: list[Compiled] = []
        self._wakeup, self._waker = os.pipe()
        os.set_blocking(self._wakeup, False)

    def begin(self, order: Compile) -> None:
        """Compile a grammar when those before it are done."""
        self._thread.submit(self._work, order)

    def take(self) -> list[Compiled]:
        """The answers since the last call. Asked after each step, when as a rule there are none."""
        if not self._answers:
            return []
        with self._lock:
            os.read(self._wakeup, select.PIPE_BUF)
            answers, self._answers = self._answers, []
        return answers

    def fileno(self) -> int:
        """Readable while there are answers to take."""
        return self._wakeup

    def _work(self, order: Compile) -> None:
        try:
            refusal = self._compile(order.grammar)
        except Exception:
            log.exception("a grammar could not be compiled", kind=order.grammar.kind)
            refusal = "it could not be compiled"
        with self._lock:
            self._answers.append(Compiled(order.ticket, refusal))
            if len(self._answers) == 1:
                os.write(self._waker, b"\0")

    def __enter__(self) -> Self:
        """Leaving the block drops what has not begun, and waits for the one that has."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `__enter__`."""
        self._thread.shutdown(cancel_futures=True)
        os.close(self._wakeup)
        os.close(self._waker)
