"""Attention by the kernels in C, over the page table in place: float32 and bfloat16 pools on a CPU."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from worker.model.configuration import ModelConfig
from worker.runner.attention.protocol import AttentionBatch
from worker.runner.kernels.batches import HostBatch
from worker.runner.kernels.library import AttentionLayer, AttentionShape, Kernels

MAX_HEAD_DIM = 256


class CpuBackend:
    """Implements `AttentionBackend`. A row's result depends on nothing else in the batch."""

    name = "cpu"

    def __init__(self, kernels: Kernels, config: ModelConfig) -> None:
        self._kernels = kernels
        self._config = config
        self._batch: HostBatch | None = None
        self._plans: dict[bool, _Plan] = {}

    def plan(self, batch: AttentionBatch) -> None:
        """Copies the slots of the batch: the table may change while the step is computed."""
        longest = int(batch.ends.max())
        assert longest <= batch.table.shape[1], "a sequence is longer than the table"  # else it would be cut silently
        slots = batch.table[torch.from_numpy(batch.rows.astype(np.int64)), :longest]  # indexing copies
        rows = np.arange(len(batch.rows), dtype=np.int32)
        self._batch = HostBatch(replace(batch, rows=rows, table=slots))
        self._plans = {}

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
        assert q.dtype in (torch.float32, torch.bfloat16), "see choose_attention"
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        layer = AttentionLayer(
            q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), q.stride(0), keys.stride(0), out.stride(0)
        )
        plan = self._plan_for(is_bf16=q.dtype == torch.bfloat16)
        self._kernels.library.rf_attend(self._kernels.team, plan.address, ctypes.byref(layer))
        return out.flatten(1)

    def _plan_for(self, *, is_bf16: bool) -> _Plan:
        if is_bf16 not in self._plans:
            assert self._batch is not None, "attend before plan"
            config = self._config
            shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, int(is_bf16))
            self._plans[is_bf16] = _Plan(self._kernels, self._batch, shape)
        return self._plans[is_bf16]


class _Plan:
    """An rf_attention_plan, freed with this object."""

    def __init__(self, kernels: Kernels, batch: HostBatch, shape: AttentionShape) -> None:
        library = kernels.library
        self.address: int = library.rf_attention_plan_create(
            ctypes.byref(batch.batch), ctypes.byref(shape), kernels.num_threads
        )
        if not self.address:
            raise MemoryError("no memory for the attention plan of a step")
        weakref.finalize(self, library.rf_attention_plan_destroy, self.address)
