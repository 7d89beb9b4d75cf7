"""From the model's hidden states to the tokens of a step, and what is told of them.

begin      what the step wants; masks of grammars begin to be computed, beside the model
draw       log probabilities of prompts' tokens, in tiles of rows, so that a chunk never needs all its logits at once
           logits of the sequences that sample -> kept as they are for log probabilities -> edited -> tokens drawn
           counts and the relay go on by the tokens, on the device
settle     the same on the host, once the device is there: matchers go on, the step's tokens are known

Nothing before `settle` waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixfleet.types import MAX_LOGPROBS
from worker.core.arrays import BoolArray, Int32Array
from worker.core.logits import StepLogprobs
from worker.core.step import RowStart, StepPlan
from worker.memory.transfers import download, upload_indices
from worker.model.llama import LlamaModel
from worker.runner.row_edits import RowEdits
from worker.runner.row_grammars import Accepted, Masks
from worker.runner.row_logprobs import RowLogprobs, Wanted
from worker.runner.rows import RowState
from worker.sampling.filters import rows_are_alike
from worker.sampling.host_draw import Winners, winners_by_bounds
from worker.sampling.logprobs import ArrivingLogprobs, logprobs_of
from worker.sampling.sampler import sample, without_failed


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

    num_sequences: int
    last_tokens: npt.NDArray[np.integer]
    """Rows of the flat batch whose logits are drawn from."""
    sampling: npt.NDArray[np.intp]
    """Sequences that sample; the fields below are theirs."""
    rows: Int32Array
    positions: Int32Array
    """Of the tokens to be drawn."""
    is_edited: bool
    is_constrained: bool
    """By grammars: its masks follow from the tokens of all steps before it."""
    is_greedy: bool
    """What is wanted of the logits is nothing but the likeliest tokens."""
    wanted: Wanted | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the device makes of a step, on its way to the host."""

    begun: Begun
    tokens: Tensor
    """int64 [sequences that sample]"""
    failed: Tensor
    told: list[ArrivingLogprobs]


class StepSampler:
    """Sampling over the rows of one runner."""

    def __init__(
        self,
        *,
        rows: RowState,
        edits: RowEdits,
        max_rows: int,
        device: torch.device,
        winners: Winners = winners_by_bounds,
        row_by_row: bool = False,
    ) -> None:
        """`winners` draws on a CPU. `row_by_row`: so that the last bits of sums over the vocabulary do not depend on
        the number of rows.
        """
        self._rows = rows
        self._edits = edits
        self._logprobs = RowLogprobs(max_rows)
        self._tile_rows = max_rows
        self._device = device
        self._winners = winners
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
        wanted = self._logprobs.wanted(plan, sampling)
        return Begun(
            num_sequences=plan.num_sequences,
            last_tokens=np.cumsum(plan.lengths)[sampling] - 1,
            sampling=sampling,
            rows=rows,
            positions=positions,
            is_edited=is_edited,
            is_constrained=is_edited and self._edits.constrains(rows),
            is_greedy=not is_edited and wanted is None and self._rows.are_greedy(rows, positions),
            wanted=wanted,
        )

    def begin_masks(self, begun: Begun) -> Masks | None:
        """Of a step that is constrained, once all steps before it have settled."""
        return self._edits.begin(begun.rows, begun.positions)

    def draw(self, begun: Begun, masks: Masks | None, model: LlamaModel, hidden: Tensor) -> Drawn:
        """Have the tokens drawn. `hidden`: what the model makes of the step's tokens."""
        wanted = begun.wanted
        told = self._tell_prompts(wanted, model, hidden)
        if not len(begun.sampling):
            nothing = torch.empty(0, dtype=torch.int64)
            return Drawn(begun, nothing, nothing.bool(), told)
        tokens, failed = self._tokens(begun, masks, model, hidden, told)
        self._rows.relay[upload_indices(begun.rows, self._device)] = tokens
        return Drawn(begun, download(tokens), download(failed), told)

    def _tokens(
        self, begun: Begun, masks: Masks | None, model: LlamaModel, hidden: Tensor, told: list[ArrivingLogprobs]
    ) -> tuple[Tensor, Tensor]:
        """The tokens drawn and which rows failed. What is wanted of their log probabilities is added to `told`."""
        wanted, last_tokens = begun.wanted, upload_indices(begun.last_tokens, self._device)
        likeliest = model.likeliest(hidden, last_tokens) if begun.is_greedy else None
        if likeliest is not None:
            return without_failed(*likeliest)
        logits = model.logits(hidden, last_tokens)
        speaking = upload_indices(wanted.sampled, self._device) if wanted is not None else None
        untouched = logits[speaking] if speaking is not None else None
        if begun.is_edited:
            self._edits.apply(logits, begun.rows, masks)
        tokens, failed = self._sample(logits, begun)
        if begun.is_edited:
            self._edits.count(begun.rows, tokens)
        if wanted is not None and untouched is not None:
            told += self._logprobs_of(untouched, tokens[speaking], wanted.width)
        return tokens, failed

    def settle(self, drawn: Drawn) -> Sampled:
        """The device has passed the step. Steps settle in order."""
        begun, wanted = drawn.begun, drawn.begun.wanted
        token_ids = np.zeros(begun.num_sequences, np.int32)
        failed = np.zeros(begun.num_sequences, np.bool_)
        token_ids[begun.sampling] = drawn.tokens.numpy()
        failed[begun.sampling] = drawn.failed.numpy()
        accepted = Accepted()
        if begun.is_edited:
            accepted = self._edits.accept(begun.rows, token_ids[begun.sampling], failed[begun.sampling])
        failed[begun.sampling[list(accepted.causes)]] = True
        return Sampled(
            token_ids,
            failed,
            wanted.put_together([part.arrived(wanted.width) for part in drawn.told]) if wanted is not None else None,
            ended=tuple(begun.sampling[accepted.ended].tolist()),
            causes={int(begun.sampling[index]): cause for index, cause in accepted.causes.items()},
        )

    def _tell_prompts(self, wanted: Wanted | None, model: LlamaModel, hidden: Tensor) -> list[ArrivingLogprobs]:
        told: list[ArrivingLogprobs] = []
        if wanted is not None:
            for begin in range(0, len(wanted.prompt_indices), self._tile_rows):
                tile = slice(begin, begin + self._tile_rows)
                logits = model.logits(hidden, upload_indices(wanted.prompt_indices[tile], self._device))
                tokens = upload_indices(wanted.prompt_tokens[tile], self._device)
                told += self._logprobs_of(logits, tokens, wanted.width)
        return told

    def _sample(self, logits: Tensor, begun: Begun) -> tuple[Tensor, Tensor]:
        if not self._row_by_row or rows_are_alike(self._device):
            return sample(logits, self._rows.sampling(begun.rows, begun.positions), self._winners)
        drawn = [
            sample(logits[one], self._rows.sampling(begun.rows[one], begun.positions[one]), self._winners)
            for one in _single_rows(len(logits))
        ]
        return torch.cat([tokens for tokens, _ in drawn]), torch.cat([failed for _, failed in drawn])

    def _logprobs_of(self, logits: Tensor, tokens: Tensor, k: int) -> list[ArrivingLogprobs]:
        if not self._row_by_row:
            return [logprobs_of(logits, tokens, k)]
        # Which of several equal logits a list of the likeliest holds depends on its length: it is always the same here.
        return [logprobs_of(logits[one], tokens[one], MAX_LOGPROBS) for one in _single_rows(len(logits))]


def _single_rows(num_rows: int) -> list[slice]:
    return [slice(row, row + 1) for row in range(num_rows)]
