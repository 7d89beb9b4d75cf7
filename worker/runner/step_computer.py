"""Computes one planned step with torch: tokens in, sampled tokens out.

rows      apply the row starts, note the slots of the new tokens, take relayed tokens
model     the flat batch through all layers; each layer writes its K and V, then attends over the table
sample    tokens of the rows that sample are drawn, and kept in the relay for the step after (`StepSampler`)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.core.step import StepPlan
from worker.memory.kv_pool import TokenToKVPool
from worker.model.llama import LlamaModel
from worker.runner.attention.protocol import AttentionBackend, AttentionBatch
from worker.runner.kernels.layers import KernelLayers
from worker.runner.rows import RowState, flat_rows_and_positions
from worker.runner.step_sampler import Sampled, StepSampler


class _PagedAttention:
    """The model's view of a step's KV: written first, then attended over."""

    def __init__(self, pool: TokenToKVPool, backend: AttentionBackend, slots: Tensor) -> None:
        self._pool = pool
        self._backend = backend
        self._slots = slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.write(layer, self._slots, k, v)
        return self._backend.attend(q, self._pool.keys[layer], self._pool.values[layer])


class StepComputer:
    """A model with the KV pool, the rows and the attention that serve it."""

    def __init__(
        self,
        *,
        model: LlamaModel,
        pool: TokenToKVPool,
        rows: RowState,
        sampler: StepSampler,
        attention: AttentionBackend,
        device: torch.device,
        layers: KernelLayers | None = None,
    ) -> None:
        """`layers` computes all layers in one call, in place of the model's own and `attention`."""
        self._model = model
        self._pool = pool
        self._rows = rows
        self._sampler = sampler
        self._attention = attention
        self._layers = layers
        self.device = device
        self.in_sampling = False
        """The step that is computed, or was last, has come to its logits."""

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> Sampled:
        """The tokens of the step, on the host; waits for the device."""
        self.in_sampling = False
        for row in plan.ends_rows:
            self._sampler.end(row)
        for start in plan.starts_rows:
            self._rows.start(start)
            self._sampler.start(start)
        begun = self._sampler.begin(plan)
        flat_rows, flat_positions = flat_rows_and_positions(plan)
        positions, slots = self._to_device(flat_positions), self._to_device(plan.slots)
        self._rows.place(self._to_device(flat_rows), positions, slots)
        batch = AttentionBatch(plan.rows, plan.starts, plan.lengths, self._rows.table)
        hidden = self._hidden(self._input_ids(plan), positions, slots, batch)
        self.in_sampling = True
        return self._sampler.finish(plan, begun, self._model, hidden)

    def _hidden(self, input_ids: Tensor, positions: Tensor, slots: Tensor, batch: AttentionBatch) -> Tensor:
        if self._layers is not None:
            return self._layers.hidden(input_ids, positions, slots, batch)
        self._attention.plan(batch)
        return self._model.hidden(input_ids, positions, _PagedAttention(self._pool, self._attention, slots))

    def _input_ids(self, plan: StepPlan) -> Tensor:
        input_ids = self._to_device(plan.input_ids)
        relayed = np.flatnonzero(plan.relayed)
        if len(relayed):
            offsets = np.cumsum(plan.lengths) - plan.lengths
            input_ids[self._to_device(offsets[relayed])] = self._rows.relay[self._to_device(plan.rows[relayed])]
        return input_ids

    def _to_device(self, array: npt.NDArray[np.integer]) -> Tensor:
        """As int64, always a copy: the plan's arrays are read-only."""
        return torch.from_numpy(array.astype(np.int64)).to(self.device)
