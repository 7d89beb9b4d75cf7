"""The engine as the front's child processes, watched and restarted.

start      spawn -> LOADING -> Ready: SERVING
crash      either process ends: streams end with Unavailable, FAILED under a new incarnation, both are reaped, a wait,
           LOADING and SERVING again; after `max_restarts` restarts in a row that did not last, FAILED for good
silent     its loop says nothing for `silent_s`: FAILED until it speaks again; running requests stay
stopped    the runner process has been stopped (SIGSTOP) for `silent_s`: likewise, until it goes on
stuck      it has work but ends no step, or says nothing, for `stuck_s`: FAILED until it moves again;
           for `restart_stuck_s`: killed, then as after a crash
no load    the first load fails: EngineLoadError with the runner's advice, FAILED for good, nothing is restarted
hung load  its processes neither compute nor read for `load_still_s`: FAILED, killed, then as after a crash
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import structlog

from radixfleet.types import WorkerStatus
from worker.core import codec
from worker.core.messages import FrontMessage, Stop
from worker.engine.children import Children
from worker.engine.config import EngineConfig
from worker.engine.conversation import Conversation
from worker.engine.watchdog import LoadWatch, Watchdog
from worker.engine.wire import PeerClosed

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_LOOK_TICKS = 5
"""A load is looked at in every fifth tick: that walks through all processes of the machine."""
_MAX_BACKOFF_S = 30.0
_LASTING_S = 60.0
"""An incarnation that lived so long has lasted: the next restart is the first of its row."""


class ProcessEngine(Conversation):
    """Spawns engine and runner, carries messages, and heals. Call `start` on the event loop of a thread that stays."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._children: Children | None = None
        self._engine_gone = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def child_pids(self) -> tuple[int, ...]:
        """Process ids of engine and runner, for diagnosis; empty between two incarnations."""
        return () if self._children is None else (self._children.engine.pid, self._children.runner.pid)

    async def start(self) -> None:
        """Spawn the children, which then load. Raises OSError when the system has no room for them."""
        children = self._spawn()
        self._supervisor = asyncio.create_task(self._run(children), name="engine supervisor")

    async def stop(self) -> None:
        """Let the engine settle what is in flight, at most for `stop_grace_s`, and reap the children."""
        if self._supervisor is None or self._stopping:
            return
        self._stopping = True
        self._send(Stop())
        if self._children is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.stop_grace_s):
                    await self._engine_gone.wait()
        self._supervisor.cancel()
        await asyncio.wait([self._supervisor])
        if self._children is not None:
            await self._bury(self._children, kill=not self._engine_gone.is_set())
        self._lose_engine("stopped")
        self._load_error = "the engine was stopped before it had loaded"
        self._loaded.set()

    async def _run(self, children: Children) -> None:
        """Supervise. An engine that nobody watches any more must not pass for one that serves."""
        try:
            await self._supervise(children)
        except Exception:
            log.critical("the supervisor of the engine crashed", exc_info=True)
            self._lose_engine("its supervisor crashed")
            self._give_up("the supervisor of the engine crashed; see the log")

    async def _supervise(self, children: Children) -> None:
        """One incarnation after another, until the handle stops or gives up."""
        num_restarts = 0
        while True:
            began_s = time.monotonic()
            stuck = await self._watch()
            has_lasted = self._status is not WorkerStatus.LOADING and time.monotonic() - began_s >= _LASTING_S
            num_restarts = 1 if has_lasted else num_restarts + 1
            gives_up = num_restarts > self._config.max_restarts
            if self._ready is not None:
                why = stuck or f"the {await children.first_to_die()} died"
                self._lose_engine(why, is_final=gives_up)
            elif stuck:  # before its end, which a process that waits for a disk may keep us waiting for
                self._enter(WorkerStatus.FAILED, stuck)
            ending = await self._bury(children, kill=bool(stuck))
            why = stuck or self._load_error or ending
            if self._ready is None and (gives_up or not stuck):
                self._give_up(stuck or self._load_error or f"{ending} while it loaded")
                return
            log.error("lost the engine", why=why, restart=num_restarts)
            if gives_up:
                self._give_up(f"{why}, after {num_restarts - 1} restarts")
                return
            await asyncio.sleep(min(_MAX_BACKOFF_S, self._config.restart_backoff_s * 2 ** (num_restarts - 1)))
            self._enter(WorkerStatus.LOADING)
            try:
                children = self._spawn()
            except OSError as error:
                self._give_up(f"cannot start the engine again: {error}")
                return

    async def _watch(self) -> str:
        """Until the engine is gone, or why it has to be killed; keeps the status true meanwhile."""
        tick_s = min(_TICK_S, self._config.stuck_s / 4, self._config.silent_s / 4, self._config.load_still_s / 20)
        watchdog, load_watch = Watchdog(tick_s), LoadWatch(_LOOK_TICKS * tick_s)
        num_ticks = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(tick_s):
                    await self._engine_gone.wait()
                return ""
            num_ticks += 1
            assert self._children is not None, "they are there while they are watched"
            if self._status is WorkerStatus.LOADING:
                if num_ticks % _LOOK_TICKS:
                    continue
                work = await asyncio.to_thread(self._children.work)
                if work is not None:
                    load_watch.tick(*work)
                if load_watch.still_s >= self._config.load_still_s:
                    return f"the load hung: it neither computed nor read anything for {load_watch.still_s:.0f} s"
                continue
            is_stopped = self._children.is_runner_stopped
            watchdog.tick(self._last_report, is_runner_stopped=is_stopped)
            if watchdog.still_s >= self._config.restart_stuck_s:
                return "the engine was stuck"
            trouble = self._trouble(watchdog)
            if trouble and self._status is WorkerStatus.SERVING:
                self._enter(WorkerStatus.FAILED, trouble)
            elif not trouble and self._status is WorkerStatus.FAILED:
                self._enter(WorkerStatus.SERVING)

    def _trouble(self, watchdog: Watchdog) -> str:
        """Why it should get no new requests now; empty: it may."""
        if watchdog.silent_s >= self._config.silent_s:
            return f"the engine has said nothing for {watchdog.silent_s:.0f} s"
        if watchdog.stopped_s >= self._config.silent_s:
            return (
                f"the runner process has been stopped (SIGSTOP) for {watchdog.stopped_s:.0f} s; SIGCONT lets it go on"
            )
        if watchdog.still_s >= self._config.stuck_s:
            return f"the engine has not moved for {watchdog.still_s:.0f} s"
        return ""

    def _spawn(self) -> Children:
        self._load_error = ""
        self._engine_gone.clear()
        children = self._children = Children.spawn(self._config)
        asyncio.get_running_loop().add_reader(children.socket, self._receive, children)
        return children

    async def _bury(self, children: Children, *, kill: bool) -> str:
        """Reap both children, by force if asked; how they ended."""
        self._disconnect(children)
        ending = await (children.kill() if kill else children.end())
        self._children = None
        self._engine_gone.set()  # for a `stop` that waits: nobody listens to the socket any more
        return ending

    def _receive(self, children: Children) -> None:
        """The engine said something, or is gone."""
        try:
            frames = children.socket.receive()
        except PeerClosed:
            self._disconnect(children)
            self._engine_gone.set()
            return
        for frame in frames:
            self._hear(codec.decode_engine_message(frame))

    def _send(self, message: FrontMessage) -> None:
        children = self._children
        if children is None or self._engine_gone.is_set():
            return
        children.socket.send(codec.encode(message))
        if children.socket.wants_write:
            asyncio.get_running_loop().add_writer(children.socket, self._flush, children)

    def _flush(self, children: Children) -> None:
        """The kernel takes more."""
        children.socket.flush()
        if not children.socket.wants_write:
            asyncio.get_running_loop().remove_writer(children.socket)

    def _disconnect(self, children: Children) -> None:
        """Listen no more. Idempotent."""
        loop = asyncio.get_running_loop()
        if children.socket.fileno() >= 0:
            loop.remove_reader(children.socket)
            loop.remove_writer(children.socket)
