"""Main of the runner process: executes step after step, in the order in which they come.

    python -m worker.engine.runner_process FRONT_PID ENGINE_SOCKET  < configuration as JSON

While a step runs, the next one arrives. It is handed to the device's queue, where there is one (`StepQueue`);
else it lies in the socket when the step ends. Grammars are compiled on a thread beside the steps. The process ends when
the engine is gone, and when the runner raises, which it does when it cannot go on.
"""

from __future__ import annotations

from collections import deque

import structlog

from radixfleet.clock import MonotonicClock
from radixfleet.garbage import settle_in
from worker.core import codec
from worker.core.messages import LoadFailed
from worker.core.step import LayersComputed, StepPlan, StepResult
from worker.engine.child import EXIT_LOAD_FAILED, Start, run
from worker.engine.config import load_failure, make_runner
from worker.engine.preparation import Preparation
from worker.engine.wire import FrameSocket, PeerClosed
from worker.runner.protocol import Runner, StepQueue, TellsLayersComputed

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
    steps = runner if isinstance(runner, StepQueue) else _OneByOne(runner)
    if steps is not runner and isinstance(runner, TellsLayersComputed):
        layers_computed = codec.encode(LayersComputed())
        runner.tell_layers_computed(lambda: engine.send(layers_computed))
    num_queued = 0
    with Preparation(runner.prepare) as preparation:
        while True:
            try:
                orders = [codec.decode_order(frame) for frame in engine.receive()]
            except PeerClosed:
                return
            for order in orders:
                if isinstance(order, StepPlan):
                    steps.enqueue(order)
                    num_queued += 1
                else:
                    preparation.begin(order)
            while num_queued and not steps.time_left_s():
                engine.send(codec.encode(steps.collect()))
                num_queued -= 1
            for answer in preparation.take():
                engine.send(codec.encode(answer))
            if not orders:
                engine.wait_readable(preparation, timeout_s=steps.time_left_s() if num_queued else None)


class _OneByOne:
    """The queue of a runner that has none: a step runs when it is collected."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans: deque[StepPlan] = deque()

    def enqueue(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def time_left_s(self) -> float:
        return 0.0

    def collect(self) -> StepResult:
        return self._runner.run(self._plans.popleft())


if __name__ == "__main__":
    run("runner", serve)
