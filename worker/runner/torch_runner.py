"""The runner that computes a model with torch, on a CPU or a CUDA device.

load     open the device, load the weights, measure the largest step, plan the three pools, allocate the KV pool
run      one step after another, each waited for
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import structlog
import torch

from radixfleet.clock import Clock, MonotonicClock
from radixfleet.types import Capacity
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.memory.kv_pool import TokenToKVPool
from worker.memory.plan import MemoryDemand, MemoryPlan, chunked_prefill_size_for, plan_memory
from worker.model.configuration import ModelConfig, load_config
from worker.model.errors import UnsupportedModel
from worker.model.linear import choose_linear_backend
from worker.model.llama import LlamaModel
from worker.model.loading import load_model
from worker.runner.activation_peak import activation_peak
from worker.runner.attention.backends import make_attention_backend
from worker.runner.devices import choose_dtype, open_device, usable_memory
from worker.runner.largest_step import largest_step
from worker.runner.rows import RowState
from worker.runner.step_computer import StepComputer
from worker.runner.torch_config import TorchRunnerConfig

_log = structlog.get_logger()
_PROGRESS_EVERY_S = 2.0


class TorchRunner:
    """Implements `worker.runner.protocol.Runner`."""

    def __init__(self, config: TorchRunnerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._computer: StepComputer | None = None

    def load(self) -> Ready:
        """See `Runner.load`. Raises ModelError, DeviceError or MemoryPlanError, whose texts say what to change."""
        config = self._config
        device = open_device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        dtype = choose_dtype(device, config.dtype)
        total_bytes = usable_memory(device, config.device_memory_bytes)
        path = Path(config.model_path)
        max_context = _max_context(load_config(path), config.max_context_tokens)
        model = self._load_model(path, device, dtype, max_context)
        rows = RowState(
            max_rows=config.max_running_requests,
            max_context=max_context,
            vocab_size=model.config.vocab_size,
            device=device,
        )
        chunk = min(config.chunked_prefill_size or chunked_prefill_size_for(total_bytes), max_context)
        peak = self._measure(model, rows, dtype, device, largest_step(config.max_running_requests, chunk, max_context))
        plan = plan_memory(
            MemoryDemand(
                device=str(device),
                total_bytes=total_bytes,
                weights_bytes=model.nbytes,
                activation_peak_bytes=peak + rows.nbytes,
                kv_bytes_per_token=model.config.kv_bytes_per_token(dtype.itemsize),
                page_size=config.page_size,
                mem_fraction_static=config.mem_fraction_static,
                max_total_tokens=config.max_total_tokens,
                min_context_tokens=config.max_context_tokens or 1,
            )
        )
        self._computer = StepComputer(
            model=model,
            pool=_make_pool(model.config, plan.num_pages, config.page_size, dtype, device),
            rows=rows,
            attention=make_attention_backend(config.attention, model.config),
            device=device,
        )
        _log_plan(plan)
        return _ready(config, model, plan, dtype, chunk=chunk, max_context=max_context)

    def _load_model(self, path: Path, device: torch.device, dtype: torch.dtype, max_context: int) -> LlamaModel:
        started_s = reported_s = self._clock.now()
        linear_backend = choose_linear_backend(device, dtype)

        def progress(done: int, total: int) -> None:
            nonlocal reported_s
            if self._clock.now() - reported_s >= _PROGRESS_EVERY_S:
                reported_s = self._clock.now()
                _log.info("loading", layers=f"{done}/{total}")

        model = load_model(
            path,
            device=device,
            dtype=dtype,
            linear_backend=linear_backend,
            max_context=max_context,
            progress=progress,
        )
        _log.info(
            "model loaded",
            path=str(path),
            dtype=_name(dtype),
            linear=linear_backend.name,
            seconds=round(self._clock.now() - started_s, 1),
        )
        return model

    def _measure(
        self, model: LlamaModel, rows: RowState, dtype: torch.dtype, device: torch.device, step: StepPlan
    ) -> int:
        """Activation peak of a step, in bytes.

        One layer is computed, because activations do not outlive theirs, on one page, because nobody reads the result.
        """
        started_s = self._clock.now()
        computer = StepComputer(
            model=model.first_layers(1),
            pool=_make_pool(model.config, 1, self._config.page_size, dtype, device),
            rows=rows,
            attention=make_attention_backend(self._config.attention, model.config),
            device=device,
        )
        peak = activation_peak(device, lambda: computer.compute(step))
        seconds = round(self._clock.now() - started_s, 2)
        _log.debug("activation peak measured", peak_bytes=peak, tokens=step.num_tokens, seconds=seconds)
        return peak

    def run(self, plan: StepPlan) -> StepResult:
        """See `Runner.run`."""
        assert self._computer is not None, "run before load"
        started_s = self._clock.now()
        error = None
        try:
            token_ids, failed = self._computer.compute(plan)
        except Exception as failure:  # noqa: BLE001 - whatever a step ran into, the next one may succeed
            _log.exception("step failed", step=plan.step, tokens=plan.num_tokens)
            token_ids, failed = np.zeros(plan.num_sequences, np.int32), np.ones(plan.num_sequences, np.bool_)
            error = f"{type(failure).__name__}: {failure}"
        return StepResult(
            step=plan.step,
            token_ids=token_ids,
            failed=failed,
            started_s=started_s,
            ended_s=self._clock.now(),
            error=error,
        )

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._computer = None


def _max_context(model: ModelConfig, setting: int | None) -> int:
    if setting is None:
        if model.usable_context_tokens < model.max_context_tokens:
            _log.warning(
                "context limited to the sliding window: beyond it the model would need windowed attention",
                context=model.usable_context_tokens,
                made_for=model.max_context_tokens,
            )
        return model.usable_context_tokens
    if setting > model.usable_context_tokens:
        why = "its sliding window" if setting <= model.max_context_tokens else "what it was made for"
        raise UnsupportedModel(
            f"a context of {setting} tokens was asked for, but this model can use {model.usable_context_tokens} "
            f"({why}); set --max-context to {model.usable_context_tokens} or less"
        )
    return setting


def _make_pool(
    config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> TokenToKVPool:
    return TokenToKVPool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )


def _ready(
    config: TorchRunnerConfig,
    model: LlamaModel,
    plan: MemoryPlan,
    dtype: torch.dtype,
    *,
    chunk: int,
    max_context: int,
) -> Ready:
    return Ready(
        capacity=Capacity(
            kv_tokens=plan.kv_tokens,
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            chunked_prefill_size=chunk,
        ),
        memory=plan.pools(),
        num_parameters=model.config.num_parameters,
        dtype=_name(dtype),
        max_context_tokens=min(max_context, plan.kv_tokens),
    )


def _log_plan(plan: MemoryPlan) -> None:
    for pool, size, share, remark in plan.table():
        _log.info("memory", pool=pool, size=size, share=share, remark=remark)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
