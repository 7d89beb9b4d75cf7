"""Main of the engine process: scheduler, radix cache and page accounting, between the front and the runner.

    python -m worker.engine.engine_process FRONT_PID FRONT_SOCKET RUNNER_SOCKET  < configuration as JSON

Imports no torch. Ends when the front says so or is gone, and when the runner is gone (exit code EXIT_RUNNER_GONE).
"""

from __future__ import annotations

import structlog

from radixfleet.clock import MonotonicClock
from radixfleet.garbage import settle_in
from worker.core import codec
from worker.core.messages import EngineMessage, FrontMessage, Ready, Stop
from worker.engine.child import EXIT_LOAD_FAILED, EXIT_RUNNER_GONE, Start, run, wait_for_any
from worker.engine.executors import ProcessExecutor
from worker.engine.loop import EngineLoop
from worker.engine.pacing import Pacing
from worker.engine.wire import FrameSocket, PeerClosed
from worker.scheduling.limits import Limits
from worker.scheduling.scheduler import Scheduler

log = structlog.get_logger(__name__)


class SocketMailbox:
    """The front at the other end of a socket. A front that is gone reads as one that said stop."""

    def __init__(self, front: FrameSocket) -> None:
        self._front = front

    def receive(self) -> list[FrontMessage]:
        """What has arrived."""
        try:
            return [codec.decode_front_message(frame) for frame in self._front.receive()]
        except PeerClosed:
            return [Stop()]

    def send(self, message: EngineMessage) -> None:
        """Send to the front."""
        self._front.send(codec.encode(message))


def serve(start: Start) -> int:
    """Wait for the runner to load, then run the loop until told to stop. Returns the exit code."""
    front, runner = start.sockets
    mailbox = SocketMailbox(front)
    try:
        while not (outcomes := runner.receive()):
            if mailbox.receive():
                return 0
            wait_for_any(start.sockets, None)
        outcome = codec.decode_load_outcome(outcomes[0])
        mailbox.send(outcome)
        if not isinstance(outcome, Ready):
            front.drain()
            return EXIT_LOAD_FAILED
        run_loop(start, outcome, mailbox)
    except PeerClosed:
        log.critical("the runner is gone, and the engine ends")
        return EXIT_RUNNER_GONE
    front.drain()
    return 0


def run_loop(start: Start, ready: Ready, mailbox: SocketMailbox) -> None:
    """Serve. Raises PeerClosed when the runner is gone."""
    clock = MonotonicClock()
    limits = Limits.from_ready(ready, order=start.config.schedule_order, preempt=start.config.preempt)
    scheduler = Scheduler(limits, clock)
    executor = ProcessExecutor(start.sockets[1])
    loop = EngineLoop(scheduler, executor, mailbox, clock, overlap=start.config.overlap, pacing=Pacing())
    settle_in()
    while not loop.finished:
        loop.turn()
        wait_for_any(start.sockets, loop.wait_s)


if __name__ == "__main__":
    run("engine", serve)
