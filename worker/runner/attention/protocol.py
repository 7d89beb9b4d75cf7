"""What a runner asks of an attention backend.

A batch is flat: the new tokens of all sequences one after another. Sequence i owns the flat rows
[offsets[i], offsets[i] + lengths[i]), which are the positions [starts[i], starts[i] + lengths[i]) of table row rows[i].
K and V of all positions up to and with the new ones are in the pool before `attend` is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from worker.core.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step. Host arrays, but for the table."""

    rows: Int32Array
    starts: Int32Array
    lengths: Int32Array
    table: Tensor
    """int32 [max_rows, max_context] on the device: slot of each position of each row. Beyond a row's last position it
    holds what earlier requests left: valid slots, but not this sequence's.
    """

    @property
    def ends(self) -> Int32Array:
        """Tokens each sequence attends over: positions computed before, and its new ones."""
        return self.starts + self.lengths

    @property
    def offsets(self) -> Int32Array:
        """First row of each sequence in the flat batch."""
        return (np.cumsum(self.lengths) - self.lengths).astype(np.int32)


class AttentionBackend(Protocol):
    """Causal grouped-query attention, softmax(q k / sqrt(head_dim)) v. One instance serves one runner's thread."""

    @property
    def name(self) -> str:
        """As settings name it."""
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare what is the same for all layers of a step. Valid until the next `plan`."""
        ...

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One layer of the planned batch.

        q [num_tokens, num_heads, head_dim]; keys and values are that layer's pools [num_slots, num_kv_heads, head_dim].
        Returns [num_tokens, num_heads * head_dim]. A sequence's result depends on its own slots alone, so that a NaN in
        one sequence stays there.
        """
        ...


@runtime_checkable
class RecordableAttention(AttentionBackend, Protocol):
    """Attention whose decodes can be recorded in a CUDA graph: see `worker.runner.decode_graphs`."""

    @property
    def plans_on_device(self) -> bool:
        """Whether `plan_decodes` may be called."""
        ...

    def plan_decodes(self, rows: Tensor, positions: Tensor, table: Tensor) -> None:
        """In place of `plan`, for one new token of each sequence: at positions[i] of table row rows[i], int64 both.

        Nothing that is launched, then and in `attend`, depends on what the tensors hold, so that it computes what they
        hold when it is replayed.
        """
        ...


@runtime_checkable
class CompiledAttention(AttentionBackend, Protocol):
    """Attention whose kernels are compiled on the machine that they run on."""

    def compile(self, dtype: torch.dtype, device: torch.device) -> None:
        """Have all of them compiled, so that no request waits for it. To be followed by `plan`."""
        ...
