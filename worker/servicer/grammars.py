"""Which grammars may be used: each is tried once in a process of its own, then compiled by the runner, then remembered.

    admit --> known? --> queue --> tried (`grammar_checker`; bounded time, memory and stack) --> prepared by the runner

Nothing here blocks the event loop. A grammar that is refused fails the requests that have it, and nobody else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeVar

from radixfleet.errors import InvalidRequest, Overloaded
from radixfleet.types import Grammar, Incarnation
from worker.engine.handle import EngineHandle
from worker.servicer.grammar_checker import GrammarChecker

_REMEMBERED = 32
"""Fewer than the runner keeps, so that what is remembered here is compiled there."""
_MOST_WAITING = 32
_LONGEST_WAIT_S = 10.0
"""A process that hangs holds up what is behind it no longer; the try goes on, and what comes of it is remembered."""
_RETRY_AFTER_S = 1.0
_MOST_PASSES = 3
"""So many smaller grammars may pass the one that was asked for first."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Grammars:
    """One for the worker. On the event loop."""

    def __init__(
        self, engine: EngineHandle, checker: GrammarChecker | None, *, longest_wait_s: float = _LONGEST_WAIT_S
    ) -> None:
        """`checker`: None where the runner refuses all grammars anyway."""
        self._engine = engine
        self._checker = checker
        self._queue = _Queue(self._try, longest_wait_s)
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()
        """Why not, or ""; the last used last."""
        self._prepared: OrderedDict[tuple[Incarnation, Grammar], None] = OrderedDict()

    async def admit(self, grammar: Grammar) -> None:
        """Return when requests with this grammar may be submitted. Raises InvalidRequest, Overloaded or Unavailable."""
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            verdict = await self._queue.ask(grammar)
        _remember(self._verdicts, grammar, verdict)
        key = (self._engine.incarnation, grammar)
        if not verdict and key not in self._prepared:
            verdict = await self._engine.prepare(grammar)
        if verdict:
            field = f"sampling.grammar.{grammar.kind}"
            raise InvalidRequest(f"{field} cannot be used: {verdict}", field=field)
        _remember(self._prepared, key, None)

    async def close(self) -> None:
        """End what is being tried."""
        self._queue.close()
        if self._checker is not None:
            await self._checker.close()

    async def _try(self, grammar: Grammar) -> str:
        """What comes of it is remembered, though all who asked may have left."""
        verdict = "" if self._checker is None else await self._checker.why_not(grammar)
        _remember(self._verdicts, grammar, verdict)
        return verdict


class _Queue:
    """One try at a time, and one for all who ask for the same grammar.

    The smallest is next, or the one that was asked for first once `_MOST_PASSES` have passed it: large ones may take
    seconds, and small ones do not wait for all of them. What nobody waits for any more is not tried; a try that has
    begun goes on to its end, since a new process would cost as much.
    """

    def __init__(self, try_it: Callable[[Grammar], Coroutine[None, None, str]], longest_wait_s: float) -> None:
        self._try_it = try_it
        self._longest_wait_s = longest_wait_s
        self._asking: dict[Grammar, list[asyncio.Future[str]]] = {}
        """Who waits for a grammar, the first asked for first; done when they have left. Also of the one being tried."""
        self._trying: asyncio.Task[str] | None = None
        self._num_passes = 0

    async def ask(self, grammar: Grammar) -> str:
        """What its try returns or raises. Raises Overloaded when too many wait, or this one has waited for long."""
        self._forget_who_left()
        if grammar not in self._asking and len(self._asking) >= _MOST_WAITING:
            raise Overloaded("too many new grammars at once", retry_after_s=_RETRY_AFTER_S)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asking.setdefault(grammar, []).append(answer)
        self._next()
        try:
            async with asyncio.timeout(self._longest_wait_s):
                return await answer
        except TimeoutError:
            reason = f"trying new grammars takes longer than {self._longest_wait_s:g} s at the moment"
            raise Overloaded(reason, retry_after_s=_RETRY_AFTER_S) from None

    def close(self) -> None:
        """End what is being tried, and who waits for it."""
        for answers in self._asking.values():
            for answer in answers:
                answer.cancel()
        if self._trying is not None:
            self._trying.cancel()

    def _next(self) -> None:
        self._forget_who_left()
        if self._trying is not None or not self._asking:
            return
        grammar = first = next(iter(self._asking))
        if self._num_passes < _MOST_PASSES:
            grammar = min(self._asking, key=lambda it: len(it.source))
        self._num_passes = 0 if grammar == first else self._num_passes + 1
        self._trying = asyncio.create_task(self._try_it(grammar), name="grammar check")
        self._trying.add_done_callback(partial(self._tried, grammar))

    def _tried(self, grammar: Grammar, task: asyncio.Task[str]) -> None:
        self._trying = None
        error = None if task.cancelled() else task.exception()
        for answer in self._asking.pop(grammar, []):
            if answer.done():
                continue
            if task.cancelled():
                answer.cancel()
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())
        self._next()

    def _forget_who_left(self) -> None:
        asking = self._asking.items()
        self._asking = {grammar: answers for grammar, answers in asking if not all(answer.done() for answer in answers)}


def _remember(memory: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
