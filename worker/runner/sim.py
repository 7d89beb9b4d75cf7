"""A runner without tensors: hashes in place of K and V (`HashModel`), costs in place of a device. All else is real.

Time: each step lasts as long as `CostModel` says; without one it takes no time. The device is one with a queue, as a
CUDA stream is: a step that was handed over while another ran begins the moment that one ends, whatever the processes
around it are doing. Whoever waits for a result sleeps until the step has ended, or advances a ManualClock.

With `verify` set, each step is also checked against the promises that the scheduler makes. Grammars are refused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from radixfleet.clock import Clock, ManualClock
from radixfleet.types import Capacity, Grammar, MemoryPools
from worker.core.arrays import BoolArray
from worker.core.messages import Ready
from worker.core.out_of_memory import OutOfMemory
from worker.core.step import StepPlan, StepResult, rows_for
from worker.memory.advisor import Bound
from worker.runner.sim_model import HashModel, PlanError

_KV_BYTES_PER_TOKEN = 131_072
_WEIGHTS_BYTES = 16_060_522_496
_ACTIVATIONS_BYTES = 2 << 30
_ACTIVATION_BYTES_PER_TOKEN = 131_072
_NUM_PARAMETERS = 8_030_261_248


class CostModel(msgspec.Struct, frozen=True):
    """Seconds that a step takes, linear in what it computes and reads. Defaults: about Llama-3.1-8B on one H100."""

    step_s: float = 6e-3
    """Each step: reading the weights, launching kernels."""
    prefill_token_s: float = 3e-5
    decode_token_s: float = 2e-5
    context_token_s: float = 4.5e-8
    """Each pair of a decode and a token of its context, whose KV it reads."""
    prefill_context_token_s: float = 0.0
    """Each pair of a prefilled token and a token up to it, to which it attends: what makes long prompts dear."""

    def duration_s(self, plan: StepPlan) -> float:
        """How long `plan` takes."""
        num_decodes = int(plan.relayed.sum())
        context = int((plan.starts[plan.relayed] + 1).sum())
        base_s = self.step_s + self.decode_token_s * num_decodes + self.context_token_s * context
        if num_decodes == plan.num_sequences:
            return base_s
        lengths, starts = plan.lengths[~plan.relayed].astype(np.int64), plan.starts[~plan.relayed]
        pairs = int((lengths * starts + lengths * (lengths + 1) // 2).sum())
        prefill_s = self.prefill_token_s * int(lengths.sum()) + self.prefill_context_token_s * pairs
        return base_s + prefill_s

    def decode_durations_s(self, num_decodes: int, context: int, num_steps: int) -> npt.NDArray[np.float64]:
        """The same for each of `num_steps` steps in a row that only decode; `context`: tokens read by the first."""
        contexts = (context + num_decodes * np.arange(num_steps)).astype(np.float64)
        durations: npt.NDArray[np.float64] = (
            self.step_s + self.decode_token_s * num_decodes + self.context_token_s * contexts
        )
        return durations


class SimRunnerConfig(msgspec.Struct, frozen=True, tag="sim"):
    """Settings of one `SimRunner`. Plain data, so that it travels to the runner's process."""

    vocab_size: int = 32_000
    kv_tokens: int = 131_072
    """Size of the KV pool; a multiple of `page_size`."""
    page_size: int = 16
    max_running_requests: int = 256
    chunked_prefill_size: int = 8_192
    max_context_tokens: int = 32_768
    cost: CostModel | None = CostModel()
    """None: steps take no time."""
    load_s: float = 0.0
    """How long loading takes, asleep: from `EngineConfig.load_still_s` on it is a load that hangs."""
    verify: bool = False
    """Check every step; costs time proportional to the context of every sequence."""
    failing_steps: tuple[int, ...] = ()
    """Numbers of steps that fail as a whole."""
    nan_token: int | None = None
    """A sequence that computes this token gives NaN."""
    memory_tokens: int | None = None
    """A step of more tokens than this runs out of memory."""


@dataclass(slots=True)
class Faults:
    """What goes wrong, by number of the step: set by tests at any time."""

    step_errors: dict[int, str] = field(default_factory=dict)
    nan_sequences: dict[int, set[int]] = field(default_factory=dict)
    """Indices of sequences whose logits are NaN."""
    out_of_memory: Callable[[StepPlan], OutOfMemory | None] = lambda _: None
    """The shortage that a step runs into, or None. Asked once a step, in order."""


class SimRunner:
    """See the head of the module. Implements `Runner` and `StepQueue` of `worker.runner.protocol`."""

    def __init__(self, config: SimRunnerConfig, clock: Clock) -> None:
        self.faults = Faults({step: f"simulated failure of step {step}" for step in config.failing_steps})
        if config.memory_tokens is not None:
            self.faults.out_of_memory = _memory_for(config.memory_tokens)
        self._config = config
        self._clock = clock
        self._model = HashModel(
            vocab_size=config.vocab_size,
            num_slots=config.kv_tokens + config.page_size,
            page_size=config.page_size,
            num_rows=rows_for(config.max_running_requests),
            max_context=config.max_context_tokens,
        )
        self._last_step = 0
        self._results: deque[StepResult] = deque()
        """Results of steps that were handed over and not collected yet."""
        self._device_free_s = 0.0
        """When the last step handed over ends."""

    def load(self) -> Ready:
        """There is nothing to load; takes `load_s`."""
        config = self._config
        if config.kv_tokens % config.page_size or config.kv_tokens <= 0:
            raise ValueError(f"kv_tokens {config.kv_tokens} is not a multiple of page_size {config.page_size}, or 0")
        self._spend(config.load_s)
        kv_bytes = config.kv_tokens * _KV_BYTES_PER_TOKEN
        return Ready(
            capacity=Capacity(
                kv_tokens=config.kv_tokens,
                page_size=config.page_size,
                max_running_requests=config.max_running_requests,
                chunked_prefill_size=config.chunked_prefill_size,
            ),
            memory=MemoryPools(
                device="simulated",
                total_bytes=_WEIGHTS_BYTES + kv_bytes + _ACTIVATIONS_BYTES,
                weights_bytes=_WEIGHTS_BYTES,
                kv_bytes=kv_bytes,
                activations_bytes=_ACTIVATIONS_BYTES,
                bounded_by=f"{Bound.CAP} = {config.kv_tokens} (simulated)",
            ),
            num_parameters=_NUM_PARAMETERS,
            dtype="simulated",
            max_context_tokens=min(config.max_context_tokens, config.kv_tokens),
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. Raises PlanError when `verify` is set and the plan breaks a promise."""
        self.enqueue(plan)
        return self.collect()

    def enqueue(self, plan: StepPlan) -> None:
        """Hand a step to the device. Its tokens are known at once, and told when it has ended."""
        # What hashing takes is no time of the device's, which would have computed meanwhile.
        started_s = max(self._clock.now(), self._device_free_s)
        if plan.step != self._last_step + 1:
            raise PlanError(f"step {plan.step} follows step {self._last_step}")
        self._last_step = plan.step
        for start in plan.row_starts:
            self._model.start(start)
        if self._config.verify:
            self._model.verify(plan)
        shortage = self.faults.out_of_memory(plan)
        error = self.faults.step_errors.pop(plan.step, None) or (None if shortage is None else "out of memory")
        failed = self._failures(plan)
        if error is not None:
            failed[:] = True
        token_ids, told = self._model.compute(plan)
        self._model.break_rows(plan, failed)
        cost = self._config.cost
        ends_s = started_s + (cost.duration_s(plan) if cost is not None else 0.0)
        self._device_free_s = max(ends_s, self._clock.now())
        self._results.append(
            StepResult(
                plan.step,
                token_ids,
                failed,
                started_s,
                self._device_free_s,
                error,
                logprobs=told,
                out_of_memory=shortage,
                ready_s=self._clock.now(),
            )
        )

    def time_left_s(self) -> float:
        """Seconds until the oldest step that was not collected ends."""
        return max(0.0, self._results[0].ended_s - self._clock.now())

    def collect(self) -> StepResult:
        """The result of the oldest step, at its end."""
        self._spend(self.time_left_s())
        return self._results.popleft()

    def prepare(self, grammar: Grammar) -> str:
        """There is nothing here that a grammar could constrain."""
        return f"a simulated runner invents tokens and cannot keep to a {grammar.kind}"

    def close(self) -> None:
        """Nothing to free."""

    def _failures(self, plan: StepPlan) -> BoolArray:
        failed = np.zeros(plan.num_sequences, dtype=np.bool_)
        failed[list(self.faults.nan_sequences.pop(plan.step, ()))] = True
        if self._config.nan_token is not None:
            failed |= self._model.computing(self._config.nan_token, plan)
        return failed

    def _spend(self, seconds: float) -> None:
        if isinstance(self._clock, ManualClock):
            self._clock.advance(seconds)
        elif seconds > 0:
            time.sleep(seconds)


def _memory_for(num_tokens: int) -> Callable[[StepPlan], OutOfMemory | None]:
    """A device that has activations for steps of so many tokens, each of a simulated size."""

    def shortage(plan: StepPlan) -> OutOfMemory | None:
        if plan.num_tokens <= num_tokens:
            return None
        needed, free = (count * _ACTIVATION_BYTES_PER_TOKEN for count in (plan.num_tokens, num_tokens))
        return OutOfMemory(needed, free, in_sampling=False)

    return shortage
