"""A CPU whose memory has a size: an allocator that fails as a device's does, and a runner that computes under it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch

from radixfleet.clock import ManualClock
from radixfleet.types import Grammar
from tests.support.sim_worker import Told
from worker.core.messages import Ready, Submit
from worker.core.step import StepPlan, StepResult
from worker.runner.activation_peak import LiveBytes
from worker.runner.protocol import Runner
from worker.scheduling.limits import Limits
from worker.scheduling.scheduler import Scheduler

KIB = 1 << 10
_PLENTY = 1 << 40


class ScarceMemory(LiveBytes):
    """While active, tensors that are made may take `limit` bytes together; the one that goes beyond fails."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.failures = 0

    def _watch(self, tensor: torch.Tensor) -> None:
        wanted = tensor.untyped_storage().nbytes()
        if self._now + wanted > self.limit:
            self.failures += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {wanted / KIB:.2f} KiB. GPU 0 has a total capacity of "
                f"{self.limit / KIB:.2f} KiB of which {(self.limit - self._now) / KIB:.2f} KiB is free."
            )
        super()._watch(tensor)


class LoadedRunner:
    """A runner that is loaded already and outlives the schedulers that it serves, one after another."""

    def __init__(self, runner: Runner, ready: Ready) -> None:
        self._runner = runner
        self._ready = ready

    def load(self) -> Ready:
        return self._ready

    def launch(self, plan: StepPlan) -> None:
        """A step is handed over. It runs when it is its turn."""

    def run(self, plan: StepPlan) -> StepResult:
        return self._runner.run(plan)

    def prepare(self, grammar: Grammar) -> str:
        return self._runner.prepare(grammar)

    def close(self) -> None:
        """The runner belongs to somebody else."""


class ScarceRunner(LoadedRunner):
    """One whose steps are computed with `step_bytes` bytes for what they allocate."""

    def __init__(self, runner: Runner, ready: Ready) -> None:
        super().__init__(runner, ready)
        self.step_bytes = _PLENTY
        self.failing_steps: Collection[int] = ()
        """Numbers of steps that get nothing at all."""
        self.failures = 0
        self.peak_bytes = 0
        """The most that a step has held."""

    def run(self, plan: StepPlan) -> StepResult:
        with ScarceMemory(0 if plan.step in self.failing_steps else self.step_bytes) as memory:
            result = super().run(plan)
        self.failures += memory.failures
        self.peak_bytes = max(self.peak_bytes, memory.peak)
        return result


class ScheduledRunner:
    """Any runner behind a scheduler, one turn after another, every invariant checked at each."""

    def __init__(self, runner: Runner, *, in_flight: int) -> None:
        self.runner = runner
        self.scheduler = Scheduler(Limits.from_ready(runner.load()), ManualClock())
        self.told: dict[int, Told] = {}
        self.plans: list[StepPlan] = []
        self.logprobs: defaultdict[int, list[float]] = defaultdict(list)
        self.prompt_logprobs: defaultdict[int, list[float]] = defaultdict(list)
        self._in_flight = in_flight
        self._launched: list[StepPlan] = []

    def serve(self, submits: Iterable[Submit]) -> None:
        """All of them at once, to their ends."""
        for submit in submits:
            self.told[submit.uid] = Told()
            self.scheduler.submit(submit)
        while self.scheduler.has_work:
            self._turn()
        assert self.scheduler.holdings.used_pages == 0

    def tokens(self) -> dict[int, Sequence[int]]:
        """Of each request."""
        return {uid: told.tokens for uid, told in self.told.items()}

    def _turn(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self._launched.append(plan)
            if isinstance(self.runner, LoadedRunner):
                self.runner.launch(plan)
        if self._launched and (plan is None or len(self._launched) >= self._in_flight):
            self.scheduler.commit(self.runner.run(self._launched.pop(0)))
        self.scheduler.check()
        outputs = self.scheduler.drain()
        for run in outputs.prompt_logprobs if outputs else ():
            assert run.start == len(self.prompt_logprobs[run.uid]) + 1, (
                "a token of the prompt is told twice, or skipped"
            )
            self.prompt_logprobs[run.uid] += run.logprobs.tolist()
        for output in outputs.outputs if outputs else ():
            self.told[output.uid].tokens.append(output.token_id)
            if output.logprobs is not None:
                self.logprobs[output.uid].append(output.logprobs.logprob)
        for ended in outputs.ended if outputs else ():
            assert self.told[ended.uid].ended is None
            self.told[ended.uid].ended = ended
