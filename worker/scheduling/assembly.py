"""Puts a step together: from who computes what, to the arrays of a `StepPlan`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from worker.core.arrays import Int32Array
from worker.core.step import RowStart, StepPlan
from worker.memory.req_to_token import ReqToTokenPool
from worker.scheduling.request import Request
from worker.scheduling.rows import RowIndex


class Piece(msgspec.Struct, frozen=True, gc=False):
    """One sequence of a step: a request computes positions [start, start + length)."""

    request: Request
    start: int
    length: int
    samples: bool


class Decodes(NamedTuple):
    """The part of a step in which requests compute one token each, beyond their `fill_ids`."""

    rows: RowIndex
    requests: list[Request]
    starts: npt.NDArray[np.int64]
    """The position that each decode computes."""

    def piece(self, index: int) -> Piece:
        """The decode at `index` as a piece of the step."""
        return Piece(self.requests[index], int(self.starts[index]), 1, samples=True)


class Launched(NamedTuple):
    """What is kept of a launched step until its result is there. Its sequences are the decodes, then the chunks."""

    step: int
    decodes: Decodes
    chunks: list[Piece]
    slots: Int32Array
    """The plan's slots: those that the step writes."""

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return len(self.decodes.rows) + len(self.chunks)

    def piece(self, sequence: int) -> Piece:
        """The sequence of this number as a piece of the step."""
        num_decodes = len(self.decodes.rows)
        return self.decodes.piece(sequence) if sequence < num_decodes else self.chunks[sequence - num_decodes]

    @property
    def pieces(self) -> list[Piece]:
        """All of them, made anew on each access."""
        return [self.decodes.piece(index) for index in range(len(self.decodes.rows))] + self.chunks


def row_start(request: Request, table: ReqToTokenPool) -> RowStart:
    """What the runner must know of a request that has just been given a row, or goes on after a step taken back."""
    submit, held = request.submit, request.held
    return RowStart(
        row=held.row,
        prefix_slots=table.slots(held.row, 0, request.settled),
        temperature=submit.temperature,
        top_p=submit.top_p,
        top_k=submit.top_k,
        min_p=submit.min_p,
        seed=submit.seed,
        prompt_tokens=len(submit.token_ids),
        min_new_tokens=submit.min_new_tokens,
        stop_token_ids=submit.stop_token_ids,
        edits=submit.edits,
        logprobs=submit.logprobs,
        prompt_logprobs=submit.prompt_logprobs if request.next_prompt_logprob else None,
        history=request.history() if request.needs_history else None,
    )


def assemble(
    step: int, row_starts: tuple[RowStart, ...], decodes: Decodes, chunks: list[Piece], table: ReqToTokenPool
) -> StepPlan:
    """The plan of a step: first the decodes (length 1, input relayed), then the chunks."""
    num_decodes = len(decodes.rows)
    num_sequences = num_decodes + len(chunks)
    rows, starts, lengths = np.ones((3, num_sequences), dtype=np.int32)
    samples, relayed = np.ones((2, num_sequences), dtype=np.bool_)
    rows[:num_decodes] = decodes.rows
    starts[:num_decodes] = decodes.starts
    rows[num_decodes:] = [chunk.request.held.row for chunk in chunks]
    starts[num_decodes:] = [chunk.start for chunk in chunks]
    lengths[num_decodes:] = [chunk.length for chunk in chunks]
    samples[num_decodes:] = [chunk.samples for chunk in chunks]
    relayed[num_decodes:] = False
    slots = [table.slots(c.request.held.row, c.start, c.start + c.length) for c in chunks]
    input_ids = [c.request.fill_ids[c.start : c.start + c.length] for c in chunks]
    return StepPlan(
        step=step,
        row_starts=row_starts,
        rows=rows,
        starts=starts,
        lengths=lengths,
        samples=samples,
        relayed=relayed,
        input_ids=np.concatenate([np.zeros(num_decodes, dtype=np.int32), *input_ids]),
        slots=np.concatenate([table.slots_at(decodes.rows, decodes.starts), *slots]),
    )
