"""The runner that computes a model with torch, on a CPU or a CUDA device: one step after another, each waited for."""

from __future__ import annotations

import numpy as np
import structlog

from radixfleet.clock import Clock, MonotonicClock
from radixfleet.types import Grammar
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.runner.step_computer import StepComputer
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_loading import load_computer

_log = structlog.get_logger()


class TorchRunner:
    """Implements `worker.runner.protocol.Runner`."""

    def __init__(self, config: TorchRunnerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._computer: StepComputer | None = None

    def load(self) -> Ready:
        """See `Runner.load`. Raises ModelError, DeviceError or MemoryPlanError, whose texts say what to change."""
        self._computer, ready = load_computer(self._config, self._clock)
        return ready

    def run(self, plan: StepPlan) -> StepResult:
        """See `Runner.run`."""
        assert self._computer is not None, "run before load"
        started_s = self._clock.now()
        error = None
        try:
            token_ids, failed = self._computer.compute(plan)
        except Exception as failure:  # noqa: BLE001 - whatever a step ran into, the next one may succeed
            _log.exception("step failed", step=plan.step, tokens=plan.num_tokens, sequences=plan.num_sequences)
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

    def prepare(self, grammar: Grammar) -> str:
        """See `Runner.prepare`."""
        return f"this worker cannot keep to a {grammar.kind} yet"

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._computer = None
