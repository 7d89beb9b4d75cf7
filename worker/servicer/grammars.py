"""Which grammars may be used: each is tried once in a process of its own, then compiled by the runner, then remembered.

    admit --> known? --> tried (`grammar_check`; bounded time, memory and stack) --> prepared by the runner

Nothing here blocks the event loop. A grammar that is refused fails the requests that have it, and nobody else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog

from radixfleet.clock import Clock
from radixfleet.errors import InvalidRequest, Overloaded, Unavailable
from radixfleet.text import TokenizerSpec
from radixfleet.types import Grammar, Incarnation
from worker.engine.handle import EngineHandle

_TRY_S = 5.0
"""How much CPU time compiling may take: how busy the machine is says nothing of a grammar."""
_WALL_S = 60.0
"""How long the process may take to start and to answer."""
_REST_S = 10.0
"""After a process that took longer, or did not start: nobody waits for the next one meanwhile."""
_REMEMBERED = 32
"""Fewer than the runner keeps, so that what is remembered here is compiled there."""
_MOST_WAITING = 32
_RETRY_AFTER_S = 1.0

Key = TypeVar("Key")
Value = TypeVar("Value")

_log = structlog.get_logger(__name__)


class Grammars:
    """One for the worker. On the event loop."""

    def __init__(self, engine: EngineHandle, checker: GrammarChecker | None) -> None:
        """`checker`: None where the runner refuses all grammars anyway."""
        self._engine = engine
        self._checker = checker
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()
        """Why not, or ""; the last used last."""
        self._prepared: OrderedDict[tuple[Incarnation, Grammar], None] = OrderedDict()
        self._trying: dict[Grammar, asyncio.Task[str]] = {}

    async def admit(self, grammar: Grammar) -> None:
        """Return when requests with this grammar may be submitted. Raises InvalidRequest, Overloaded or Unavailable."""
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            verdict = await self._try(grammar)
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
        for task in self._trying.values():
            task.cancel()
        if self._checker is not None:
            await self._checker.close()

    async def _try(self, grammar: Grammar) -> str:
        """One try for all who ask at once; it goes on when they leave."""
        if self._checker is None:
            return ""
        task = self._trying.get(grammar)
        if task is None:
            if len(self._trying) >= _MOST_WAITING:
                raise Overloaded("too many new grammars at once", retry_after_s=_RETRY_AFTER_S)
            task = asyncio.create_task(self._checker.why_not(grammar), name="grammar check")
            self._trying[grammar] = task
            task.add_done_callback(lambda done: self._tried(grammar, done))
        return await asyncio.shield(task)

    def _tried(self, grammar: Grammar, task: asyncio.Task[str]) -> None:
        del self._trying[grammar]
        if not task.cancelled():
            task.exception()  # looked at, for all who would have heard of it may have left


class GrammarChecker:
    """The process that tries grammars, one at a time; started when the first comes, and again after its end."""

    def __init__(self, spec: TokenizerSpec, clock: Clock, *, try_s: float = _TRY_S, wall_s: float = _WALL_S) -> None:
        self._spec = spec
        self._clock = clock
        self._try_s = try_s
        self._wall_s = wall_s
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._rests_until_s = 0.0

    async def why_not(self, grammar: Grammar) -> str:
        """Why a grammar cannot be used; empty when it can. Raises Unavailable when that cannot be found out now."""
        async with self._turn:
            if self._clock.now() < self._rests_until_s:
                raise _unavailable()
            try:
                async with asyncio.timeout(self._wall_s):
                    process = await self._running()
                    answer = await _ask(process, grammar)
            except OSError as error:  # TimeoutError is one
                await self._kill()
                self._rests_until_s = self._clock.now() + _REST_S
                _log.error("the process that tries grammars does not start or answer", error=repr(error))
                raise _unavailable() from error
            if answer is None:
                await self._kill()
                if process.returncode == -signal.SIGPROF:
                    return f"compiling it takes longer than {self._try_s:g} s"
                _log.warning("a grammar ended the process that tried it", kind=grammar.kind)
                return "it is too large or nested too deeply"
            return answer

    async def close(self) -> None:
        """End the process."""
        await self._kill()

    async def _running(self) -> Process:
        """The process, with its tokenizer read. Raises OSError."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        main = ("-P", "-m", "worker.servicer.grammar_check", str(os.getpid()), str(self._try_s))
        self._process = await asyncio.create_subprocess_exec(sys.executable, *main, stdin=PIPE, stdout=PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(self._spec.to_json() + b"\n")
        if not await self._process.stdout.readline():
            raise ChildProcessError("it ended at its start")
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _unavailable() -> Unavailable:
    return Unavailable("no grammar can be tried here at the moment", retry_after_s=_REST_S)


async def _ask(process: Process, grammar: Grammar) -> str | None:
    """What the process says; None when it has ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(grammar) + b"\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
    line = await process.stdout.readline()
    return msgspec.json.decode(line, type=str) if line else None


def _remember(memory: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
