"""One simulated worker: the real scheduler, radix cache and page accounting; a cost model in place of the device.

Steps are planned one at a time, each when the last has ended; scheduling takes no time. Whoever drives the worker
calls `end` when the clock stands at `ends_at_s`. Tokens are those of the job's answer.

Most steps only decode, with the same requests before and after. `Scheduler.steps_ahead` says how many such steps follow
one another. Such a stretch is timed as a whole when it begins, and `Scheduler.leap` executes all of it at once, at its
end. When a request arrives or a report is due in its midst (`_interrupt`), the leap executes the steps up to and with
the one that runs at that moment; that step ends, and the next is planned, when it would have without leaps. Only the
last step of a stretch, in which a request may end, is then planned by itself. Leaps change nothing that can be seen
from outside: with `leaps=False` every step is executed by itself, and the tests compare the two.

    [--- step ---][--- stretch of steps ---------][--- step ---]        `end` is due at `ends_at_s`
                                 ^ a request arrives
                  [---- leap -----]|                                    `end` is due here, and the next step begins
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deploy.lab.clock import VirtualClock
from deploy.lab.presets import Preset
from radixfleet.types import HashArray, Load
from worker.core.messages import Submit
from worker.core.step import StepPlan, StepResult
from worker.scheduling.limits import Limits
from worker.scheduling.request import Request
from worker.scheduling.scheduler import Scheduler

_LEAST_LEAP = 2
"""Steps in the shortest stretch that is worth a leap."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request as a worker gets it."""

    submit: Submit
    """Its `seed` is its `uid`: that is how a plan says which job has a row."""
    answer: Sequence[int]
    """The tokens that it is going to generate, `submit.max_new_tokens` of them."""


@dataclass(slots=True)
class Told:
    """What happened to jobs, by uid."""

    admitted: list[tuple[int, int]] = field(default_factory=list)
    """(uid, prompt tokens found in the cache)."""
    first_tokens: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    """(uid, why the job can never fit on this worker)."""


@dataclass(slots=True)
class Gaps:
    """Times between two tokens of a request: so many tokens came so many seconds after the one before."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("q"))

    def add(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens came `seconds` after their predecessors."""
        self.seconds.append(seconds)
        self.tokens.append(tokens)

    def add_each(self, seconds: npt.NDArray[np.float64], tokens: int) -> None:
        """The same for each of `seconds`."""
        self.seconds.frombytes(seconds.tobytes())
        self.tokens.extend([tokens] * len(seconds))


class SimulatedWorker:
    """Serves jobs one step after the other: see the head of the module."""

    def __init__(self, preset: Preset, clock: VirtualClock, *, leaps: bool = True) -> None:
        self.preset = preset
        self.scheduler = Scheduler(Limits.from_ready(preset.ready, order="lpm"), clock)
        self.gaps = Gaps()
        self.busy_s = 0.0
        self.ends_at_s: float | None = None
        """When `end` is due; None: nothing runs."""
        self._clock = clock
        self._leaps = leaps
        self._told = Told()
        self._jobs: dict[int, Job] = {}
        self._job_of_row: dict[int, Job] = {}
        self._last_token_s: dict[int, float] = {}
        """When each running request got its latest token."""
        self._started_s = 0.0
        self._plan: StepPlan | None = None
        """The step that runs."""
        self._ends_s: npt.NDArray[np.float64] | None = None
        """Or the ends of the steps of the stretch that runs. With neither, the step that runs is settled already."""
        self._in_step = False
        """Every running request got a token when the last step ended."""

    @property
    def uids(self) -> list[int]:
        """Jobs that have not ended."""
        return list(self._jobs)

    def submit(self, job: Job) -> None:
        """Take a job."""
        self._interrupt()
        self._jobs[job.submit.uid] = job
        self.scheduler.submit(job.submit)
        if self.ends_at_s is None:
            self._go_on()

    def end(self) -> None:
        """The step or stretch that runs has ended: settle it, and begin the next."""
        assert self.ends_at_s == self._clock.now(), "a step ends when it ends"
        if self._ends_s is not None:
            self._leap(self._ends_s)
        elif self._plan is not None:
            self._settle()
        self._go_on()

    def report(self) -> tuple[Load, HashArray, HashArray]:
        """The load now, and the routing blocks evicted and added since the last report."""
        self._interrupt()
        evicted, added = self.scheduler.cache.block_events.drain()
        return self.scheduler.load(), evicted, added

    def told(self) -> Told:
        """What happened to jobs since this was last asked."""
        told, self._told = self._told, Told()
        return told

    def _go_on(self) -> None:
        """Begin a step or a stretch, if there is something to do."""
        self._started_s = self._clock.now()
        ahead = self.scheduler.steps_ahead() if self._leaps and self._in_step else 0
        if ahead >= _LEAST_LEAP:
            cost, scheduler = self.preset.cost, self.scheduler
            durations = cost.decode_durations_s(len(scheduler.running_uids), scheduler.context_tokens, ahead)
            # Added up one by one, as steps taken one by one do, so that the times are the same to the last bit.
            self._ends_s = np.cumsum(np.concatenate([[self._started_s], durations]))[1:]
            self.ends_at_s = float(self._ends_s[-1])
        else:
            self._launch()

    def _launch(self) -> None:
        """Plan a step that begins at `_started_s`."""
        plan = self.scheduler.plan()
        self._collect()
        self._plan = plan
        self.ends_at_s = None if plan is None else self._started_s + self.preset.cost.duration_s(plan)

    def _settle(self) -> None:
        """The step has ended: give its tokens."""
        plan, now_s = self._plan, self._clock.now()
        assert plan is not None, "no step runs"
        for start in plan.row_starts:
            self._job_of_row[start.row] = self._jobs[start.seed]
        self.busy_s += now_s - self._started_s
        self.scheduler.commit(self._result(plan))
        self._plan = None
        self._collect()

    def _result(self, plan: StepPlan) -> StepResult:
        positions = (plan.starts + plan.lengths).tolist()
        token_ids = np.zeros(plan.num_sequences, dtype=np.int32)
        for index, (row, samples) in enumerate(zip(plan.rows.tolist(), plan.samples.tolist(), strict=True)):
            if samples:
                job = self._job_of_row[row]
                token_ids[index] = job.answer[positions[index] - len(job.submit.token_ids)]
        return StepResult(
            step=plan.step,
            token_ids=token_ids,
            failed=np.zeros(plan.num_sequences, dtype=np.bool_),
            started_s=self._started_s,
            ended_s=self._clock.now(),
        )

    def _collect(self) -> None:
        """Take what the scheduler has to tell."""
        said = self.scheduler.drain()
        if said is None:
            return
        now_s, told, last_token_s = self._clock.now(), self._told, self._last_token_s
        told.admitted += [(admitted.uid, admitted.cached_tokens) for admitted in said.admitted]
        gaps: Counter[float] = Counter()
        for output in said.outputs:
            last_s = last_token_s.get(output.uid)
            if last_s is None:
                told.first_tokens.append(output.uid)
            else:
                gaps[now_s - last_s] += 1
            last_token_s[output.uid] = now_s
        for seconds, tokens in gaps.items():
            self.gaps.add(seconds, tokens)
        for ended in said.ended:
            del self._jobs[ended.uid]
            last_token_s.pop(ended.uid, None)
            if ended.reason is None:
                told.failed.append((ended.uid, ended.message))
            else:
                told.ended.append(ended.uid)
        if said.outputs:
            self._in_step = len(said.outputs) - len(said.ended) == len(self.scheduler.running_uids)

    def _interrupt(self) -> None:
        """Cut the stretch that runs, if one does, to the steps that have begun by now, and execute these."""
        if self._ends_s is None:
            return
        ends_s = self._ends_s
        begun = int(np.searchsorted(ends_s, self._clock.now(), side="left")) + 1
        if begun < len(ends_s):
            self._leap(ends_s[:begun])
            self.ends_at_s = self._started_s
        else:
            self._leap(ends_s[:-1])
            self._launch()

    def _leap(self, ends_s: npt.NDArray[np.float64]) -> None:
        """Execute the stretch's steps that end at these times."""
        self._ends_s = None
        if not len(ends_s):
            return
        running = tuple(self.scheduler.running_uids)
        self.scheduler.leap(len(ends_s), self._tokens_ahead)
        self.gaps.add_each(np.diff(ends_s, prepend=self._started_s), len(running))
        self.busy_s += float(ends_s[-1]) - self._started_s
        self._started_s = float(ends_s[-1])
        self._last_token_s.update(dict.fromkeys(running, self._started_s))
        self._collect()

    def _tokens_ahead(self, request: Request, count: int) -> Sequence[int]:
        made = len(request.outputs)
        return self._jobs[request.uid].answer[made : made + count]
