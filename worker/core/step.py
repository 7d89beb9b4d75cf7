"""The plan of one device step and its result: all that the scheduler says to a runner and hears back.

A step computes, for each of its sequences, the KV of positions [start, start + length) and, where `samples` says so,
one new token from the last of them. Row numbers are those of `ReqToTokenPool`; slots are those of `TokenToKVPool`.

    flat index      0 ........ length[0] ........ length[0] + length[1] ...      one entry a computed token
    input_ids       known ids; 0 where the row is relayed
    slots           where the token's K and V are written
    sequence i      owns [offset(i), offset(i) + lengths[i]),  offset = exclusive prefix sum of lengths

A relayed row (always of length 1) takes as its input the token that the row sampled in an earlier step. That token may
not be known to the scheduler yet: it is kept by the runner, so step N+1 is planned and sent before step N has ended. A
runner executes plans strictly in the order of `step`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from radixfleet.types import Grammar
from worker.core.arrays import BoolArray, Int32Array
from worker.core.logits import LogitEdits, StepLogprobs
from worker.core.out_of_memory import OutOfMemory

_SPARE_ROWS = 32


def rows_for(max_running_requests: int) -> int:
    """Rows that scheduler and runner keep: more than requests run, so that one whose last token is in flight, which
    keeps its row until that has settled, does not keep its successor waiting for another step.

    Of few requests all may end in one step: with an eighth more rows, requests of two tokens, eight at a time, took a
    third more steps overlapped than serially.
    """
    return max_running_requests + max(min(max_running_requests, _SPARE_ROWS), max_running_requests // 8)


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a row, at admission or again after a retraction: what the runner keeps about the row."""

    row: int
    prefix_slots: Int32Array
    """Slots of positions [0, len): KV that is there already, from the radix cache."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    """The token at position p is drawn with randomness that depends on (seed, p) alone."""
    prompt_tokens: int
    """Length of the prompt; generated tokens follow from this position on, also after a retraction."""
    min_new_tokens: int
    """The tokens in `stop_token_ids` are masked while fewer than this many were generated."""
    stop_token_ids: tuple[int, ...]
    edits: LogitEdits | None = None
    logprobs: int | None = None
    """Tell the log probabilities of sampled tokens, and of so many of the likeliest."""
    prompt_logprobs: int | None = None
    """The same of those tokens of the prompt that are computed on this row, but for the first of them."""
    history: Int32Array | None = None
    """The prompt and what was generated so far, where `edits` or `prompt_logprobs` need it."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken. With `top_k` 1 too: the filter alone would keep all that are equal."""
        return self.temperature == 0.0 or self.top_k == 1


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step. Immutable once planned."""

    step: int
    """1, 2, 3, ... within an incarnation."""
    row_starts: tuple[RowStart, ...]
    """Applied before anything is computed."""
    rows: Int32Array
    starts: Int32Array
    lengths: Int32Array
    samples: BoolArray
    relayed: BoolArray
    input_ids: Int32Array
    slots: Int32Array
    left_rows: tuple[int, ...] = ()
    """Rows with edits whose requests have left them: what is kept of those can go, before `row_starts` is applied."""

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return len(self.input_ids)


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Between two steps: compile a grammar before a row needs it. Answered by `Compiled`, at any later time."""

    ticket: int
    grammar: Grammar


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to `Compile`."""

    ticket: int
    refusal: str
    """Why the grammar cannot be used, for the client; empty when it can."""


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a step gave, in the order of the plan's sequences."""

    step: int
    token_ids: Int32Array
    """The sampled token of each sequence; undefined where the plan does not sample or `failed` is set."""
    failed: BoolArray
    """The sequence's logits held a NaN, or see `causes`: that request fails, the others are unaffected."""
    started_s: float
    """When the device began and ended the step, by the monotonic clock that all processes of a machine share."""
    ended_s: float
    error: str | None = None
    """The whole step failed (out of memory, a kernel error); nothing in it can be trusted."""
    logprobs: StepLogprobs | None = None
    """What the rows asked to be told; None when that is nothing."""
    ended: tuple[int, ...] = ()
    """Sequences whose grammar allows no token after the one sampled."""
    causes: tuple[tuple[int, str], ...] = ()
    """(sequence, why it failed), where that is not a NaN: one sentence for the client."""
    out_of_memory: OutOfMemory | None = None
    """Set beside `error` when it was memory that was short: the step is taken back, and tried again smaller."""
    ready_s: float = 0.0
    """Of a device with a queue: when the step lay there, whole or as far as it goes without the tokens of those before
    it. 0: as soon as it had come.
    """


class LayersComputed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Before a step's result, from runners that compute on the machine's own cores: what is left of the step are its
    logits and tokens.
    """


RunnerOrder: TypeAlias = StepPlan | Compile
RunnerAnswer: TypeAlias = StepResult | LayersComputed | Compiled
"""What passes between engine and runner once that has loaded."""
