"""How the tokens of one step are drawn: what its rows ask for, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.sampling.counter_random import stream_bits


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the rows of one step. All arrays have one entry a row."""

    temperature: npt.NDArray[np.float32]
    """0 is greedy."""
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    """Position of the token that is drawn, from the beginning of the prompt."""
    banned: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(row, token ids) that the row must not give."""

    @property
    def streams(self) -> npt.NDArray[np.uint32]:
        """What the noise of each row follows from, [n, 2]: see `worker.sampling.noise`."""
        return stream_bits(self.seeds, self.positions).view(np.uint32).reshape(-1, 2)

    def of(self, rows: npt.NDArray[np.intp]) -> SamplingBatch:
        """Of these rows alone, but for what they must not give."""
        return SamplingBatch(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
        )
