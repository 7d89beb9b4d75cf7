"""What overlap is worth: an overlapped and a serial engine on one workload, in alternation.

Both engines are up all the time, with their processes, and do the same rounds in turn: what the machine does besides
meets both. Before each round the prefix cache is emptied. Figures are the engine's own (`Report`): the bubble before a
step is the time that the device was idle although requests ran or waited. On a busy machine the engine waits for a core
too: then its CPU time tells what it costs, and the bubbles what it suffers.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import msgspec
import psutil

from deploy.bench.medians import Interval, median_interval
from deploy.bench.workload import Workload, submit_of
from deploy.progress import Tell
from worker.core.messages import Report
from worker.engine.config import EngineConfig
from worker.engine.handle import Notice
from worker.engine.process import ProcessEngine

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Round:
    """What one engine did in one round."""

    overlap: bool
    duration_s: float
    """From the first request handed over to the last token of all."""
    output_tokens: int
    discarded_tokens: int
    """Computed by steps that were in flight when their requests ended."""
    scheduling_s: float
    engine_cpu_s: float
    step_s: list[float]
    bubble_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens."""
        return self.output_tokens / self.duration_s


@dataclass(frozen=True, slots=True)
class Figures:
    """One loop's rounds together. Times in milliseconds or microseconds, shares in percent."""

    loop: str
    steps: int
    step_ms: float
    """Median."""
    bubble_p50_us: float
    bubble_mean_us: float
    bubble_p50_percent: float
    """Median bubble, of the median step."""
    bubble_percent: float
    """All bubbles, of all the time in steps and bubbles."""
    scheduling_us: float
    """Wall time that the engine's thread spent on ingesting, planning and settling, a step."""
    engine_cpu_us: float
    """CPU time of the engine's process a step: all of that, and messages to and from the others."""
    tokens_per_s: float
    """Median over the rounds."""
    discarded_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Overlapped against serial."""

    name: str
    overlapped: Figures
    serial: Figures
    speedup: float
    """Output tokens a second, overlapped over serial: median over the pairs of rounds."""
    speedup_interval: Interval | None
    """95 % confidence; None with fewer than six pairs."""

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


async def compare(name: str, config: EngineConfig, workload: Workload, rounds: int, tell: Tell) -> Comparison:
    """Run `rounds` pairs of rounds; who begins changes with each. Raises EngineLoadError when an engine cannot load."""
    async with AsyncExitStack() as stack:
        engines = {}
        for overlap in (True, False):
            tell(f"{name}: loading the {_loop(overlap=overlap)} engine")
            engine = ProcessEngine(msgspec.structs.replace(config, overlap=overlap))
            await engine.start()
            stack.push_async_callback(engine.stop)
            await engine.ready()
            engines[overlap] = engine
        done: list[Round] = []
        for index in range(rounds):
            order = (True, False) if index % 2 else (False, True)
            for overlap in order:
                done.append(await measure(engines[overlap], workload, overlap=overlap, seed=index))
                rate = f"{done[-1].tokens_per_s:.0f} tokens/s"
                tell(f"{name}: round {index + 1} of {rounds}, {_loop(overlap=overlap)}: {rate}")
    return summarize(name, done)


async def measure(engine: ProcessEngine, workload: Workload, *, overlap: bool, seed: int) -> Round:
    """One round on an idle engine."""
    await engine.flush()
    before = await _idle_counters(engine)
    step_s: list[float] = []
    bubble_s: list[float] = []

    def listen(notice: Notice) -> None:
        if isinstance(notice, Report):
            step_s.extend(notice.step_s)
            bubble_s.extend(notice.bubble_s)

    stop_listening = engine.subscribe(listen)
    prompts = workload.prompts(seed)
    process = psutil.Process(engine.child_pids[0])
    cpu_before_s = _cpu_s(process)
    began_s = time.monotonic()
    # The streams are left unread: tasks that wake for each token would take the cores from what is measured.
    streams = [engine.submit(submit_of(engine, prompt)) for prompt in prompts]
    while engine.num_open:  # noqa: ASYNC110 - the handle has no event for it
        await asyncio.sleep(_POLL_S)
    duration_s = time.monotonic() - began_s
    after = await _idle_counters(engine)
    stop_listening()
    output_tokens = 0
    for stream in streams:
        async for progress in stream:
            output_tokens += len(progress.token_ids)
    return Round(
        overlap=overlap,
        duration_s=duration_s,
        output_tokens=output_tokens,
        discarded_tokens=round(after["discarded_tokens"] - before["discarded_tokens"]),
        scheduling_s=after["scheduling_s"] - before["scheduling_s"],
        engine_cpu_s=_cpu_s(process) - cpu_before_s,
        step_s=step_s,
        bubble_s=bubble_s,
    )


def summarize(name: str, rounds: list[Round]) -> Comparison:
    """The figures of both loops; `rounds` holds as many of the one as of the other."""
    overlapped = [each for each in rounds if each.overlap]
    serial = [each for each in rounds if not each.overlap]
    ratios = [fast.tokens_per_s / slow.tokens_per_s for fast, slow in zip(overlapped, serial, strict=True)]
    return Comparison(name, _figures(overlapped), _figures(serial), median(ratios), median_interval(ratios))


def _figures(rounds: list[Round]) -> Figures:
    step_s = [seconds for each in rounds for seconds in each.step_s]
    bubble_s = [seconds for each in rounds for seconds in each.bubble_s]
    return Figures(
        loop=_loop(overlap=rounds[0].overlap),
        steps=len(step_s),
        step_ms=median(step_s) * 1e3,
        bubble_p50_us=median(bubble_s) * 1e6,
        bubble_mean_us=mean(bubble_s) * 1e6,
        bubble_p50_percent=100 * median(bubble_s) / (median(step_s) + median(bubble_s)),
        bubble_percent=100 * sum(bubble_s) / (sum(step_s) + sum(bubble_s)),
        engine_cpu_us=sum(each.engine_cpu_s for each in rounds) / len(step_s) * 1e6,
        scheduling_us=sum(each.scheduling_s for each in rounds) / len(step_s) * 1e6,
        tokens_per_s=median([each.tokens_per_s for each in rounds]),
        discarded_tokens=sum(each.discarded_tokens for each in rounds),
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _loop(*, overlap: bool) -> str:
    return "overlapped" if overlap else "serial"


async def _idle_counters(engine: ProcessEngine) -> dict[str, float]:
    """The totals once a report says that all is done and told."""
    reported = asyncio.Event()

    def listen(notice: Notice) -> None:
        if isinstance(notice, Report) and not notice.step_s and not notice.load.running_requests:
            reported.set()

    stop_listening = engine.subscribe(listen)
    await reported.wait()
    stop_listening()
    assert engine.last_report is not None
    return engine.last_report.counters
