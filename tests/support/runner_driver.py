"""Drives a runner by hand, without a scheduler: rows, slots and plans in the plainest form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worker.core.step import RowStart, StepPlan, StepResult
from worker.runner.protocol import Runner


@dataclass
class Row:
    """A request on a row."""

    prompt: list[int]
    """What is prefilled: for a request that comes back after a retraction, its generated tokens too."""
    computed: int
    slots: list[int]
    tokens: list[int] = field(default_factory=list)
    """Sampled so far."""
    told: dict[int, tuple[float, list[int], list[float]]] = field(default_factory=dict)
    """By position of the token: its log probability, and the likeliest tokens with theirs."""
    has_ended: bool = False
    """The grammar allows nothing more."""
    cause: str = ""
    """Why it failed, where that is not a NaN."""


class RunnerDriver:
    """Loads the runner. Slots are handed out in a shuffled order and never taken back."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner = runner
        self.ready = runner.load()
        capacity = self.ready.capacity
        first = capacity.page_size  # page 0 is the padding sink
        slots = np.arange(first, first + capacity.kv_tokens)
        self._free = np.random.default_rng(seed).permutation(slots).tolist()
        self._step = 0
        self._starts: list[RowStart] = []
        self._ends: list[int] = []
        self.rows: dict[int, Row] = {}

    def begin(self, row: int, prompt: Sequence[int], prefix_slots: Sequence[int] = (), **values: Any) -> None:
        """A request takes a row, from the next step on. `values`: fields of RowStart; greedy by default."""
        defaults = {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": 0,
            "prompt_tokens": len(prompt),
            "min_new_tokens": 0,
            "stop_token_ids": (),
        }
        start = RowStart(row=row, prefix_slots=np.array(prefix_slots, np.int32), **(defaults | values))
        self._starts.append(start)
        self.rows[row] = Row(list(prompt), len(prefix_slots), list(prefix_slots))

    def end(self, row: int) -> None:
        """The row's request has left it; the next step says so."""
        self._ends.append(row)

    def step(self, chunks: dict[int, int]) -> StepResult:
        """One step: for each row so many tokens of its prompt, or, where that is computed, one relayed token (0)."""
        self._step += 1
        rows = [self.rows[number] for number in chunks]
        lengths = [chunk or 1 for chunk in chunks.values()]
        relayed = [row.computed >= len(row.prompt) for row in rows]
        ids, slots = [], []
        for row, length, is_relayed in zip(rows, lengths, relayed, strict=True):
            assert not is_relayed or length == 1
            ids += [0] if is_relayed else row.prompt[row.computed : row.computed + length]
            new = [self._free.pop() for _ in range(length)]
            row.slots += new
            slots += new
        ends = [row.computed + length for row, length in zip(rows, lengths, strict=True)]
        plan = StepPlan(
            step=self._step,
            row_starts=tuple(self._starts),
            rows=np.array(list(chunks), np.int32),
            starts=np.array([row.computed for row in rows], np.int32),
            lengths=np.array(lengths, np.int32),
            samples=np.array([end >= len(row.prompt) for row, end in zip(rows, ends, strict=True)], np.bool_),
            relayed=np.array(relayed, np.bool_),
            input_ids=np.array(ids, np.int32),
            slots=np.array(slots, np.int32),
            left_rows=tuple(self._ends),
        )
        self._starts, self._ends = [], []
        result = self.runner.run(plan)
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            row.computed = end
            if plan.samples[index]:
                row.tokens.append(int(result.token_ids[index]))
        for index in result.ended:
            rows[index].has_ended = True
        for index, cause in result.causes:
            rows[index].cause = cause
        _take_logprobs(rows, result)
        return result

    def prefill(self, row: int, chunk: int = 1 << 30) -> None:
        """Compute what is left of a row's prompt, in chunks."""
        waiting = self.rows[row]
        while (left := len(waiting.prompt) - waiting.computed) > 0:
            self.check(self.step({row: min(chunk, left)}))

    def decode(self, rows: Sequence[int], num_tokens: int) -> None:
        """Relayed steps of several rows together."""
        for _ in range(num_tokens):
            self.check(self.step(dict.fromkeys(rows, 0)))

    def generate(
        self, row: int, prompt: Sequence[int], num_tokens: int, chunk: int = 1 << 30, **values: Any
    ) -> list[int]:
        """The tokens of a request that is alone."""
        self.begin(row, prompt, **values)
        self.prefill(row, chunk)
        self.decode([row], num_tokens - 1)
        return self.rows[row].tokens

    @staticmethod
    def check(result: StepResult) -> None:
        """Nothing in the step failed."""
        assert result.error is None, result.error
        assert not result.failed.any()


def _take_logprobs(rows: Sequence[Row], result: StepResult) -> None:
    told = result.logprobs
    if told is None:
        return
    places = list(zip(told.sequences.tolist(), told.positions.tolist(), strict=True))
    assert places == sorted(set(places)), "entries are in order, and none comes twice"
    top_ids = told.top_ids.reshape(len(places), told.width).tolist()
    top_logprobs = told.top_logprobs.reshape(len(places), told.width).tolist()
    for entry, (sequence, position) in enumerate(places):
        assert position not in rows[sequence].told
        rows[sequence].told[position] = (float(told.logprobs[entry]), top_ids[entry], top_logprobs[entry])
