"""What the engine asks of a runner: the device's side of a worker. `sim` computes hashes, `torch` computes a model.

A runner lives on one thread, in its own process or inline. It holds, beside weights and KV pool, three things a row,
all of them learnt from plans alone:

    table[row, position]        slot of each position computed so far: `RowStart.prefix_slots`, then `StepPlan.slots`
    relay[row]                  the token that the row sampled last: input of its next relayed step
    parameters[row]             `RowStart`: temperature, seed, stop tokens, ...

A row is in use from a `RowStart` to the next `RowStart` of the same row, which may be of the same request: after a
step that ran out of memory, each of its rows begins anew, from what was computed before. Nothing says when a request
ends, so what a row holds in between is simply no longer read. The scheduler promises that a plan writes no slot that
a step launched before it reads for another row, and that it plans positions of a row without a gap, so a runner needs
no checks to be correct; `sim` makes them all the same, for the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from radixfleet.types import Grammar
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult


class Runner(Protocol):
    """Computes steps, strictly in the order of `StepPlan.step`."""

    def load(self) -> Ready:
        """Load the weights, measure, allocate the pools, and say what there is. Called once, first; may take minutes.

        The KV pool has `capacity.kv_tokens / capacity.page_size` pages and, before them, the padding sink (page 0). A
        step has at most `capacity.max_running_requests` sequences, and `capacity.chunked_prefill_size` tokens more
        than that. Raises an error with advice for the operator when the model cannot be served.
        """
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and wait for its end.

        A failure of the step is told in `StepResult.error`, not raised, and leaves the runner able to go on: rows
        that were not in the step keep what they hold. Where it was memory that ran out, `StepResult.out_of_memory` is
        set as well, and what allocators keep for reuse is released. What is raised is the end of the runner.
        """
        ...

    def prepare(self, grammar: Grammar) -> str:
        """Compile a grammar and keep it, so that a row which starts with it need not wait. May take long.

        Why it cannot be used, for the client; empty when it can. Called after `load`, from any one thread at a time,
        also while `run` computes. A row may start with a grammar that was not prepared, or not for a while.
        """
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...


@runtime_checkable
class StepQueue(Protocol):
    """What a runner offers besides whose device has a queue: `run` is then `enqueue` and `collect`.

    A step that is handed over while another runs begins when that one ends. Between two steps such a device waits for
    nobody's interpreter, socket or scheduler, as long as the next step is handed over in time.
    """

    def enqueue(self, plan: StepPlan) -> None:
        """Hand over a step. Waits neither for its end nor, but for a step with grammars, for the steps before it."""
        ...

    def time_left_s(self) -> float:
        """How long the oldest step that was not collected will still take, about; 0 once it has ended."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step that was not collected; waits for its end. Failures as in `Runner.run`."""
        ...


@runtime_checkable
class TellsLayersComputed(Protocol):
    """What a runner offers besides that computes on the machine's own cores."""

    def tell_layers_computed(self, tell: Callable[[], None]) -> None:
        """Call `tell` in each step when its layers are computed, before its logits are. Called once, after `load`.

        Most of what is left then takes one core. Not later, so that the next step is there in time: the logits take
        about as long as planning does.
        """
        ...
