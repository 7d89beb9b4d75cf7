"""Computes one planned step with torch: tokens in, sampled tokens out.

rows      apply the row starts, note the slots of the new tokens, take relayed tokens
model     the flat batch through all layers; each layer writes its K and V, then attends over the table. Steps of
          decodes alone are replayed where they were recorded (`DecodeGraphs`)
sample    tokens of the rows that sample are drawn, and kept in the relay for the step after (`StepSampler`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from worker.core.step import StepPlan
from worker.memory.kv_pool import KvPlace, TokenToKVPool
from worker.memory.transfers import upload, upload_indices
from worker.model.llama import LlamaModel
from worker.runner.attention.protocol import AttentionBackend, AttentionBatch, RecordableAttention
from worker.runner.decode_graphs import DecodeGraphs, Record
from worker.runner.devices import make_current
from worker.runner.kernels.layers import KernelLayers
from worker.runner.largest_step import largest_step
from worker.runner.rows import RowState, flat_rows_and_positions
from worker.runner.step_sampler import Drawn, Sampled, StepSampler


class _PagedAttention:
    """Implements `worker.model.llama.Attention` for a step, over its slots of the KV pool."""

    def __init__(self, pool: TokenToKVPool, backend: AttentionBackend, slots: Tensor) -> None:
        self._pool = pool
        self._backend = backend
        self._slots = slots

    def place(self, layer: int) -> KvPlace:
        return self._pool.place(layer, self._slots)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
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
        self._graphs: DecodeGraphs | None = None
        self.device = device
        self.in_sampling = False
        """The step that is computed, or was last, has come to its logits."""
        self.when_layers_computed: Callable[[], None] = lambda: None
        """Called in each step before its logits are computed."""

    def compute(self, plan: StepPlan) -> Sampled:
        """The tokens of the step, on the host; waits for the device."""
        drawn = self.launch(plan)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.settle(drawn)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, settle_before: Callable[[], None] | None = None) -> Drawn:
        """Have the step computed behind what is launched already; waits for nothing but `settle_before`.

        `settle_before` settles all launched steps; None: they have. It is called only when the step's masks depend on
        their tokens, after the model's part of the step is launched, so that the device has something to do meanwhile.
        """
        make_current(self.device)
        self.in_sampling = False
        for row in plan.left_rows:
            self._sampler.end(row)
        for start in plan.row_starts:
            self._rows.start(start)
            self._sampler.start(start)
        begun = self._sampler.begin(plan)
        masks = self._sampler.begin_masks(begun) if begun.is_constrained and settle_before is None else None
        hidden = self._hidden(plan)
        self.in_sampling = True
        if begun.is_constrained and settle_before is not None:
            settle_before()
            masks = self._sampler.begin_masks(begun)
        self.when_layers_computed()
        return self._sampler.draw(begun, masks, self._model, hidden)

    def settle(self, drawn: Drawn) -> Sampled:
        """The tokens of a step that the device has passed. Steps settle in order."""
        return self._sampler.settle(drawn)

    def is_sound(self) -> bool:
        """Whether the logits of a step of token 0 are numbers. Before any request has come."""
        plan = msgspec.structs.replace(largest_step(1, 1, 1), relayed=np.zeros(1, np.bool_))
        try:
            return not self.compute(plan).failed.any()
        finally:
            self._pool.clear_sink()

    @property
    def can_record(self) -> bool:
        """Whether steps of decodes can be recorded: that depends on the attention."""
        attention = self._attention
        return self._layers is None and isinstance(attention, RecordableAttention) and attention.plans_on_device

    @torch.inference_mode()
    def record_decodes(self, sizes: Sequence[int], record: Record) -> None:
        """Record steps of decodes, before any request has come. Raises whatever recording runs into, and RecordingError
        when what is replayed is not what is computed kernel by kernel: no step is replayed then.
        """
        hidden_size = self._model.config.hidden_size
        hidden = torch.zeros((sizes[-1], hidden_size), dtype=self._pool.keys[0].dtype, device=self.device)
        graphs = DecodeGraphs(self._decodes, sizes=sizes, hidden=hidden, record=record)
        self._rows.relay.copy_(torch.arange(len(self._rows.relay), device=self.device) % self._pool.page_size)
        try:
            graphs.check(self._launched, self._pool.page_size)
        finally:
            self._pool.clear_sink()
        self._graphs = graphs

    @torch.inference_mode()
    def try_decodes(self, size: int) -> Tensor:
        """What `record_decodes` records, computed once over the padding sink: to measure what it takes."""
        return self._decodes(*torch.zeros((3, size), dtype=torch.int64, device=self.device))

    def _hidden(self, plan: StepPlan) -> Tensor:
        replayed = self._graphs.hidden(plan) if self._graphs is not None else None
        return replayed if replayed is not None else self._launched(plan)

    def _decodes(self, rows: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """What `DecodeGraphs` records: nothing in it depends on what the tensors hold."""
        assert isinstance(self._attention, RecordableAttention)
        self._rows.place(rows, positions, slots)
        self._attention.plan_decodes(rows, positions, self._rows.table)
        attend = _PagedAttention(self._pool, self._attention, slots)
        return self._model.hidden(self._rows.relay.index_select(0, rows), positions, attend)

    def _launched(self, plan: StepPlan) -> Tensor:
        flat_rows, flat_positions = flat_rows_and_positions(plan)
        rows = upload_indices(flat_rows, self.device)
        positions = upload_indices(flat_positions, self.device)
        slots = upload_indices(plan.slots, self.device)
        self._rows.place(rows, positions, slots)
        batch = AttentionBatch(plan.rows, plan.starts, plan.lengths, self._rows.table)
        input_ids = self._input_ids(plan, rows)
        if self._layers is not None:
            return self._layers.hidden(input_ids, positions, slots, batch)
        self._attention.plan(batch)
        return self._model.hidden(input_ids, positions, _PagedAttention(self._pool, self._attention, slots))

    def _input_ids(self, plan: StepPlan, rows: Tensor) -> Tensor:
        """`rows`: of each token."""
        known = upload_indices(plan.input_ids, self.device)
        if not plan.relayed.any():
            return known
        relayed = upload(np.repeat(plan.relayed, plan.lengths), self.device)
        return torch.where(relayed, self._rows.relay[rows], known)
