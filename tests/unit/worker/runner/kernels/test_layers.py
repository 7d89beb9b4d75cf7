"""All layers in one call, against the model computed by torch in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.tiny_model import Architecture, tiny_model
from worker.memory.kv_pool import TokenToKVPool
from worker.model.configuration import load_config
from worker.model.linear import DenseBackend, LinearBackend
from worker.model.llama import LlamaModel
from worker.model.loading import load_model
from worker.runner.attention.protocol import AttentionBatch
from worker.runner.attention.sdpa import SdpaBackend
from worker.runner.kernels.batches import HostBatch
from worker.runner.kernels.compiler import find_compiler
from worker.runner.kernels.layers import KernelLayers, are_fast_for, supports
from worker.runner.kernels.library import Kernels
from worker.runner.kernels.linear import KernelLinearBackend
from worker.runner.step_computer import _PagedAttention

CPU = torch.device("cpu")
STEPS = (([0, 0, 0], [50, 1, 20]), ([50, 1, 20], [1, 30, 1]), ([51, 31, 21], [1, 1, 1]))
"""Starts and lengths of three sequences: prompts, a mixed step, decodes."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    return Kernels(num_threads=2)


def load(path: Path, dtype: torch.dtype, backend: LinearBackend) -> LlamaModel:
    return load_model(path, device=CPU, dtype=dtype, linear_backend=backend)


def pool_for(model: LlamaModel, dtype: torch.dtype) -> TokenToKVPool:
    config = model.config
    return TokenToKVPool(
        num_pages=40,
        page_size=16,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=CPU,
    )


def steps(vocab_size: int) -> list[tuple[AttentionBatch, Tensor, Tensor, Tensor]]:
    """Batch, input ids, positions and slots of each."""
    random = np.random.default_rng(0)
    table = torch.arange(16, 16 + 4 * 128, dtype=torch.int32).view(4, 128)
    made = []
    for starts, lengths in STEPS:
        batch = AttentionBatch(
            np.array([2, 0, 1], np.int32), np.array(starts, np.int32), np.array(lengths, np.int32), table
        )
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        rows = torch.from_numpy(np.repeat(batch.rows, lengths).astype(np.int64))
        where = torch.from_numpy(positions.astype(np.int64))
        ids = torch.from_numpy(random.integers(0, vocab_size, len(positions)))
        made.append((batch, ids, where, table[rows, where].long()))
    return made


def by_torch(model: LlamaModel, dtype: torch.dtype) -> list[Tensor]:
    pool, attention = pool_for(model, dtype), SdpaBackend(model.config.num_kv_heads)
    hidden = []
    for batch, ids, positions, slots in steps(model.config.vocab_size):
        attention.plan(batch)
        hidden.append(model.hidden(ids, positions, _PagedAttention(pool, attention, slots)).double())
    return hidden


@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_as_near_to_float32_as_torch_in_bfloat16(kernels: Kernels, architecture: str) -> None:
    path = tiny_model(cast("Architecture", architecture))
    model = load(path, torch.bfloat16, KernelLinearBackend(kernels))
    assert supports(model.config)
    layers = KernelLayers(kernels, model, pool_for(model, torch.bfloat16))
    exact = by_torch(load(path, torch.float32, DenseBackend()), torch.float32)
    rounded = by_torch(load(path, torch.bfloat16, DenseBackend()), torch.bfloat16)
    for step, want, near in zip(steps(model.config.vocab_size), exact, rounded, strict=True):
        batch, ids, positions, slots = step
        hidden = layers.hidden(ids, positions, slots, batch).double()
        assert (hidden - want).norm() < 1.2 * (near - want).norm()


def test_they_are_fast_for_what_they_compute_by_vectors(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(tiny_model())
    assert kernels.have_vectors == (kernels.features != "no vector instructions")
    for have_vectors in (False, True):
        monkeypatch.setattr(Kernels, "have_vectors", have_vectors)
        assert are_fast_for(kernels, config) == have_vectors
    assert not are_fast_for(kernels, replace(config, intermediate_size=config.intermediate_size + 1))
    assert not are_fast_for(None, config)


def test_a_token_does_not_depend_on_what_is_computed_beside_it(kernels: Kernels) -> None:
    model = load(tiny_model(), torch.bfloat16, KernelLinearBackend(kernels))
    together = KernelLayers(kernels, model, pool_for(model, torch.bfloat16))
    alone = KernelLayers(kernels, model, pool_for(model, torch.bfloat16))
    for batch, ids, positions, slots in steps(model.config.vocab_size):
        hidden = together.hidden(ids, positions, slots, batch)
        for i, offset in enumerate(batch.offsets.tolist()):
            own = slice(offset, offset + int(batch.lengths[i]))
            one = AttentionBatch(batch.rows[i : i + 1], batch.starts[i : i + 1], batch.lengths[i : i + 1], batch.table)
            assert torch.equal(alone.hidden(ids[own], positions[own], slots[own], one), hidden[own])


@pytest.mark.parametrize(("row", "length", "why"), [(4, 1, "the table lacks"), (0, 129, "longer than the table")])
def test_what_lies_outside_of_the_table_is_not_read(row: int, length: int, why: str) -> None:
    one = (np.array([value], np.int32) for value in (row, 0, length))
    with pytest.raises(AssertionError, match=why):
        HostBatch(AttentionBatch(*one, torch.zeros((4, 128), dtype=torch.int32)))
