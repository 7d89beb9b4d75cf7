"""What rows ask to be done to their logits before a token is chosen: penalties, then bias, then the grammar's mask.

    start     a request takes a row: counts and matcher begin with the tokens that there are already
    begin     the masks of grammars begin to be computed, beside the model
    apply     the logits of the step are changed
    count     counts go on by the sampled tokens, on the device
    accept    and matchers, on the host: before the masks of the next step begin

A step in which no row asks for any of it pays for one look at an array of flags.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from worker.core.arrays import BoolArray, Int32Array
from worker.core.step import RowStart
from worker.memory.transfers import upload, upload_indices
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
                upload(np.array(ids, np.int64), self._device),
                upload(np.array(values, np.float32), self._device),
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

    def constrains(self, rows: Int32Array) -> bool:
        """Whether any of `rows` has a grammar, so that what it samples depends on what the host makes of its tokens."""
        return self._grammars is not None and any(row in self._grammars for row in rows.tolist())

    def begin(self, rows: Int32Array, positions: Int32Array) -> Masks | None:
        """Begin to compute the masks of grammars for what `rows` sample at `positions` in this step."""
        return self._grammars.begin(rows, positions) if self._grammars is not None else None

    def apply(self, logits: Tensor, rows: Int32Array, masks: Masks | None) -> None:
        """Change the logits float32 [n, vocab] of `rows` in place. `masks`: what `begin` returned."""
        penalized = np.flatnonzero(self._penalizes[rows])
        if len(penalized):
            where, of_rows = upload_indices(penalized, self._device), rows[penalized]
            logits[where] = self._occurrences.penalize(
                logits[where],
                upload_indices(of_rows, self._device),
                repetition=upload(self._repetition[of_rows], self._device),
                frequency=upload(self._frequency[of_rows], self._device),
                presence=upload(self._presence[of_rows], self._device),
            )
        if self._bias:
            for index, row in enumerate(rows.tolist()):
                if row in self._bias:
                    ids, values = self._bias[row]
                    logits[index, ids] += values
        if masks is not None and self._grammars is not None:
            self._grammars.mask(logits, masks)

    def count(self, rows: Int32Array, tokens: Tensor) -> None:
        """The `rows` sample `tokens`, int64 [n] on the device."""
        penalized = np.flatnonzero(self._penalizes[rows])
        if len(penalized):
            where = upload_indices(penalized, self._device)
            self._occurrences.count(upload_indices(rows[penalized], self._device), tokens[where])

    def accept(self, rows: Int32Array, token_ids: Int32Array, failed: BoolArray) -> Accepted:
        """The `rows` have sampled `token_ids`, unless they failed."""
        if self._grammars is None or not len(self._grammars):
            return Accepted()
        return self._grammars.accept(rows, token_ids.tolist(), failed.tolist())
