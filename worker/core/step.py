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
import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


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


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Immutable once planned."""

    step: int
    """1, 2, 3, ... within an incarnation."""
    starts_rows: tuple[RowStart, ...]
    """Applied before anything is computed."""
    rows: Int32Array
    starts: Int32Array
    lengths: Int32Array
    samples: BoolArray
    relayed: BoolArray
    input_ids: Int32Array
    slots: Int32Array

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return len(self.input_ids)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave, in the order of the plan's sequences."""

    step: int
    token_ids: Int32Array
    """The sampled token of each sequence; undefined where the plan does not sample or `failed` is set."""
    failed: BoolArray
    """The sequence's logits held a NaN: that request fails, the others are unaffected."""
    started_s: float
    """When the device began and ended the step, by the monotonic clock that all processes of a machine share."""
    ended_s: float
    error: str | None = None
    """The whole step failed (out of memory, a kernel error); nothing in it can be trusted."""
