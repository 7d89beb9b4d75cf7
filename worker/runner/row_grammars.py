"""The grammars of rows that have one: a matcher each, moved on by every sampled token, and masks for the next.

    begin     which tokens may come next, computed on threads while the model computes the same step
    mask      the logits of the others become -inf
    accept    the sampled tokens are told to the matchers; where nothing more may follow, the answer has ended

A mask depends on the token that the row sampled last, and that token is known here before anywhere else: at the end of
the step that sampled it. So the next step can be planned and sent before it, as ever, and is masked exactly. Were the
scheduler to make the masks, every row with a grammar would have to sit out every second step. Measured with 49,152
tokens and a JSON Schema: about 20 us a row and step, against a whole step of waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from worker.core.arrays import Int32Array
from worker.core.step import RowStart
from worker.memory.transfers import upload, upload_indices
from worker.sampling.grammar import GrammarCompiler, GrammarError, Matcher, Words


@dataclass(slots=True)
class _Row:
    matcher: Matcher
    forbidden: tuple[int, ...]
    """End-of-sequence tokens that do not end this answer (ignore_eos)."""
    stop_token_ids: tuple[int, ...]
    stops_from: int
    """Position from which on stop tokens may come."""

    def forbidden_at(self, position: int) -> tuple[int, ...]:
        """Tokens that must not come at a position, whatever the grammar says."""
        return self.forbidden if position >= self.stops_from else self.forbidden + self.stop_token_ids


@dataclass(slots=True)
class Masks:
    """The masks of one step, which are being computed."""

    indices: list[int]
    """Indices in the batch of the rows that have a grammar."""
    words: Words
    """[len(indices), words]"""
    work: list[Future[None]]


@dataclass(slots=True)
class Accepted:
    """What the sampled tokens did. Indices are those of the batch."""

    ended: list[int] = field(default_factory=list)
    causes: dict[int, str] = field(default_factory=dict)
    """Rows that failed, and why."""


class RowGrammars:
    """Holds nothing for rows without a grammar."""

    def __init__(
        self, compiler: GrammarCompiler, *, vocab_size: int, device: torch.device, threads: ThreadPoolExecutor
    ) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._device = device
        self._threads = threads
        self._rows: dict[int, _Row] = {}
        self._causes: dict[int, str] = {}
        """Rows whose grammar cannot be followed, and why."""
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        self._bounds = torch.where(bits == 1, torch.inf, -torch.inf).to(device)
        """What the logits of eight tokens are held to, by a byte of a mask: float32 [256, 8]."""

    def __len__(self) -> int:
        return len(self._rows) + len(self._causes)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def start(self, start: RowStart) -> None:
        """A request with a grammar takes a row; what its answer has already is followed again."""
        assert start.edits is not None and start.edits.grammar is not None and start.history is not None  # noqa: PT018
        self.drop(start.row)
        try:
            matcher = self._compiler.matcher(start.edits.grammar)
        except GrammarError as error:
            self._causes[start.row] = f"its grammar cannot be used: {error}"
            return
        matcher.accept(*start.history[start.prompt_tokens :].tolist())
        ends = set(start.stop_token_ids)
        self._rows[start.row] = _Row(
            matcher,
            forbidden=tuple(token_id for token_id in self._compiler.eos_token_ids if token_id not in ends),
            stop_token_ids=tuple(token_id for token_id in start.stop_token_ids if token_id < self._vocab_size),
            stops_from=start.prompt_tokens + start.min_new_tokens,
        )

    def drop(self, row: int) -> None:
        """The row has no grammar any more."""
        self._rows.pop(row, None)
        self._causes.pop(row, None)

    def begin(self, rows: Int32Array, positions: Int32Array) -> Masks | None:
        """Compute masks for the tokens at `positions`; None when no row needs one."""
        indices, work = [], []
        for index, row in enumerate(rows.tolist()):
            constrained = self._rows.get(row)
            # After the end, a step that was planned before may still come: what it samples is dropped.
            if constrained is not None and not constrained.matcher.is_ended:
                indices.append(index)
                work.append((constrained.matcher, constrained.forbidden_at(int(positions[index]))))
        if not indices:
            return None
        words = np.zeros((len(indices), self._compiler.num_words), np.uint32)
        return Masks(indices, words, [self._threads.submit(_fill, *of, words[i]) for i, of in enumerate(work)])

    def mask(self, logits: Tensor, masks: Masks) -> None:
        """Set the logits of tokens that are not allowed to -inf, in place."""
        for future in masks.work:
            future.result()
        packed = upload(masks.words.view(np.uint8), self._device)
        bounds = self._bounds.index_select(0, packed.view(-1).int()).view(len(packed), -1)[:, : self._vocab_size]
        where = upload_indices(np.array(masks.indices), self._device)
        logits[where] = logits[where].minimum(bounds)

    def accept(self, rows: Int32Array, token_ids: Sequence[int], failed: Sequence[bool]) -> Accepted:
        """The answers go on with the sampled tokens; rows that failed do not."""
        accepted = Accepted()
        for index, row in enumerate(rows.tolist()):
            if row in self._causes:
                accepted.causes[index] = self._causes[row]
                continue
            constrained = self._rows.get(row)
            if constrained is None or (constrained.matcher.is_ended and not constrained.matcher.error):
                continue
            if not failed[index]:
                constrained.matcher.accept(token_ids[index])
            if constrained.matcher.error:
                accepted.causes[index] = f"its grammar became too complex: {constrained.matcher.error}"
            elif constrained.matcher.is_ended:
                accepted.ended.append(index)
        return accepted


def _fill(matcher: Matcher, forbidden: tuple[int, ...], words: Words) -> None:
    matcher.fill(words, forbidden)
    if matcher.error:
        words[:] = np.uint32(0xFFFFFFFF)  # the row fails after the step; its logits stay as they are
