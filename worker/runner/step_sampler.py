"""From the model's hidden states to the tokens of a step, and what is told of them.

begin      masks of grammars begin to be computed, beside the model
finish     log probabilities of prompts' tokens, in tiles of rows, so that a chunk never needs all its logits at once
           logits of the sequences that sample -> kept as they are for log probabilities -> edited -> tokens drawn
           counts, matchers and the relay go on by the tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixfleet.types import MAX_LOGPROBS
from worker.core.logits import Logprobs, StepLogprobs
from worker.core.step import BoolArray, Int32Array, RowStart, StepPlan
from worker.model.llama import LlamaModel
from worker.runner.row_edits import RowEdits
from worker.runner.row_grammars import Accepted, Masks
from worker.runner.row_logprobs import RowLogprobs, Wanted
from worker.runner.rows import RowState
from worker.sampling.logprobs import logprobs_of
from worker.sampling.sampler import sample


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of the sequences of a step, on the host: see the fields of `StepResult`."""

    token_ids: Int32Array
    failed: BoolArray
    logprobs: StepLogprobs | None = None
    ended: tuple[int, ...] = ()
    causes: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begun:
    """A step of which the tokens are still to be drawn."""

    sampling: npt.NDArray[np.intp]
    """Sequences that sample; the fields below are theirs."""
    rows: Int32Array
    positions: Int32Array
    """Of the tokens to be drawn."""
    is_edited: bool
    masks: Masks | None
    wanted: Wanted | None


class StepSampler:
    """Sampling over the rows of one runner."""

    def __init__(
        self, *, rows: RowState, edits: RowEdits, max_rows: int, device: torch.device, row_by_row: bool = False
    ) -> None:
        """`row_by_row`: so that the last bits of sums over the vocabulary do not depend on the number of rows."""
        self._rows = rows
        self._edits = edits
        self._logprobs = RowLogprobs(max_rows)
        self._tile_rows = max_rows
        self._device = device
        self._row_by_row = row_by_row

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._edits.nbytes

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        self._edits.start(start)
        self._logprobs.start(start)

    def end(self, row: int) -> None:
        """A row's request has left it."""
        self._edits.end(row)

    def begin(self, plan: StepPlan) -> Begun:
        """Before the model computes."""
        sampling = np.flatnonzero(plan.samples)
        rows = plan.rows[sampling]
        positions = plan.starts[sampling] + plan.lengths[sampling]
        is_edited = self._edits.any(rows)
        return Begun(
            sampling=sampling,
            rows=rows,
            positions=positions,
            is_edited=is_edited,
            masks=self._edits.begin(rows, positions) if is_edited else None,
            wanted=self._logprobs.wanted(plan, sampling),
        )

    def finish(self, plan: StepPlan, begun: Begun, model: LlamaModel, hidden: Tensor) -> Sampled:
        """Draw the tokens; waits for the device. `hidden`: what the model made of the plan's tokens."""
        token_ids = np.zeros(plan.num_sequences, np.int32)
        failed = np.zeros(plan.num_sequences, np.bool_)
        told = self._tell_prompts(begun.wanted, model, hidden)
        if not len(begun.sampling):
            return Sampled(token_ids, failed, begun.wanted.put_together(told) if begun.wanted else None)
        last_tokens = np.cumsum(plan.lengths)[begun.sampling] - 1
        logits = model.logits(hidden, self._to_device(last_tokens))
        untouched = logits[self._to_device(begun.wanted.sampled)] if begun.wanted is not None else None
        if begun.is_edited:
            self._edits.apply(logits, begun.rows, begun.masks)
        tokens, bad = self._sample(logits, begun)
        self._rows.relay[self._to_device(begun.rows)] = tokens
        token_ids[begun.sampling] = tokens.cpu().numpy()
        failed[begun.sampling] = bad.cpu().numpy()
        if begun.wanted is not None and untouched is not None:
            chosen = tokens[self._to_device(begun.wanted.sampled)]
            told += self._logprobs_of(untouched, chosen, begun.wanted.width)
        accepted = Accepted()
        if begun.is_edited:
            accepted = self._edits.sampled(begun.rows, tokens, failed[begun.sampling])
        failed[begun.sampling[list(accepted.causes)]] = True
        return Sampled(
            token_ids,
            failed,
            begun.wanted.put_together(told) if begun.wanted is not None else None,
            ended=tuple(begun.sampling[accepted.ended].tolist()),
            causes={int(begun.sampling[index]): cause for index, cause in accepted.causes.items()},
        )

    def _tell_prompts(self, wanted: Wanted | None, model: LlamaModel, hidden: Tensor) -> list[Logprobs]:
        told: list[Logprobs] = []
        if wanted is not None:
            for begin in range(0, len(wanted.prompt_indices), self._tile_rows):
                tile = slice(begin, begin + self._tile_rows)
                logits = model.logits(hidden, self._to_device(wanted.prompt_indices[tile]))
                told += self._logprobs_of(logits, self._to_device(wanted.prompt_tokens[tile]), wanted.width)
        return told

    def _sample(self, logits: Tensor, begun: Begun) -> tuple[Tensor, Tensor]:
        if not self._row_by_row:
            return sample(logits, self._rows.sampling(begun.rows, begun.positions))
        drawn = [
            sample(logits[one], self._rows.sampling(begun.rows[one], begun.positions[one]))
            for one in _single_rows(len(logits))
        ]
        return torch.cat([tokens for tokens, _ in drawn]), torch.cat([failed for _, failed in drawn])

    def _logprobs_of(self, logits: Tensor, tokens: Tensor, k: int) -> list[Logprobs]:
        if not self._row_by_row:
            return [logprobs_of(logits, tokens, k)]
        # Which of several equal logits a list of the likeliest holds depends on its length: it is always the same here.
        told = [logprobs_of(logits[one], tokens[one], MAX_LOGPROBS) for one in _single_rows(len(logits))]
        return [part._replace(top_ids=part.top_ids[:, :k], top=part.top[:, :k]) for part in told]

    def _to_device(self, array: npt.NDArray[np.integer]) -> Tensor:
        """As int64."""
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _single_rows(num_rows: int) -> list[slice]:
    return [slice(row, row + 1) for row in range(num_rows)]
