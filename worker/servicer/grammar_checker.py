"""The process that tries grammars (`grammar_check`), as the front sees it: what it says, and what its end says.

A process that was killed, is stopped or gets no CPU says nothing of the grammar. Where it ended, the grammar is tried
once more, in a new one; one that hangs has held up the others for long enough. On the event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

import msgspec
import structlog

from radixfleet.clock import Clock
from radixfleet.errors import Unavailable
from radixfleet.text import TokenizerSpec
from radixfleet.types import Grammar

_TRY_S = 5.0
"""How much CPU time compiling may take: how busy the machine is says nothing of a grammar."""
_WALL_S = 8 * _TRY_S
"""How long the process may take to start, and then to answer; longer, and it is stopped or gets too little CPU."""
_REST_S = 10.0
"""After a process that hung, or two in a row that ended: nobody waits for the next one meanwhile."""
_DEADLY_S = 60.0
"""A grammar whose processes are killed, by the OOM killer say, costs the others a rest no more often than this."""

_log = structlog.get_logger(__name__)


class _Killed(ChildProcessError):
    """While it tried a grammar."""


class GrammarChecker:
    """Starts the process when the first grammar comes, and again after its end. For one caller at a time."""

    def __init__(self, spec: TokenizerSpec, clock: Clock, *, try_s: float = _TRY_S, wall_s: float = _WALL_S) -> None:
        self._spec = spec
        self._clock = clock
        self._try_s = try_s
        self._wall_s = wall_s
        self._process: Process | None = None
        self._rests_until_s = 0.0
        self._deadly_until_s: dict[Grammar, float] = {}

    async def why_not(self, grammar: Grammar) -> str:
        """Why a grammar cannot be used; empty when it can. Raises Unavailable when that cannot be found out now."""
        if self._wait_s(grammar) > 0:
            raise self._unavailable(grammar)
        try:
            try:
                return await self._ask(grammar)
            except TimeoutError:
                raise
            except OSError as error:
                _log.warning("a grammar is tried once more, in a new process", error=repr(error))
                return await self._ask(grammar)
        except OSError as error:
            now = self._clock.now()
            self._rests_until_s = now + _REST_S
            self._deadly_until_s = {it: until_s for it, until_s in self._deadly_until_s.items() if until_s > now}
            if isinstance(error, _Killed):
                self._deadly_until_s[grammar] = now + _DEADLY_S
            _log.error("the process that tries grammars does not start or answer", error=repr(error))
            raise self._unavailable(grammar) from error

    def _wait_s(self, grammar: Grammar) -> float:
        return max(self._rests_until_s, self._deadly_until_s.get(grammar, 0.0)) - self._clock.now()

    def _unavailable(self, grammar: Grammar) -> Unavailable:
        return Unavailable("no grammar can be tried here at the moment", retry_after_s=self._wait_s(grammar))

    async def close(self) -> None:
        """End the process."""
        await self._kill()

    async def _ask(self, grammar: Grammar) -> str:
        """What the process says, or what its end tells. Raises OSError when neither does; it has ended then."""
        try:
            async with asyncio.timeout(self._wall_s):
                process = await self._running()
            async with asyncio.timeout(self._wall_s):
                answer = await _answer(process, grammar)
                return self._why_ended(await process.wait()) if answer is None else answer
        except OSError:  # TimeoutError is one
            await self._kill()
            raise

    def _why_ended(self, returncode: int) -> str:
        """What is wrong with the grammar. Raises _Killed when nothing is known to be."""
        if returncode == -signal.SIGPROF:
            return f"compiling it takes longer than {self._try_s:g} s"
        if returncode == -signal.SIGKILL:  # somebody's, or the OOM killer's: no limit of its own ends it so
            raise _Killed("it was killed")
        _log.warning("a grammar ended the process that tried it", returncode=returncode)
        return "it is too large or nested too deeply"

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


async def _answer(process: Process, grammar: Grammar) -> str | None:
    """What the process says; None when it has ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(grammar) + b"\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
    line = await process.stdout.readline()
    return msgspec.json.decode(line, type=str) if line else None
