"""What becomes of a step for which the device had not enough memory: it is taken back, and tried again smaller.

    the step's requests   keep their rows and pages and stand where the last settled step left them. Nothing that the
                          failed step may have written counts, and nothing of later steps that were launched already
                          and built upon it (`Request.stale_steps`). When those have settled, each request's row is
                          started anew and it goes on, with known tokens in place of relayed ones.
    the next steps        are smaller (`StepSize`). Where fewer requests fit a step than run, they take turns.
    a request             fails only after `_TRIES` tries alone in a step of one token.

Used by the scheduler alone.
"""

from __future__ import annotations

import numpy as np

from worker.core.out_of_memory import OutOfMemory
from worker.memory.advisor import Advice, Shortage, Stage, advise
from worker.scheduling.assembly import Piece
from worker.scheduling.counters import Counters
from worker.scheduling.limits import Limits
from worker.scheduling.request import Request, State
from worker.scheduling.rows import RowIndex, Rows
from worker.scheduling.shortages import Shortages
from worker.scheduling.step_size import StepSize

_TRIES = 5
"""More than one, because what takes the memory may be another process, and gone a moment later."""
_STEP_STAGES = (Stage.PREFILL, Stage.DECODE, Stage.SAMPLING)


class Recovery:
    """Bounds the next steps after the device ran out of memory: see the head of the module."""

    def __init__(self, limits: Limits, counters: Counters, shortages: Shortages) -> None:
        self.size = StepSize(limits.chunked_prefill_size, limits.max_running_requests)
        self._counters = counters
        self._shortages = shortages

    def seated(self, running: RowIndex, rows: Rows) -> RowIndex:
        """The part of `running` that may be in the next step: all, or those whose last step was longest ago."""
        seats = self.size.sequences.now
        if len(running) <= seats:
            return running
        wants_a_step = (rows.is_decoding[running] == 0) | (rows.to_sample[running] > 0)
        able = np.flatnonzero(wants_a_step & (rows.stale_steps[running] == 0))
        chosen = able[np.argsort(rows.last_step[running[able]], kind="stable")[:seats]]
        return running[np.sort(chosen)]

    def passed(self, num_tokens: int, num_sequences: int) -> None:
        """Take note that a step of that size was computed: limits may grow."""
        was_full = self.size.is_full
        self.size.passed(num_tokens, num_sequences)
        if self.size.is_full and not was_full:
            self._shortages.ended(*_STEP_STAGES)

    def ran_out(self, pieces: list[Piece], num_tokens: int, shortage: OutOfMemory) -> Advice | None:
        """Make the next steps smaller: one ran out of memory. The advice, if its one request is to be given up."""
        stage = _stage(num_tokens > len(pieces), shortage)
        advice = advise(stage, Shortage(shortage.needed_bytes, shortage.free_bytes))
        self._shortages.began(stage, advice)
        self._count(stage)
        if self.size.ran_out(num_tokens, len(pieces), in_sampling=shortage.in_sampling):
            return None
        request = pieces[0].request
        if not request.stale_steps:
            request.tries_alone += 1
        return advice if request.tries_alone >= _TRIES else None

    def _count(self, stage: Stage) -> None:
        counters = self._counters
        counters.out_of_memory_prefill += stage is Stage.PREFILL
        counters.out_of_memory_decode += stage is Stage.DECODE
        counters.out_of_memory_sampling += stage is Stage.SAMPLING


def _stage(has_chunks: bool, shortage: OutOfMemory) -> Stage:  # noqa: FBT001 - a fact about the step, in one place
    if shortage.in_sampling:
        return Stage.SAMPLING
    return Stage.PREFILL if has_chunks else Stage.DECODE


def take_back(request: Request) -> None:
    """Return a request to its last settled position. The step that failed is no longer in `request.in_flight`."""
    request.stale_steps = request.in_flight
    request.last_step = 0  # its turn is still to come
    if request.is_seated:
        request.refill()
        request.planned = request.settled
        request.state = State.PREFILL
        request.restarts = True
