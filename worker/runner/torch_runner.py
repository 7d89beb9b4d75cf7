"""The runner that computes a model with torch, on a CPU or a CUDA device: one step after another, each waited for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import structlog

from radixfleet.clock import Clock, MonotonicClock
from radixfleet.types import Grammar
from worker.core.messages import Ready
from worker.core.out_of_memory import OutOfMemory
from worker.core.step import StepPlan, StepResult
from worker.runner.memory_errors import is_out_of_memory, release_cached, shortage_of
from worker.runner.step_computer import StepComputer
from worker.runner.step_sampler import Sampled
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_loading import load_computer, load_grammar_compiler
from worker.sampling.grammar import GrammarCompiler, GrammarError

_log = structlog.get_logger()
_MASK_THREADS = 2
"""A mask takes some 20 us: two threads keep up with any batch while the model computes."""


class TorchRunner:
    """Implements `worker.runner.protocol.Runner`."""

    def __init__(self, config: TorchRunnerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._computer: StepComputer | None = None
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="masks")
        """They start when the first mask is computed."""

    def load(self) -> Ready:
        """See `Runner.load`. Raises ModelError, DeviceError or MemoryPlanError, whose texts say what to change."""
        self._compiler = load_grammar_compiler(self._config)
        self._computer, ready = load_computer(self._config, self._clock, self._compiler, self._threads)
        return ready

    def run(self, plan: StepPlan) -> StepResult:
        """See `Runner.run`."""
        assert self._computer is not None, "run before load"
        computer, started_s = self._computer, self._clock.now()
        error, shortage = None, None
        try:
            sampled = computer.compute(plan)
        except Exception as failure:  # noqa: BLE001 - whatever a step ran into, the next one may succeed
            sampled = Sampled(np.zeros(plan.num_sequences, np.int32), np.ones(plan.num_sequences, np.bool_))
            error = f"{type(failure).__name__}: {failure}"
            if is_out_of_memory(failure):
                shortage = shortage_of(failure, computer.device, in_sampling=computer.in_sampling)
            _log_failure(plan, failure, shortage)
        if shortage is not None:  # here, where the failure, and with it the step's tensors, is gone
            release_cached(computer.device)
        return StepResult(
            step=plan.step,
            token_ids=sampled.token_ids,
            failed=sampled.failed,
            started_s=started_s,
            ended_s=self._clock.now(),
            error=error,
            logprobs=sampled.logprobs,
            ended=sampled.ended,
            causes=tuple(sampled.causes.items()),
            out_of_memory=shortage,
        )

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


def _log_failure(plan: StepPlan, failure: Exception, shortage: OutOfMemory | None) -> None:
    """Running out of memory is told by the engine, once for many steps; anything else is a bug."""
    about = {"step": plan.step, "tokens": plan.num_tokens, "sequences": plan.num_sequences}
    if shortage is not None:
        _log.debug("step ran out of memory", **about, in_sampling=shortage.in_sampling, why=str(failure))
    else:
        _log.error("step failed", **about, exc_info=failure)
