"""What a step's result tells of each sequence beside its token: log probabilities, the end of a grammar, causes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from worker.core.logits import Float32Array, Int32Array, StepLogprobs, TokenLogprobs
from worker.core.step import StepResult
from worker.scheduling.assembly import Piece


class PromptRun(NamedTuple):
    """Log probabilities of prompt tokens one after another."""

    start: int
    """Position of the first."""
    logprobs: Float32Array
    top_ids: Int32Array
    """[tokens, width]"""
    top_logprobs: Float32Array


class Note(NamedTuple):
    """Of one sequence."""

    sampled: TokenLogprobs | None = None
    prompt: PromptRun | None = None
    has_ended: bool = False
    """Its grammar allows nothing after the token."""
    cause: str = ""
    """Why it failed, if that was not a NaN."""


_NOTHING = Note()


def notes_of(result: StepResult, pieces: Sequence[Piece]) -> list[Note]:
    """One for each of the step's pieces, in order."""
    notes = [_NOTHING] * len(pieces)
    if result.logprobs is not None and len(result.logprobs.sequences):
        _add_logprobs(notes, result.logprobs, pieces)
    for sequence in result.ended:
        notes[sequence] = notes[sequence]._replace(has_ended=True)
    for sequence, cause in result.causes:
        notes[sequence] = notes[sequence]._replace(cause=cause)
    return notes


def _add_logprobs(notes: list[Note], told: StepLogprobs, pieces: Sequence[Piece]) -> None:
    shape = (len(told.sequences), told.width)
    top_ids, top_logprobs = told.top_ids.reshape(shape), told.top_logprobs.reshape(shape)
    speaking, firsts = np.unique(told.sequences, return_index=True)
    ends = [*firsts[1:].tolist(), len(told.sequences)]
    for sequence, first, end in zip(speaking.tolist(), firsts.tolist(), ends, strict=True):
        piece = pieces[sequence]
        sampled = None
        if piece.samples and told.positions[end - 1] == piece.start + piece.length:
            end -= 1
            k = piece.request.submit.logprobs or 0
            sampled = TokenLogprobs(
                float(told.logprobs[end]), top_ids[end, :k].tolist(), top_logprobs[end, :k].tolist()
            )
        run = None
        if end > first:
            entries = slice(first, end)
            start = int(told.positions[first])
            run = PromptRun(start, told.logprobs[entries], top_ids[entries], top_logprobs[entries])
        notes[sequence] = Note(sampled, run)
