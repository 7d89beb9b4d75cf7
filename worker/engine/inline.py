"""An engine and its runner in the front's own process: for tests, and for debugging a worker as one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import structlog

from radixfleet.clock import Clock, MonotonicClock
from worker.core.messages import EngineMessage, FrontMessage, Stop
from worker.engine.config import EngineConfig, load_failure, make_runner
from worker.engine.conversation import Conversation
from worker.engine.executors import InlineExecutor
from worker.engine.loop import EngineLoop
from worker.runner.protocol import Runner
from worker.scheduling.limits import Limits, Order
from worker.scheduling.scheduler import Scheduler

log = structlog.get_logger(__name__)


class InlineEngine(Conversation):
    """Runs the engine's loop as a task that yields after each turn.

    With `overlap` the scheduler plans each step without the tokens of the one before, exactly as with a runner process.
    A step runs on the event loop, which stands still for it: microseconds with a simulated runner. A crash is final:
    there is nothing to restart.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        overlap: bool = True,
        schedule_order: Order = "lpm",
        preempt: bool = False,
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        self._runner = runner
        self._overlap = overlap
        self._schedule_order: Order = schedule_order
        self._preempt = preempt
        self._clock: Clock = clock or MonotonicClock()
        self._mailbox = _LocalMailbox(self._hear)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """The engine that a process would run."""
        clock = MonotonicClock()
        runner = make_runner(config.runner, clock)
        return cls(
            runner,
            overlap=config.overlap,
            schedule_order=config.schedule_order,
            preempt=config.preempt,
            clock=clock,
        )

    async def start(self) -> None:
        """Begin loading."""
        self._task = asyncio.create_task(self._run(), name="inline engine")

    async def stop(self) -> None:
        """Settle what is in flight and end. Waits for a load in progress, which nothing can interrupt."""
        if self._task is None or self._stopping:
            return
        self._stopping = True
        self._send(Stop())
        await self._task
        self._lose_engine("stopped")

    def _send(self, message: FrontMessage) -> None:
        self._mailbox.post(message)

    async def _run(self) -> None:
        try:
            await self._load_and_serve()
        except Exception as error:
            log.exception("the engine crashed")
            self._lose_engine("the engine crashed")
            self._give_up(f"the engine crashed: {error}")
        finally:
            self._runner.close()

    async def _load_and_serve(self) -> None:
        try:
            ready = await asyncio.to_thread(self._runner.load)
        except Exception as error:  # noqa: BLE001 - an edge; load_failure logs it
            self._give_up(load_failure(error))
            return
        executor = InlineExecutor(self._runner, max_in_flight=2 if self._overlap else 1)
        limits = Limits.from_ready(ready, order=self._schedule_order, preempt=self._preempt)
        scheduler = Scheduler(limits, self._clock)
        loop = EngineLoop(scheduler, executor, self._mailbox, self._clock, overlap=self._overlap)
        self._hear(ready)
        while not loop.finished:
            if loop.turn() or executor.advance():
                await asyncio.sleep(0)
            else:
                await self._mailbox.wait(loop.wait_s)


class _LocalMailbox:
    """The engine's mailbox within the process."""

    def __init__(self, tell: Callable[[EngineMessage], None]) -> None:
        self._tell = tell
        self._messages: list[FrontMessage] = []
        self._arrived = asyncio.Event()

    def post(self, message: FrontMessage) -> None:
        """Put a message in."""
        self._messages.append(message)
        self._arrived.set()

    async def wait(self, timeout_s: float) -> None:
        """Until there is a message, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            pass

    def receive(self) -> list[FrontMessage]:
        """What has come."""
        messages, self._messages = self._messages, []
        self._arrived.clear()
        return messages

    def send(self, message: EngineMessage) -> None:
        """Tell the front, at once."""
        self._tell(message)
