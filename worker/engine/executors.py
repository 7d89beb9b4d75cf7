"""Where steps are executed: the runner of this process, or one in a process of its own. Both strictly in order."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from worker.core import codec
from worker.core.messages import Prepare, Prepared
from worker.core.step import Compile, Compiled, LayersComputed, StepPlan, StepResult
from worker.engine.wire import FrameSocket
from worker.runner.protocol import Runner


class Executor(Protocol):
    """Takes plans and gives results, in the order of the plans."""

    def launch(self, plan: StepPlan) -> None:
        """Hand a step over; a runner process executes it meanwhile."""
        ...

    def prepare(self, order: Prepare) -> None:
        """Have a grammar compiled; a runner process does it beside its steps."""
        ...

    def results(self) -> list[StepResult]:
        """The results that have come since the last call. Never waits for another process."""
        ...

    def prepared(self) -> list[Prepared]:
        """The answers to `prepare` that had come when `results` was last called, each given once."""
        ...

    def take_layers_computed(self) -> bool:
        """Whether the runner has said that the layers of the oldest step in flight, which has no result, are computed.

        As of when `results` was last called; told once.
        """
        ...


class InlineExecutor:
    """Runs steps on the caller's thread, for tests and for one-process workers.

    Up to `max_in_flight` steps lie here before the oldest is run: with two of them, the scheduler plans and launches a
    step before it knows the tokens of the one before, as it does with a runner process. `advance` runs the oldest when
    no further step will come without its result.
    """

    def __init__(self, runner: Runner, *, max_in_flight: int) -> None:
        self._runner = runner
        self._max_in_flight = max_in_flight
        self._launched: deque[StepPlan] = deque()
        self._results: list[StepResult] = []
        self._prepared: list[Prepared] = []

    def launch(self, plan: StepPlan) -> None:
        """Hand a step over, and run the oldest if that makes the pipeline full."""
        self._launched.append(plan)
        if len(self._launched) >= self._max_in_flight:
            self.advance()

    def advance(self) -> bool:
        """Run the oldest step. False when there is none."""
        if not self._launched:
            return False
        self._results.append(self._runner.run(self._launched.popleft()))
        return True

    def results(self) -> list[StepResult]:
        """The results of the steps run since the last call."""
        results, self._results = self._results, []
        return results

    def prepare(self, order: Prepare) -> None:
        """Compile at once."""
        self._prepared.append(Prepared(order.ticket, self._runner.prepare(order.grammar)))

    def prepared(self) -> list[Prepared]:
        """The answers since the last call."""
        prepared, self._prepared = self._prepared, []
        return prepared

    def take_layers_computed(self) -> bool:
        """Never: a step is run when nothing else is to be done."""
        return False


class ProcessExecutor:
    """Sends steps to a runner process, where step N+1 lies ready when step N ends.

    `results` raises PeerClosed when the runner process is gone.
    """

    def __init__(self, runner_end: FrameSocket) -> None:
        self._socket = runner_end
        self._prepared: list[Prepared] = []
        self._layers_computed = False
        """The runner has said that the layers of the step whose result comes next are computed."""

    def launch(self, plan: StepPlan) -> None:
        """Send a step."""
        self._socket.send(codec.encode(plan))

    def prepare(self, order: Prepare) -> None:
        """Send a grammar."""
        self._socket.send(codec.encode(Compile(order.ticket, order.grammar)))

    def results(self) -> list[StepResult]:
        """The results that have arrived."""
        results = []
        for frame in self._socket.receive():
            match codec.decode_answer(frame):
                case Compiled(ticket=ticket, refusal=refusal):
                    self._prepared.append(Prepared(ticket, refusal))
                case LayersComputed():
                    self._layers_computed = True
                case StepResult() as result:
                    self._layers_computed = False
                    results.append(result)
        return results

    def prepared(self) -> list[Prepared]:
        """The answers that have arrived."""
        prepared, self._prepared = self._prepared, []
        return prepared

    def take_layers_computed(self) -> bool:
        """What the runner has said last."""
        layers_computed, self._layers_computed = self._layers_computed, False
        return layers_computed
