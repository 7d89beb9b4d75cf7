"""What computes a model on one device: kernels, linear layers and attention, chosen once, and put together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import torch

from worker.memory.kv_pool import TokenToKVPool
from worker.model.configuration import ModelConfig
from worker.model.linear import LinearBackend, choose_linear_backend
from worker.model.llama import LlamaModel
from worker.model.row_invariance import RowInvariantBackend
from worker.runner.attention.backends import AttentionNeeds, make_attention_backend
from worker.runner.attention.protocol import AttentionBackend
from worker.runner.kernels.draw import KernelDraw
from worker.runner.kernels.layers import KernelLayers, supports
from worker.runner.kernels.library import Kernels
from worker.runner.kernels.linear import KernelLinearBackend
from worker.runner.row_edits import RowEdits
from worker.runner.rows import RowState
from worker.runner.step_computer import StepComputer
from worker.runner.step_sampler import StepSampler
from worker.runner.torch_config import TorchRunnerConfig
from worker.sampling.grammar import GrammarCompiler
from worker.sampling.host_draw import winners_by_bounds


@dataclass(frozen=True, slots=True)
class ComputerParts:
    """Chosen for one model's shape."""

    device: torch.device
    dtype: torch.dtype
    page_size: int
    is_deterministic: bool
    kernels: Kernels | None
    """The kernels in C; None where they are not used."""
    computes_whole_steps: bool
    """The kernels compute all layers of a step in one call."""
    attention: AttentionBackend

    @classmethod
    def choose(
        cls,
        config: TorchRunnerConfig,
        shape: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels | None,
    ) -> Self:
        """The fastest that work here, within what the settings say. Raises DeviceError."""
        needs = AttentionNeeds(shape, device, dtype, config.page_size, config.deterministic)
        return cls(
            device=device,
            dtype=dtype,
            page_size=config.page_size,
            is_deterministic=config.deterministic,
            kernels=kernels,
            computes_whole_steps=kernels is not None and dtype == torch.bfloat16 and supports(shape),
            attention=make_attention_backend(config.attention, kernels, needs),
        )

    def linear_backend(self) -> LinearBackend:
        """For the model that is to be loaded."""
        if self.kernels is not None and self.computes_whole_steps:
            return KernelLinearBackend(self.kernels)
        backend = choose_linear_backend(self.device, self.dtype)
        return RowInvariantBackend(backend) if self.is_deterministic else backend

    def sampler(self, rows: RowState, compiler: GrammarCompiler | None, threads: ThreadPoolExecutor) -> StepSampler:
        """For all of `rows`. `compiler`: None where no row ever has a grammar; `threads` compute masks."""
        max_rows = len(rows.relay)
        edits = RowEdits(
            max_rows=max_rows, vocab_size=rows.vocab_size, device=self.device, compiler=compiler, threads=threads
        )
        return StepSampler(
            rows=rows,
            edits=edits,
            max_rows=max_rows,
            device=self.device,
            winners=winners_by_bounds if self.kernels is None else KernelDraw(self.kernels),
            row_by_row=self.is_deterministic,
        )

    def computer(self, model: LlamaModel, rows: RowState, sampler: StepSampler, num_pages: int) -> StepComputer:
        """A model over a pool of its own, with `num_pages`."""
        pool = TokenToKVPool(
            num_pages=num_pages,
            page_size=self.page_size,
            num_layers=len(model.weights.layers),
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        layers = None
        if self.kernels is not None and self.computes_whole_steps:
            layers = KernelLayers(self.kernels, model, pool)
        return StepComputer(
            model=model,
            pool=pool,
            rows=rows,
            sampler=sampler,
            attention=self.attention,
            device=self.device,
            layers=layers,
        )
