"""Which log probabilities rows ask to be told, and how they are put together: see `worker.core.logits.StepLogprobs`.

The logits at position p foretell the token at p + 1. So a chunk of a prompt, [start, end), tells of the prompt's tokens
at start + 1 to end, of which the last belongs to the next chunk: the row keeps the prompt for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.core.arrays import Int32Array
from worker.core.logits import Logprobs, StepLogprobs
from worker.core.step import RowStart, StepPlan

_IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one step has to tell: first of prompts' tokens, then of sampled ones."""

    width: int
    """Likeliest tokens for each."""
    prompt_indices: _IndexArray
    """Tokens of the flat batch whose logits foretell a token of a prompt."""
    prompt_tokens: Int32Array
    """The tokens foretold."""
    sampled: _IndexArray
    """Which of the sequences that sample ask for it."""
    sequences: Int32Array
    positions: Int32Array

    def put_together(self, parts: list[Logprobs]) -> StepLogprobs:
        """`parts`: of the prompts' tokens, in any number, then of the sampled ones; all of `width`."""
        order = np.lexsort((self.positions, self.sequences))
        return StepLogprobs(
            sequences=self.sequences[order],
            positions=self.positions[order],
            logprobs=np.concatenate([part.tokens for part in parts])[order],
            top_ids=np.concatenate([part.top_ids for part in parts])[order].reshape(-1),
            top_logprobs=np.concatenate([part.top for part in parts])[order].reshape(-1),
            width=self.width,
        )


class RowLogprobs:
    """All rows of one runner."""

    def __init__(self, max_rows: int) -> None:
        self._sampled = np.full(max_rows, -1, np.int32)
        """So many of the likeliest; -1: tell nothing."""
        self._prompt = np.full(max_rows, -1, np.int32)
        self._prompts: dict[int, Int32Array] = {}

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        self._sampled[start.row] = -1 if start.logprobs is None else start.logprobs
        self._prompt[start.row] = -1
        self._prompts.pop(start.row, None)
        if start.prompt_logprobs is not None:
            assert start.history is not None, "what is to be told of must be known"
            self._prompt[start.row] = start.prompt_logprobs
            self._prompts[start.row] = start.history[: start.prompt_tokens]

    def wanted(self, plan: StepPlan, sampling: _IndexArray) -> Wanted | None:
        """What the rows of a step ask for; `sampling`: the sequences that sample. None when that is nothing."""
        sampled = np.flatnonzero(self._sampled[plan.rows[sampling]] >= 0)
        telling = [
            sequence
            for sequence, row in enumerate(plan.rows.tolist() if self._prompts else ())
            if row in self._prompts and plan.starts[sequence] + 1 < len(self._prompts[row])
        ]
        if not len(sampled) and not telling:
            return None
        offsets = np.cumsum(plan.lengths) - plan.lengths
        indices, tokens, sequences, positions = [sampled[:0]], [plan.rows[:0]], [sampled[:0]], [plan.rows[:0]]
        for sequence in telling:
            prompt = self._prompts[int(plan.rows[sequence])]
            start = int(plan.starts[sequence])
            foretold = np.arange(start + 1, min(start + int(plan.lengths[sequence]) + 1, len(prompt)), dtype=np.int32)
            indices.append(offsets[sequence] + foretold - 1 - start)
            tokens.append(prompt[foretold])
            sequences.append(np.full(len(foretold), sequence))
            positions.append(foretold)
        speaking = sampling[sampled]
        sequences.append(speaking)
        positions.append(plan.starts[speaking] + plan.lengths[speaking])
        return Wanted(
            width=int(max(self._sampled[plan.rows[speaking]].max(initial=0), self._prompt[plan.rows].max(initial=0))),
            prompt_indices=np.concatenate(indices),
            prompt_tokens=np.concatenate(tokens),
            sampled=sampled,
            sequences=np.concatenate(sequences).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
        )
