"""Steps of decodes alone, recorded once for each number of sequences and replayed by one launch (CUDA graphs).

Where few sequences decode, the device computes a kernel in less time than it takes to launch it, and a step launches
more than ten a layer.

    inputs    rows, positions, slots, copied in before each replay; tokens come from the relay and pages from the
              table, which the recorded kernels read themselves
    padding   a step is replayed at the next larger recorded size: the sequence with the shortest context stands for
              what is missing, and computes and writes again what it does anyway
    output    one tensor for all sizes, to be read before the next step is launched

Sampling follows outside, as it depends on what the requests ask for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from worker.core.step import StepPlan
from worker.memory.transfers import upload

_MOST_DIFFERENCE = 0.1
"""Of a replayed step from the same step launched kernel by kernel, relative: roundings differ, nothing else may."""

Replay: TypeAlias = Callable[[], None]
Record: TypeAlias = Callable[[Callable[[], None]], Replay]
"""Keeps what a function launches, to be launched again on the same memory by `Replay`."""
ComputeDecodes: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""rows, positions, slots of one token a sequence, int64 each -> [num_sequences, hidden_size]."""


class RecordingError(Exception):
    """A replayed step gives something else than the same step launched kernel by kernel."""


class DecodeGraphs:
    """The recorded steps of one runner."""

    def __init__(self, compute: ComputeDecodes, *, sizes: Sequence[int], hidden: Tensor, record: Record) -> None:
        """Records `compute` for each of `sizes`, ascending; `hidden` [largest size, hidden_size] takes the results.

        Raises whatever recording runs into. What is computed meanwhile writes to slot 0, of the padding sink.
        """
        self._sizes = sizes
        self._hidden = hidden
        self._inputs = torch.zeros((3, sizes[-1]), dtype=torch.int64, device=hidden.device)
        self._replays: dict[int, Replay] = {}
        for size in reversed(sizes):  # the largest first: the others fit into the memory that it leaves

            def compute_size(size: int = size) -> None:
                self._hidden[:size].copy_(compute(*self._inputs[:, :size]))

            self._replays[size] = record(compute_size)

    def hidden(self, plan: StepPlan) -> Tensor | None:
        """What the layers make of the step's tokens, [num_tokens, hidden_size], until the next call; None where the
        step is none of decodes alone, or too large.
        """
        count = plan.num_sequences
        if count > self._sizes[-1] or not plan.relayed.all():
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        self._inputs[:, :size].copy_(upload(_padded(plan, size), self._hidden.device))
        self._replays[size]()
        return self._hidden[:count]

    def check(self, compute: Callable[[StepPlan], Tensor], page_size: int) -> None:
        """Each recorded size against `compute`, on decodes within the padding sink whose tokens go by their positions.

        Raises RecordingError.
        """
        for size, smaller in zip(self._sizes, [0, *self._sizes], strict=False):
            plan = _trial(smaller + 1, page_size)
            expected, replayed = compute(plan), self.hidden(plan)
            assert replayed is not None
            difference = float((replayed - expected).float().norm() / expected.float().norm())
            if not difference < _MOST_DIFFERENCE:
                raise RecordingError(f"a step of {size} sequences is off by {difference:.2g} of itself when replayed")


def _trial(count: int, page_size: int) -> StepPlan:
    positions = (np.arange(count) % page_size).astype(np.int32)
    return StepPlan(
        step=0,
        row_starts=(),
        rows=np.arange(count, dtype=np.int32),
        starts=positions,
        lengths=np.ones(count, np.int32),
        samples=np.zeros(count, np.bool_),
        relayed=np.ones(count, np.bool_),
        input_ids=np.zeros(count, np.int32),
        slots=positions,
    )


def _padded(plan: StepPlan, size: int) -> np.ndarray:
    """Rows, positions and slots, int64 [3, size]."""
    given = np.stack([plan.rows, plan.starts, plan.slots]).astype(np.int64)
    shortest = int(plan.starts.argmin())
    missing = np.repeat(given[:, shortest : shortest + 1], size - given.shape[1], axis=1)
    return np.concatenate([given, missing], axis=1)
