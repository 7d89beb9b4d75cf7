"""Brings a model to the point where it can serve.

device, kernels      as the settings say, or what there is; the kernels in C are for CPUs
dtype                as the settings say, or what is fast there
weights              refused before they are read when they cannot fit
rows, chunk          derived from the device's memory where the settings leave them open
activation peak      measured: one layer of the largest step
CUDA graphs          measured: what a few keep, where steps of decodes can be recorded
plan                 the three pools
KV pool              allocated as planned
a step               of one token, whose logits must be numbers
CUDA graphs          steps of decodes are recorded, where the attention can be
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import structlog
import torch

from radixfleet.clock import Clock
from radixfleet.types import Capacity
from worker.core.graph_sizes import graph_sizes
from worker.core.messages import Ready
from worker.core.step import StepPlan, rows_for
from worker.memory.advisor import Bound, Shortage, Stage, advise
from worker.memory.plan import (
    MemoryDemand,
    MemoryPlan,
    MemoryPlanError,
    chunked_prefill_size_for,
    max_running_requests_for,
    plan_memory,
)
from worker.model.configuration import ModelConfig, load_config
from worker.model.errors import UnsupportedModel
from worker.model.layer_ops import LayerOps, torch_ops
from worker.model.linear import LinearBackend
from worker.model.llama import LlamaModel
from worker.model.loading import load_model
from worker.model.row_invariance import row_invariant_silu
from worker.runner.activation_peak import activation_peak
from worker.runner.attention.backends import open_kernels
from worker.runner.computer_parts import ComputerParts
from worker.runner.cuda_graphs import recorder_for
from worker.runner.devices import (
    choose_dtype,
    make_current,
    open_device,
    reachable_memory,
    usable_memory,
    warn_of_idle_gpu,
)
from worker.runner.fused_layers import choose_layer_ops
from worker.runner.graph_memory import bytes_of_graphs, driver_bytes
from worker.runner.kernels.layers import are_fast_for
from worker.runner.largest_step import largest_step
from worker.runner.memory_errors import advised, release_cached
from worker.runner.rows import RowState
from worker.runner.step_computer import StepComputer
from worker.runner.torch_config import TorchRunnerConfig
from worker.sampling.grammar import GrammarCompiler

_log = structlog.get_logger()
_STEP_COST_TOKENS = 64
"""On CPUs, of a batch of prompts' tokens: the time to read the weights once, at the rate at which prompts are computed.

Both grow with the model, so it is a property of the machine: 62 where it was measured.
"""
_PROGRESS_EVERY_S = 2.0
_NO_GRAPHS = "no CUDA graphs: each step is launched kernel by kernel, and decodes slower"


def load_computer(
    config: TorchRunnerConfig, clock: Clock, compiler: GrammarCompiler | None, threads: ThreadPoolExecutor
) -> tuple[StepComputer, Ready]:
    """A model ready to compute. Raises ModelError, DeviceError or MemoryPlanError with advice."""
    return _Loading(config, clock, compiler, threads).run()


class _Loading:
    def __init__(
        self, config: TorchRunnerConfig, clock: Clock, compiler: GrammarCompiler | None, threads: ThreadPoolExecutor
    ) -> None:
        self._compiler = compiler
        self._threads = threads
        self._config = config
        self._clock = clock
        self._path = Path(config.model_path)
        self._device = open_device(config.device)
        make_current(self._device)
        if config.device == "auto" and self._device.type == "cpu":
            warn_of_idle_gpu()
        if config.deterministic and self._device.type != "cpu":
            _log.warning("deterministic inference is proven on CPUs; on this device, run: python -m tests.gpu.run")
        self._shape = load_config(self._path)
        self._kernels = open_kernels(config.attention, self._shape, self._device, config.dtype, config.num_threads)
        by_kernels = are_fast_for(self._kernels, self._shape)
        self._dtype = choose_dtype(self._device, config.dtype, by_kernels=by_kernels)
        self._total_bytes = usable_memory(self._device, config.device_memory_bytes)

    def run(self) -> tuple[StepComputer, Ready]:
        if self._device.type == "cpu":
            torch.set_num_threads(self._config.num_threads)
        shape = self._shape
        self._refuse_too_large(shape)
        parts = ComputerParts.choose(self._config, shape, self._device, self._dtype, self._kernels)
        most_kv_tokens = self._total_bytes // shape.kv_bytes_per_token(self._dtype.itemsize)
        max_context = min(_max_context(shape, self._config.max_context_tokens), most_kv_tokens)
        model = self._load_model(shape, max_context, parts.linear_backend())
        on_cpu = self._device.type == "cpu"
        default_chunk = chunked_prefill_size_for(self._total_bytes, on_cpu=on_cpu)
        chunk = min(self._config.chunked_prefill_size or default_chunk, max_context)
        kv_tokens = self._likely_kv_tokens(model)
        max_running = self._config.max_running_requests or max_running_requests_for(kv_tokens, on_cpu=on_cpu)
        with advised(Stage.START, Bound.LARGEST_STEP, self._device):
            rows = RowState(
                max_rows=rows_for(max_running),
                max_context=max_context,
                vocab_size=model.config.vocab_size,
                device=self._device,
            )
            sampler = parts.sampler(rows, self._compiler, self._threads)
            step = largest_step(max_running, chunk, max(min(max_context, kv_tokens), chunk))
            peak = self._measure(parts.computer(model.first_layers(1), rows, sampler, num_pages=1), step)
            make_computer = partial(parts.computer, model, rows, sampler, num_pages=1)
            graphs_bytes = self._measure_graphs(make_computer, shape.num_layers, max_running)
        plan = self._plan(model, peak, rows.nbytes + sampler.nbytes, graphs_bytes or 0)
        ready = Ready(
            capacity=Capacity(
                kv_tokens=plan.kv_tokens,
                page_size=plan.page_size,
                max_running_requests=max_running,
                chunked_prefill_size=chunk,
            ),
            memory=plan.pools(),
            num_parameters=model.config.num_parameters,
            dtype=str(self._dtype).removeprefix("torch."),
            max_context_tokens=min(max_context, plan.kv_tokens),
            step_cost_tokens=_STEP_COST_TOKENS if on_cpu else 0,
        )
        release_cached(self._device)  # pieces of weights and activations, of other sizes than the pool's
        with advised(Stage.START, Bound.ALLOCATION, self._device):
            computer = parts.computer(model, rows, sampler, plan.num_pages)
            if not computer.is_sound():
                way_out = "download the model again" if ready.dtype == "float32" else "set another --dtype"
                raise UnsupportedModel(
                    f"the model's weights are numbers, but its logits are NaN: a computation exceeds {ready.dtype}; "
                    f"{way_out}"
                )
        if graphs_bytes is not None:
            self._record_decodes(computer, max_running, graphs_bytes)
        return computer, ready

    def _record_decodes(self, computer: StepComputer, max_running: int, planned_bytes: int) -> None:
        """Where it fails, for lack of memory too, steps are launched kernel by kernel."""
        record = recorder_for(self._device)
        assert record is not None, "they have been recorded once, to be measured"
        started_s, free_bytes, sizes = self._clock.now(), usable_memory(self._device, None), graph_sizes(max_running)
        _log.info("recording CUDA graphs", sizes=sizes)
        try:
            computer.record_decodes(sizes, record)
        except Exception as error:  # noqa: BLE001 - the worker can serve without
            _log.warning(_NO_GRAPHS, why=str(error))
        else:
            taken_bytes = free_bytes - usable_memory(self._device, None)
            seconds = round(self._clock.now() - started_s, 1)
            _log.info("CUDA graphs recorded", bytes=taken_bytes, planned_bytes=planned_bytes, seconds=seconds)
            return
        release_cached(self._device)  # here, where the error, and with it what was recorded, is gone

    def _refuse_too_large(self, shape: ModelConfig) -> None:
        """Before reading them, which may take minutes: the weights need at least this much."""
        weights_bytes = shape.num_parameters * self._dtype.itemsize
        if weights_bytes >= self._total_bytes:
            raise MemoryPlanError(advise(Stage.LOAD, Shortage(weights_bytes, self._total_bytes)))

    def _load_model(self, shape: ModelConfig, max_context: int, linear_backend: LinearBackend) -> LlamaModel:
        started_s = reported_s = self._clock.now()

        def progress(done: int, total: int) -> None:
            nonlocal reported_s
            if self._clock.now() - reported_s >= _PROGRESS_EVERY_S:
                reported_s = self._clock.now()
                _log.info("loading", layers=f"{done}/{total}")

        with advised(Stage.LOAD, Bound.ALLOCATION, self._device):
            model = load_model(
                self._path,
                device=self._device,
                dtype=self._dtype,
                linear_backend=linear_backend,
                max_context=max_context,
                ops=self._layer_ops(shape),
                progress=progress,
            )
        _log.info(
            "model loaded",
            path=str(self._path),
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            linear=linear_backend.name,
            seconds=round(self._clock.now() - started_s, 1),
        )
        return model

    def _layer_ops(self, shape: ModelConfig) -> LayerOps:
        if self._config.deterministic and self._device.type == "cpu":
            return torch_ops(row_invariant_silu)  # on GPUs, elementwise functions are the same for every element
        return choose_layer_ops(shape, self._device, self._dtype, fused=self._config.fused_layers)

    def _likely_kv_tokens(self, model: LlamaModel) -> int:
        """What the pool will hold at most: the plan itself needs the peak of a step whose size depends on it."""
        kv_bytes = self._config.mem_fraction_static * max(self._total_bytes - model.nbytes, 0)
        kv_tokens = int(kv_bytes) // model.config.kv_bytes_per_token(self._dtype.itemsize)
        return min(kv_tokens, self._config.max_total_tokens or kv_tokens)

    def _measure(self, computer: StepComputer, step: StepPlan) -> int:
        """Activation peak of a step, in bytes.

        `computer` has one layer, as activations do not outlive theirs, and one page, as nobody reads the result.
        """
        started_s = self._clock.now()
        peak = activation_peak(self._device, lambda: computer.compute(step))
        seconds = round(self._clock.now() - started_s, 2)
        _log.debug("activation peak measured", peak_bytes=peak, tokens=step.num_tokens, seconds=seconds)
        return peak

    def _measure_graphs(
        self, make_computer: Callable[[], StepComputer], num_layers: int, max_running: int
    ) -> int | None:
        """What CUDA graphs will keep, in bytes: what they compute with, and what the driver needs of each. None: there
        will be none, as they are not wanted, or a trial has failed, for lack of memory too.

        The computer has all layers, as the driver needs something for each, and one page.
        """
        record, sizes = recorder_for(self._device) if self._config.cuda_graphs else None, graph_sizes(max_running)
        if record is None or not (computer := make_computer()).can_record:
            return None
        try:
            largest = activation_peak(self._device, lambda: computer.try_decodes(sizes[-1]))
            driver = bytes_of_graphs(
                computer.record_decodes,
                sizes=sizes,
                num_layers=num_layers,
                record=record,
                taken_bytes=lambda: driver_bytes(self._device),
            )
        except Exception as error:  # noqa: BLE001 - the worker can serve without
            _log.warning(_NO_GRAPHS, why=str(error))
        else:
            _log.debug("CUDA graphs measured", driver_bytes=driver, activations_bytes=largest, sizes=len(sizes))
            return driver + largest
        release_cached(self._device)  # here, where the error, and with it what was tried, is gone
        return None

    def _plan(self, model: LlamaModel, peak_bytes: int, rows_bytes: int, graphs_bytes: int) -> MemoryPlan:
        """For no more than can still be had: kernels and workspaces of libraries, and other processes, have had theirs
        since loading began. What others take of what is not this worker's share costs it nothing.
        """
        reachable_bytes = reachable_memory(self._device, kept_bytes=model.nbytes + rows_bytes)
        return plan_memory(
            MemoryDemand(
                device=str(self._device),
                total_bytes=self._total_bytes if reachable_bytes is None else min(self._total_bytes, reachable_bytes),
                weights_bytes=model.nbytes,
                activation_peak_bytes=peak_bytes + rows_bytes,
                graphs_bytes=graphs_bytes,
                kv_bytes_per_token=model.config.kv_bytes_per_token(self._dtype.itemsize),
                page_size=self._config.page_size,
                mem_fraction_static=self._config.mem_fraction_static,
                max_total_tokens=self._config.max_total_tokens,
                min_context_tokens=self._config.max_context_tokens,
            )
        )


def _max_context(shape: ModelConfig, setting: int | None) -> int:
    """The longest context to prepare for. Raises UnsupportedModel when more is asked for than the model can use."""
    usable = shape.usable_context_tokens
    if setting is None:
        if usable < shape.max_context_tokens:
            _log.warning(
                "context limited to the sliding window: beyond it the model would need windowed attention",
                context=usable,
                made_for=shape.max_context_tokens,
            )
        return usable
    if setting > usable:
        why = "its sliding window" if setting <= shape.max_context_tokens else "what it was made for"
        raise UnsupportedModel(
            f"a context of {setting} tokens was asked for, but this model can use {usable} ({why}); "
            f"set --context-length to {usable} or less"
        )
    return setting
