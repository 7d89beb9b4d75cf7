"""One request computed in different arrangements, and all that comes of it to the bit: tokens and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import numpy as np

from radixfleet.types import Grammar
from tests.support.runner_driver import RunnerDriver
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.runner.protocol import Runner

Told: TypeAlias = dict[int, tuple[bytes, ...]]
"""Position -> log probability of its token, the likeliest tokens, and theirs. As bytes: equality is that of bits."""

_WIDTH = 5


def told_of(result: StepResult, sequence: int) -> Told:
    """What a step said of one of its sequences."""
    assert result.error is None, result.error
    assert not result.failed[sequence]
    said = result.logprobs
    if said is None:
        return {}
    top_ids, top = said.top_ids.reshape(-1, said.width), said.top_logprobs.reshape(-1, said.width)
    return {
        # The batch may have asked for more of the likeliest than this request did.
        int(said.positions[index]): (
            said.logprobs[index].tobytes(),
            top_ids[index, :_WIDTH].tobytes(),
            top[index, :_WIDTH].tobytes(),
        )
        for index in np.flatnonzero(said.sequences == sequence)
    }


class ArrangedRequest:
    """A request driven by hand, beside whatever other rows a step is given."""

    def __init__(
        self, driver: RunnerDriver, row: int, prompt: Sequence[int], prefix_slots: Sequence[int] = (), **values: Any
    ) -> None:
        """`values`: fields of RowStart."""
        self._driver = driver
        self._row = row
        self.told: Told = {}
        history = np.array(prompt, np.int32)
        told = {"logprobs": _WIDTH, "prompt_logprobs": _WIDTH, "history": history}
        driver.begin(row, prompt, prefix_slots, **(told | values))

    @property
    def tokens(self) -> list[int]:
        """Sampled so far."""
        return self._driver.rows[self._row].tokens

    def step(self, chunk: int, others: dict[int, int]) -> None:
        """One step: so many tokens of the prompt (0: decode), with chunks of other rows, half before and half after."""
        names = list(others)
        order = [*names[: len(names) // 2], self._row, *names[len(names) // 2 :]]
        result = self._driver.step({row: chunk if row == self._row else others[row] for row in order})
        self.told |= told_of(result, order.index(self._row))


class TellingRunner:
    """A loaded runner behind an engine. Asks for log probabilities of every row, and keeps them by the rows' seeds.

    Each request must have a seed of its own.
    """

    def __init__(self, runner: Runner, ready: Ready, *, chunk: int, rows: int) -> None:
        """`chunk` and `rows`: at most what the runner was loaded with."""
        self._runner = runner
        capacity = replace(ready.capacity, chunked_prefill_size=chunk, max_running_requests=rows)
        self._ready = msgspec.structs.replace(ready, capacity=capacity)
        self._seed_of_row: dict[int, int] = {}
        self.told: dict[int, Told] = {}
        self.num_starts: dict[int, int] = {}
        """By seed; more than 1 where a request was retracted and came back."""

    def load(self) -> Ready:
        return self._ready

    def run(self, plan: StepPlan) -> StepResult:
        for start in plan.row_starts:
            self._seed_of_row[start.row] = start.seed
            self.num_starts[start.seed] = self.num_starts.get(start.seed, 0) + 1
        starts = tuple(msgspec.structs.replace(start, logprobs=_WIDTH) for start in plan.row_starts)
        result = self._runner.run(msgspec.structs.replace(plan, row_starts=starts))
        for sequence, row in enumerate(plan.rows.tolist()):
            self.told.setdefault(self._seed_of_row[row], {}).update(told_of(result, sequence))
        return msgspec.structs.replace(result, logprobs=None)

    def prepare(self, grammar: Grammar) -> str:
        return self._runner.prepare(grammar)

    def close(self) -> None:
        """The runner belongs to somebody else."""
