"""The engine in one process: what its handle promises, from loading to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from radixfleet.clock import MonotonicClock
from radixfleet.errors import InvalidRequest, RadixfleetError, Unavailable
from radixfleet.types import FinishReason, WorkerStatus
from tests.support.engine_fakes import submit
from tests.support.fake_engine import FakeEngine
from tests.support.grammars import regex
from worker.core.messages import Child, Prepare, Ready, Report
from worker.core.step import StepPlan, StepResult
from worker.engine.config import EngineConfig
from worker.engine.handle import EngineHandle, EngineLoadError, Notice, RequestStream, StateChange
from worker.engine.inline import InlineEngine
from worker.runner.sim import SimRunner, SimRunnerConfig

CONFIG = SimRunnerConfig(
    kv_tokens=1024,
    page_size=4,
    max_running_requests=8,
    chunked_prefill_size=32,
    max_context_tokens=512,
    cost=None,
    verify=True,
)


class Observed(SimRunner):
    """Remembers the plans it ran, and breaks when told to."""

    def __init__(self) -> None:
        super().__init__(CONFIG, MonotonicClock())
        self.plans: list[StepPlan] = []
        self.breaks_at_step = 0
        self.closed = False

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if plan.step == self.breaks_at_step:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().run(plan)

    def close(self) -> None:
        self.closed = True


class GatedRunner(Observed):
    """Loads when `gate` is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def load(self) -> Ready:
        asyncio.run_coroutine_threadsafe(self.gate.wait(), self._loop).result()
        return super().load()


@asynccontextmanager
async def serving(runner: SimRunner, *, overlap: bool = True) -> AsyncIterator[InlineEngine]:
    """A started engine that must be left without open requests or tasks of its own."""
    before = asyncio.all_tasks()
    engine = InlineEngine(runner, overlap=overlap)
    await engine.start()
    try:
        await engine.ready()
        yield engine
        assert engine.num_open == 0
    finally:
        await engine.stop()
        assert asyncio.all_tasks() == before


async def read(stream: RequestStream) -> tuple[list[int], FinishReason | None]:
    tokens: list[int] = []
    async for progress in stream:
        tokens += progress.token_ids
        if progress.ended is not None:
            return tokens, progress.ended.reason
    raise AssertionError("the stream ended without an end")


async def reported(engine: InlineEngine, condition: Callable[[Report], bool]) -> Report:
    """Wait for a report of which something is true."""
    found: asyncio.Future[Report] = asyncio.get_running_loop().create_future()

    def listen(notice: Notice) -> None:
        if isinstance(notice, Report) and condition(notice) and not found.done():
            found.set_result(notice)

    leave = engine.subscribe(listen)
    async with asyncio.timeout(60):
        report = await found
    leave()
    return report


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_request_is_admitted_answered_and_ended(overlap: bool) -> None:
    async with serving(Observed(), overlap=overlap) as engine:
        with engine.submit(submit(engine.next_uid(), 6, max_new_tokens=5)) as stream:
            first = await anext(stream)
            assert first.admitted is not None
            assert first.admitted.cached_tokens == 0
            tokens, reason = await read(stream)
    assert len(first.token_ids) + len(tokens) == 5
    assert reason is FinishReason.LENGTH


@pytest.mark.parametrize(("overlap", "num_steps"), [(True, 6), (False, 5)])
async def test_a_stop_token_ends_the_output_although_a_step_may_be_in_flight(overlap: bool, num_steps: int) -> None:
    """Behaviour 4: overlapped, the step after the stop token is in flight when it comes, and adds nothing."""
    runner = Observed()
    async with serving(runner, overlap=overlap) as engine:
        whole, _ = await read(engine.submit(submit(engine.next_uid(), [1, 2, 3], max_new_tokens=12)))
        num_before = len(runner.plans)
        stopping = submit(engine.next_uid(), [1, 2, 3], max_new_tokens=12, stop_token_ids=(whole[4],))
        tokens, reason = await read(engine.submit(stopping))
        assert (tokens, reason) == (whole[:5], FinishReason.STOP)
        report = await reported(engine, lambda report: report.counters["steps"] >= num_before + num_steps)
        assert len(runner.plans) == num_before + num_steps
        assert report.counters["discarded_tokens"] == num_steps - 5


async def test_a_reader_that_goes_away_stops_its_generation_at_once() -> None:
    """Behaviour 6: within one step, before and after the first token, and its KV is freed."""
    runner = Observed()
    async with serving(runner) as engine:
        before = engine.submit(submit(engine.next_uid(), 6, max_new_tokens=400))
        before.close()
        with engine.submit(submit(engine.next_uid(), 6, max_new_tokens=400)) as after:
            await anext(after)
        assert engine.num_open == 0
        num_steps = len(runner.plans)
        await reported(  # a step that was in flight holds its KV until it has ended
            engine,
            lambda report: report.counters["aborted_requests"] == 2 and not report.load.kv_protected_tokens,
        )
        assert len(runner.plans) <= num_steps + 2


async def test_abort_of_one_leaves_the_others_alone() -> None:
    """Behaviour 7: ids match exactly, and a late abort hits nobody."""
    async with serving(Observed()) as engine:
        streams = [engine.submit(submit(engine.next_uid(), 6, max_new_tokens=30)) for _ in range(12)]
        engine.abort(streams[0].uid)
        outcomes = await asyncio.gather(*(read(stream) for stream in streams))
        engine.abort(streams[1].uid)
        assert [reason for _, reason in outcomes] == [FinishReason.ABORT] + [FinishReason.LENGTH] * 11


async def test_many_requests_leave_no_counter_behind() -> None:
    """Behaviour 8: chunking, aborts and many requests; all in-flight counts end at zero."""
    async with serving(Observed()) as engine:
        streams = [engine.submit(submit(engine.next_uid(), 20 + i, max_new_tokens=1 + i % 9)) for i in range(60)]
        for stream in streams[::4]:
            stream.close()
        await asyncio.gather(*(read(stream) for index, stream in enumerate(streams) if index % 4))
        assert engine.num_open == 0
        flushed = await engine.flush()
        assert flushed.kept_tokens == 0
        load = (await reported(engine, lambda report: report.load.kv_evictable_tokens == 0)).load
        assert (load.running_requests, load.waiting_requests, load.outstanding_prompt_tokens) == (0, 0, 0)
        assert load.kv_protected_tokens == 0


async def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    """Behaviour 15."""
    async with serving(Observed()) as engine:
        with pytest.raises(InvalidRequest, match="512"):
            await read(engine.submit(submit(engine.next_uid(), 600)))


async def test_before_it_is_ready_it_says_so() -> None:
    runner = GatedRunner()
    engine = InlineEngine(runner)
    await engine.start()
    assert engine.status is WorkerStatus.LOADING
    assert engine.last_ready is None
    with pytest.raises(Unavailable, match="loading") as caught:
        engine.submit(submit(engine.next_uid()))
    assert caught.value.retry_after_s is not None
    with pytest.raises(Unavailable, match="loading"):
        await engine.flush()
    runner.gate.set()
    ready = await engine.ready()
    assert engine.last_ready == ready
    assert engine.status is WorkerStatus.SERVING
    await engine.stop()
    assert runner.closed


async def test_a_runner_that_cannot_load_gives_its_advice() -> None:
    engine = InlineEngine.from_config(EngineConfig(runner=SimRunnerConfig(kv_tokens=17, page_size=16)))
    notices: list[Notice] = []
    engine.subscribe(notices.append)
    await engine.start()
    with pytest.raises(EngineLoadError, match="not a multiple of page_size"):
        await engine.ready()
    assert engine.status is WorkerStatus.FAILED
    (change,) = notices
    assert isinstance(change, StateChange)
    assert change.final
    await engine.stop()


async def test_a_runner_that_breaks_ends_all_streams_and_the_engine() -> None:
    runner = Observed()
    runner.breaks_at_step = 5
    async with serving(runner) as engine:
        incarnation = engine.incarnation
        changes: list[Notice] = []
        engine.subscribe(lambda notice: changes.append(notice) if isinstance(notice, StateChange) else None)
        streams = [engine.submit(submit(engine.next_uid(), 6, max_new_tokens=50)) for _ in range(3)]
        outcomes = await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        assert engine.status is WorkerStatus.FAILED
        assert engine.incarnation != incarnation
        assert isinstance(changes[-1], StateChange)
        assert changes[-1].final
        assert "illegal memory access" in changes[-1].message
        with pytest.raises(Unavailable, match="failed"):
            engine.submit(submit(engine.next_uid()))
    assert runner.closed


async def test_a_group_has_a_stream_for_each_completion() -> None:
    """Behaviour 43, of the engine's handle: one message, n streams, in order."""
    engine = FakeEngine()
    engine.become_ready()
    request = msgspec.structs.replace(submit(1), children=(Child(2, 12), Child(3, 13)))
    streams = engine.submit_group(request)
    assert [stream.uid for stream in streams] == [1, 2, 3]
    assert engine.heard == [request]
    assert engine.num_open == 3
    streams[1].close()
    assert engine.aborted_uids == [2]
    engine.output(3, 7)
    assert (await anext(streams[2])).token_ids == [7]


async def test_grammars_are_prepared_by_the_runner() -> None:
    async with serving(Observed()) as engine:
        assert "simulated runner" in await engine.prepare(regex("a+"))


async def test_who_waits_for_a_grammar_hears_of_the_engines_end() -> None:
    engine = FakeEngine()
    with pytest.raises(Unavailable):
        await engine.prepare(regex("a+"))
    engine.become_ready()
    asking = asyncio.ensure_future(engine.prepare(regex("a+")))
    await asyncio.sleep(0)
    assert [type(message) for message in engine.heard] == [Prepare]
    engine.crash()
    with pytest.raises(Unavailable):
        await asking


async def test_stop_ends_what_runs_and_refuses_what_comes() -> None:
    runner = Observed()
    async with serving(runner) as engine:
        stream = engine.submit(submit(engine.next_uid(), 6, max_new_tokens=400))
        await anext(stream)
        await engine.stop()
        with pytest.raises(Unavailable, match="shutting down"):
            await read(stream)
        with pytest.raises(Unavailable, match="shutting down"):
            engine.submit(submit(engine.next_uid()))
        await engine.stop()
    assert runner.closed


async def test_listeners_hear_until_they_leave_and_cannot_break_the_engine() -> None:
    async with serving(Observed()) as engine:
        heard: list[Notice] = []
        leave = engine.subscribe(heard.append)

        def broken(notice: Notice) -> None:
            raise RadixfleetError("a listener's own fault")

        engine.subscribe(broken)
        first = await reported(engine, lambda _: True)
        assert first in heard
        leave()
        heard.clear()
        assert engine.last_report is first
        await reported(engine, lambda _: True)
        assert heard == []


def test_it_is_an_engine_handle() -> None:
    handle: EngineHandle = InlineEngine(SimRunner(CONFIG, MonotonicClock()))
    assert handle.status is WorkerStatus.LOADING


async def test_an_engine_that_crashes_before_it_serves_leaves_nobody_waiting_for_it() -> None:
    config = SimRunnerConfig(kv_tokens=480, page_size=48)
    engine = InlineEngine(SimRunner(config, MonotonicClock()))
    await engine.start()
    async with asyncio.timeout(60):
        with pytest.raises(EngineLoadError, match="page size 48"):
            await engine.ready()
        await engine.stop()
