"""What a step's result tells of sequences beside their tokens: log probabilities, the end of a grammar, causes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from worker.core.arrays import Float32Array, Int32Array
from worker.core.logits import StepLogprobs, TokenLogprobs
from worker.core.step import StepResult
from worker.scheduling.assembly import Launched


class PromptRun(NamedTuple):
    """Log probabilities of prompt tokens one after another."""

    start: int
    """Position of the first."""
    logprobs: Float32Array
    top_ids: Int32Array
    """[tokens, width]"""
    top_logprobs: Float32Array


class Note(NamedTuple):
    """What a step's result tells of one sequence beside its token."""

    sampled: TokenLogprobs | None = None
    prompt: PromptRun | None = None
    has_ended: bool = False
    """The request's grammar allows nothing after the token."""
    cause: str = ""
    """Why the sequence failed; empty where it did not, and where its logits were NaN."""


NOTHING = Note()


def notes_of(result: StepResult, launched: Launched) -> dict[int, Note]:
    """The notes of a step by the number of the sequence; those without any are left out."""
    notes: dict[int, Note] = {}
    if result.logprobs is not None and len(result.logprobs.sequences):
        _add_logprobs(notes, result.logprobs, launched)
    for sequence in result.ended:
        notes[sequence] = notes.get(sequence, NOTHING)._replace(has_ended=True)
    for sequence, cause in result.causes:
        notes[sequence] = notes.get(sequence, NOTHING)._replace(cause=cause)
    return notes


def _add_logprobs(notes: dict[int, Note], told: StepLogprobs, launched: Launched) -> None:
    shape = (len(told.sequences), told.width)
    top_ids, top_logprobs = told.top_ids.reshape(shape), told.top_logprobs.reshape(shape)
    speaking, firsts = np.unique(told.sequences, return_index=True)
    ends = [*firsts[1:].tolist(), len(told.sequences)]
    for sequence, first, end in zip(speaking.tolist(), firsts.tolist(), ends, strict=True):
        piece = launched.piece(sequence)
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
