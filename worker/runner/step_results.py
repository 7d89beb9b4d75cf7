"""What a step gave, or why it gave nothing, as a `StepResult`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import structlog
import torch

from worker.core.out_of_memory import OutOfMemory
from worker.core.step import StepPlan, StepResult
from worker.runner.memory_errors import is_out_of_memory, shortage_of
from worker.runner.step_sampler import Sampled

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Failure:
    """Of a whole step."""

    error: str
    shortage: OutOfMemory | None


def failure_of(plan: StepPlan, error: Exception, device: torch.device, *, in_sampling: bool) -> Failure:
    """What `error` means. Call it before caches are released. Logs bugs: shortages are told by the engine."""
    shortage = None
    about = {"step": plan.step, "tokens": plan.num_tokens, "sequences": plan.num_sequences}
    if is_out_of_memory(error):
        shortage = shortage_of(error, device, in_sampling=in_sampling)
        _log.debug("step ran out of memory", **about, in_sampling=in_sampling, why=str(error))
    else:
        _log.error("step failed", **about, exc_info=error)
    return Failure(f"{type(error).__name__}: {error}", shortage)


def result_of(
    plan: StepPlan, sampled: Sampled | Failure, started_s: float, ended_s: float, ready_s: float = 0.0
) -> StepResult:
    """The result of a step that began and ended at these times. `ready_s`: see `StepResult`."""
    if isinstance(sampled, Failure):
        return StepResult(
            step=plan.step,
            token_ids=np.zeros(plan.num_sequences, np.int32),
            failed=np.ones(plan.num_sequences, np.bool_),
            started_s=started_s,
            ended_s=ended_s,
            error=sampled.error,
            out_of_memory=sampled.shortage,
            ready_s=ready_s,
        )
    return StepResult(
        step=plan.step,
        token_ids=sampled.token_ids,
        failed=sampled.failed,
        started_s=started_s,
        ended_s=ended_s,
        logprobs=sampled.logprobs,
        ended=sampled.ended,
        causes=tuple(sampled.causes.items()),
        ready_s=ready_s,
    )
