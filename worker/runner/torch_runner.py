"""The runners that compute a model with torch: on a CPU one step after another, on a CUDA device with a queue."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from radixfleet.clock import Clock, MonotonicClock
from radixfleet.types import Grammar
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.model.errors import ModelError
from worker.model.tokenizer_files import load_tokenizer_spec
from worker.runner.cuda_marks import CudaStream
from worker.runner.devices import open_device
from worker.runner.memory_errors import release_cached
from worker.runner.step_computer import StepComputer
from worker.runner.step_queue import DeviceQueue
from worker.runner.step_results import Failure, failure_of, result_of
from worker.runner.step_sampler import Sampled
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_loading import load_computer
from worker.sampling.grammar import GrammarCompiler, GrammarError

_log = structlog.get_logger()
_MASK_THREADS = 2
"""A mask takes some 20 us: two threads keep up with any batch while the model computes."""


class TorchRunner:
    """Implements `worker.runner.protocol.Runner`, and `TellsLayersComputed`: a step is waited for."""

    def __init__(self, config: TorchRunnerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._computer: StepComputer | None = None
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="masks")
        """They start when the first mask is computed."""

    def load(self) -> Ready:
        """See `Runner.load`. Raises ModelError, DeviceError or MemoryPlanError, whose texts say what to change."""
        self._compiler = _grammar_compiler(self._config)
        self._computer, ready = load_computer(self._config, self._clock, self._compiler, self._threads)
        return ready

    def run(self, plan: StepPlan) -> StepResult:
        """See `Runner.run`."""
        assert self._computer is not None, "run before load"
        started_s = self._clock.now()
        outcome = self._compute(self._computer, plan)
        if isinstance(outcome, Failure) and outcome.shortage is not None:
            release_cached(self._computer.device)  # here, where the failure, and with it the step's tensors, is gone
        return result_of(plan, outcome, started_s, self._clock.now())

    def tell_layers_computed(self, tell: Callable[[], None]) -> None:
        """See `TellsLayersComputed`."""
        assert self._computer is not None, "asked to tell before load"
        self._computer.when_layers_computed = tell

    def _compute(self, computer: StepComputer, plan: StepPlan) -> Sampled | Failure:
        try:
            return computer.compute(plan)
        except Exception as error:  # noqa: BLE001 - whatever a step ran into, the next one may succeed
            return failure_of(plan, error, computer.device, in_sampling=computer.in_sampling)

    def prepare(self, grammar: Grammar) -> str:
        """See `Runner.prepare`."""
        if self._compiler is None:
            return "the tokenizer of this model does not go together with grammars"
        try:
            self._compiler.matcher(grammar)
        except GrammarError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._computer = self._compiler = None
        self._threads.shutdown()


class QueuedTorchRunner(TorchRunner):
    """Implements `StepQueue` as well: the next step is launched while the device computes."""

    _queue: DeviceQueue | None = None

    def load(self) -> Ready:
        """See `Runner.load`."""
        ready = super().load()
        assert self._computer is not None
        self._queue = self._make_queue(self._computer)
        return ready

    def _make_queue(self, computer: StepComputer) -> DeviceQueue:
        return DeviceQueue(computer, CudaStream(computer.device, self._clock).mark, self._clock)

    @property
    def _loaded(self) -> DeviceQueue:
        assert self._queue is not None, "run before load"
        return self._queue

    def run(self, plan: StepPlan) -> StepResult:
        """See `Runner.run`. Not to be mixed with `enqueue`."""
        self.enqueue(plan)
        return self.collect()

    def enqueue(self, plan: StepPlan) -> None:
        """See `StepQueue.enqueue`."""
        self._loaded.enqueue(plan)

    def time_left_s(self) -> float:
        """See `StepQueue.time_left_s`."""
        return self._loaded.time_left_s()

    def collect(self) -> StepResult:
        """See `StepQueue.collect`."""
        return self._loaded.collect()

    def close(self) -> None:
        """See `Runner.close`."""
        self._queue = None
        super().close()


def make_torch_runner(config: TorchRunnerConfig, clock: Clock) -> TorchRunner:
    """The runner for the device that the configuration names. Raises DeviceError when there is none such."""
    kind = QueuedTorchRunner if open_device(config.device).type == "cuda" else TorchRunner
    return kind(config, clock)


def _grammar_compiler(config: TorchRunnerConfig) -> GrammarCompiler | None:
    """For the model's tokenizer; None, and a warning, where there is none that goes together with grammars.

    Made while loading, because it holds the interpreter's lock for about a second: later, all steps would wait for it.
    """
    try:
        return GrammarCompiler(load_tokenizer_spec(Path(config.model_path)))
    except (GrammarError, ModelError) as error:
        _log.warning("requests with a grammar will be refused", why=str(error))
        return None
