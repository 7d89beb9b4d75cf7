"""Main of the runner process: executes step after step, in the order in which they come.

    python -m worker.engine.runner_process FRONT_PID ENGINE_SOCKET  < configuration as JSON

While a step runs, the next one arrives: it lies in the socket when the step ends. Grammars are compiled on a thread
beside the steps. The process ends when the engine is gone, and when the runner raises, which it does when it cannot go
on.
"""

from __future__ import annotations

import structlog

from radixfleet.clock import MonotonicClock
from worker.core import codec
from worker.core.messages import LoadFailed
from worker.core.step import StepPlan
from worker.engine.child import EXIT_LOAD_FAILED, Start, run, settle_in
from worker.engine.config import load_failure, make_runner
from worker.engine.preparation import Preparation
from worker.engine.wire import FrameSocket, PeerClosed
from worker.runner.protocol import Runner

log = structlog.get_logger(__name__)


def serve(start: Start) -> int:
    """Load, then run steps. Returns the exit code."""
    (engine,) = start.sockets
    try:
        runner = make_runner(start.config.runner, MonotonicClock())
        ready = runner.load()
    except Exception as error:  # noqa: BLE001 - an edge; load_failure logs it
        engine.send(codec.encode(LoadFailed(load_failure(error))))
        engine.drain()
        return EXIT_LOAD_FAILED
    engine.send(codec.encode(ready))
    settle_in()
    try:
        run_steps(runner, engine)
    finally:
        runner.close()
    return 0


def run_steps(runner: Runner, engine: FrameSocket) -> None:
    """Run what the engine sends, until it is gone."""
    with Preparation(runner.prepare) as preparation:
        while True:
            try:
                frames = engine.receive()
            except PeerClosed:
                return
            orders = [codec.decode_order(frame) for frame in frames]
            for order in orders:
                if not isinstance(order, StepPlan):
                    preparation.begin(order)
            for order in orders:
                if isinstance(order, StepPlan):
                    engine.send(codec.encode(runner.run(order)))
            for answer in preparation.take():
                engine.send(codec.encode(answer))
            if not orders:
                engine.wait_readable(preparation)


if __name__ == "__main__":
    run("runner", serve)
