"""What rows ask to be done to their logits before a token is chosen: penalties, then bias, then the grammar's mask.

    start     a request takes a row: counts and matcher begin with the tokens that there are already
    begin     the masks of grammars begin to be computed, beside the model
    apply     the logits of the step are changed
    sampled   counts and matchers go on by the sampled token

A step in which no row asks for any of it pays for one look at an array of flags.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.core.step import BoolArray, Int32Array, RowStart
from worker.runner.row_grammars import Accepted, Masks, RowGrammars
from worker.sampling.grammar import GrammarCompiler
from worker.sampling.penalties import Occurrences


class RowEdits:
    """All rows of one runner."""

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        compiler: GrammarCompiler | None,
        threads: ThreadPoolExecutor,
    ) -> None:
        """`compiler`: None where no row ever starts with a grammar. `threads`: on which masks are computed."""
        self._device = device
        self._has_edits = np.zeros(max_rows, np.bool_)
        self._penalizes = np.zeros(max_rows, np.bool_)
        self._repetition = np.ones(max_rows, np.float32)
        self._frequency = np.zeros(max_rows, np.float32)
        self._presence = np.zeros(max_rows, np.float32)
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        """Token ids int64 and what is added to their logits float32, of rows that have any."""
        self._occurrences = Occurrences(max_rows=max_rows, vocab_size=vocab_size, device=device)
        self._grammars = (
            RowGrammars(compiler, vocab_size=vocab_size, device=device, threads=threads) if compiler else None
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._occurrences.nbytes

    def start(self, start: RowStart) -> None:
        """A request takes a row: what the row asked for before is forgotten."""
        if self._has_edits[start.row]:
            self.end(start.row)
        if start.edits is None:
            return
        row, edits = start.row, start.edits
        self._has_edits[row] = True
        if edits.penalizes:
            assert start.history is not None, "penalties need the tokens that there are"
            self._penalizes[row] = True
            self._repetition[row] = edits.repetition_penalty
            self._frequency[row] = edits.frequency_penalty
            self._presence[row] = edits.presence_penalty
            self._occurrences.start(row, start.history[: start.prompt_tokens], start.history[start.prompt_tokens :])
        if edits.bias:
            ids, values = zip(*edits.bias, strict=True)
            self._bias[row] = (
                torch.tensor(ids, dtype=torch.int64, device=self._device),
                torch.tensor(values, dtype=torch.float32, device=self._device),
            )
        if edits.grammar is not None:
            assert self._grammars is not None, "a grammar, but nothing to compile it with"
            self._grammars.start(start)

    def end(self, row: int) -> None:
        """The row's request has left it."""
        self._has_edits[row] = self._penalizes[row] = False
        self._bias.pop(row, None)
        if self._grammars is not None:
            self._grammars.drop(row)

    def any(self, rows: Int32Array) -> bool:
        """Whether any of `rows` asks for anything; if not, none of the following is called."""
        return bool(self._has_edits[rows].any())

    def begin(self, rows: Int32Array, positions: Int32Array) -> Masks | None:
        """Begin to compute the masks of grammars for what `rows` sample at `positions` in this step."""
        return self._grammars.begin(rows, positions) if self._grammars is not None else None

    def apply(self, logits: Tensor, rows: Int32Array, masks: Masks | None) -> None:
        """Change the logits float32 [n, vocab] of `rows` in place. `masks`: what `begin` returned."""
        penalized = np.flatnonzero(self._penalizes[rows])
        if len(penalized):
            where = self._to_device(penalized)
            logits[where] = self._occurrences.penalize(
                logits[where],
                self._to_device(rows[penalized].astype(np.int64)),
                repetition=self._to_device(self._repetition[rows[penalized]]),
                frequency=self._to_device(self._frequency[rows[penalized]]),
                presence=self._to_device(self._presence[rows[penalized]]),
            )
        if self._bias:
            for index, row in enumerate(rows.tolist()):
                if row in self._bias:
                    ids, values = self._bias[row]
                    logits[index, ids] += values
        if masks is not None and self._grammars is not None:
            self._grammars.mask(logits, masks)

    def sampled(self, rows: Int32Array, tokens: Tensor, failed: BoolArray) -> Accepted:
        """The `rows` sampled `tokens`, int64 [n] on the device, unless they failed."""
        penalized = np.flatnonzero(self._penalizes[rows])
        if len(penalized):
            where = self._to_device(penalized)
            self._occurrences.count(self._to_device(rows[penalized].astype(np.int64)), tokens[where])
        if self._grammars is None or not len(self._grammars):
            return Accepted()
        return self._grammars.accept(rows, tokens.tolist(), failed.tolist())

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
