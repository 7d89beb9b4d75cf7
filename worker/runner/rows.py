"""What a torch runner keeps about each row, learnt from plans alone (see `worker.runner.protocol`).

on the device    table[row, position] -> slot, and relay[row]: the token sampled last
on the host      sampling parameters, which decide what is launched
"""

from __future__ import annotations

import numpy as np
import torch

from worker.core.arrays import Int32Array
from worker.core.step import RowStart, StepPlan
from worker.memory.transfers import upload
from worker.sampling.batch import SamplingBatch


class RowState:
    """All rows of one runner."""

    def __init__(self, *, max_rows: int, max_context: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self.table = torch.zeros((max_rows, max_context), dtype=torch.int32, device=device)
        self.relay = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float64)
        self._min_p = np.zeros(max_rows, np.float64)
        self._seeds = np.zeros(max_rows, np.uint64)
        self._ban_before = np.zeros(max_rows, np.int64)
        """Stop tokens are banned at positions below this."""
        self._stop_token_ids: list[tuple[int, ...]] = [()] * max_rows

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.table.nbytes + self.relay.nbytes

    def start(self, start: RowStart) -> None:
        """A request takes a row: what the row held before is forgotten."""
        row = start.row
        self.table[row, : len(start.prefix_slots)] = upload(start.prefix_slots.astype(np.int32), self._device)
        self._temperature[row] = 0.0 if start.is_greedy else start.temperature
        self._top_k[row] = start.top_k
        self._top_p[row] = start.top_p
        self._min_p[row] = start.min_p
        self._seeds[row] = np.uint64(start.seed)
        self._ban_before[row] = start.prompt_tokens + start.min_new_tokens
        # A client may name tokens that the model does not have: they never come, so there is nothing to ban. Where
        # there is a grammar, its mask bans, and knows when nothing else is allowed.
        bans_here = start.edits is None or start.edits.grammar is None
        self._stop_token_ids[row] = tuple(
            token for token in start.stop_token_ids if token < self.vocab_size and bans_here
        )

    def place(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Notes the slots of new tokens; all int64 [num_tokens] on the device."""
        self.table[rows, positions] = slots.int()

    def are_greedy(self, rows: Int32Array, positions: Int32Array) -> bool:
        """Whether the tokens at the given positions are the likeliest ones, whichever these are."""
        return not (self._temperature[rows].any() or (positions < self._ban_before[rows]).any())

    def sampling(self, rows: Int32Array, positions: Int32Array) -> SamplingBatch:
        """How the tokens at the given positions of the given rows are drawn."""
        banning = np.flatnonzero(positions < self._ban_before[rows])
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            positions=positions.astype(np.int64),
            banned=tuple(
                (int(index), self._stop_token_ids[rows[index]])
                for index in banning
                if self._stop_token_ids[rows[index]]
            ),
        )


def flat_rows_and_positions(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of each token of a step, int64 [num_tokens]."""
    offsets = np.cumsum(plan.lengths) - plan.lengths
    within = np.arange(plan.num_tokens) - np.repeat(offsets, plan.lengths)
    return np.repeat(plan.rows, plan.lengths).astype(np.int64), np.repeat(plan.starts, plan.lengths) + within
