"""Puts a step together: from who computes what, to the arrays of a `StepPlan`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from worker.core.step import Int32Array, RowStart, StepPlan
from worker.memory.req_to_token import ReqToTokenPool
from worker.scheduling.request import Request


class Piece(msgspec.Struct, frozen=True, gc=False):
    """One sequence of a step: a request computes positions [start, start + length)."""

    request: Request
    start: int
    length: int
    samples: bool


class Launched(NamedTuple):
    """What is remembered of a step until its result is there."""

    step: int
    pieces: list[Piece]
    num_decodes: int
    """The first of the pieces are decodes, beyond their `fill_ids`."""
    slots: Int32Array
    """As in the plan: what the step writes."""


def row_start(request: Request, table: ReqToTokenPool) -> RowStart:
    """What the runner must know of a request that has just been given a row, or goes on after a step taken back."""
    submit, held = request.submit, request.held
    return RowStart(
        row=held.row,
        prefix_slots=table.slots(held.row, 0, request.settled).copy(),
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
    step: int, starts_rows: tuple[RowStart, ...], pieces: list[Piece], num_decodes: int, table: ReqToTokenPool
) -> StepPlan:
    """The plan of a step: the first `num_decodes` pieces are decodes (length 1, input relayed), the rest chunks."""
    rows = np.array([piece.request.holding.row for piece in pieces], dtype=np.int32)  # type: ignore[union-attr]
    starts = np.array([piece.start for piece in pieces], dtype=np.int32)
    chunks = pieces[num_decodes:]
    lengths = np.ones(len(pieces), dtype=np.int32)
    lengths[num_decodes:] = [piece.length for piece in chunks]
    samples = np.ones(len(pieces), dtype=np.bool_)
    samples[num_decodes:] = [piece.samples for piece in chunks]
    decode_slots = table.table[rows[:num_decodes], starts[:num_decodes]]
    chunk_slots = [
        table.slots(row, c.start, c.start + c.length) for row, c in zip(rows[num_decodes:], chunks, strict=True)
    ]
    chunk_ids = [c.request.fill_ids[c.start : c.start + c.length] for c in chunks]
    return StepPlan(
        step=step,
        starts_rows=starts_rows,
        rows=rows,
        starts=starts,
        lengths=lengths,
        samples=samples,
        relayed=np.arange(len(pieces)) < num_decodes,
        input_ids=np.concatenate([np.zeros(num_decodes, dtype=np.int32), *chunk_ids]),
        slots=np.concatenate([decode_slots, *chunk_slots]),
    )
