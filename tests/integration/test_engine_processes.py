"""Engine and runner as real processes: they serve, they die, and they are healed; nothing of them is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest

from radixfleet.errors import Unavailable
from radixfleet.types import FinishReason, WorkerStatus
from tests.support.engine_fakes import submit
from tests.support.processes import survivors
from tests.support.waiting import until
from worker.engine.config import EngineConfig
from worker.engine.handle import EngineLoadError, Notice, RequestStream, StateChange
from worker.engine.process import ProcessEngine
from worker.runner.sim import CostModel, SimRunnerConfig

RUNNER = SimRunnerConfig(
    kv_tokens=4096,
    page_size=4,
    max_running_requests=8,
    chunked_prefill_size=32,
    max_context_tokens=4096,
    cost=CostModel(step_s=0.002),
    verify=True,
)
CONFIG = EngineConfig(runner=RUNNER, restart_backoff_s=0.05, log_level="critical")
LONG = 4000
"""Tokens of a request that runs as long as a test needs it to: 8 seconds."""


class History:
    """The states that an engine went through, and a way to wait for the next."""

    def __init__(self, engine: ProcessEngine) -> None:
        self.changes: list[StateChange] = []
        self._arrived = asyncio.Event()
        engine.subscribe(self._note)

    def _note(self, notice: Notice) -> None:
        if isinstance(notice, StateChange):
            self.changes.append(notice)
            self._arrived.set()

    async def until(self, condition: Callable[[StateChange], bool]) -> StateChange:
        """The first change of which something is true, from the beginning."""
        async with asyncio.timeout(60):
            while True:
                for change in self.changes:
                    if condition(change):
                        return change
                self._arrived.clear()
                await self._arrived.wait()

    @property
    def statuses(self) -> list[WorkerStatus]:
        return [change.status for change in self.changes]


class Pauses:
    """The reports of an engine, and the longest time between two: one that the machine kept from running is silent."""

    def __init__(self, engine: ProcessEngine) -> None:
        self.num_reports = 0
        self.longest_s = 0.0
        self._last_s = time.monotonic()
        self._arrived = asyncio.Semaphore(0)
        engine.subscribe(self._note)

    def _note(self, notice: Notice) -> None:
        if not isinstance(notice, StateChange):
            now_s = time.monotonic()
            self.num_reports += 1
            self.longest_s, self._last_s = max(self.longest_s, now_s - self._last_s), now_s
            self._arrived.release()

    async def reports(self, count: int) -> None:
        """So many more of them."""
        async with asyncio.timeout(100):
            for _ in range(count):
                await self._arrived.acquire()


def alive(pid: int) -> bool:
    """A process that runs; one that is dead and not yet reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def serving(config: EngineConfig = CONFIG) -> AsyncIterator[ProcessEngine]:
    """A started engine that must leave no process, task or stream behind."""
    tasks = asyncio.all_tasks()
    engine = ProcessEngine(config)
    await engine.start()
    pids = engine.child_pids
    assert len(pids) == 2
    try:
        async with asyncio.timeout(60):
            await engine.ready()
        yield engine
    finally:
        pids += engine.child_pids
        await engine.stop()
        assert engine.num_open == 0
        assert not [pid for pid in pids if alive(pid)]
        assert asyncio.all_tasks() == tasks


async def read(stream: RequestStream) -> tuple[list[int], FinishReason | None]:
    tokens: list[int] = []
    async with asyncio.timeout(60):
        async for progress in stream:
            tokens += progress.token_ids
            if progress.ended is not None:
                return tokens, progress.ended.reason
    raise AssertionError("the stream ended without an end")


async def start_long(engine: ProcessEngine) -> RequestStream:
    """A request that runs, and has its first token."""
    stream = engine.submit(submit(engine.next_uid(), 6, max_new_tokens=LONG))
    async with asyncio.timeout(60):
        while not (await anext(stream)).token_ids:
            pass
    return stream


async def test_requests_are_served() -> None:
    async with serving() as engine:
        outcomes = await asyncio.gather(
            *(read(engine.submit(submit(engine.next_uid(), 10 + i, max_new_tokens=1 + i))) for i in range(20))
        )
        assert [len(tokens) for tokens, _ in outcomes] == list(range(1, 21))
        assert {reason for _, reason in outcomes} == {FinishReason.LENGTH}
        flushed = await engine.flush()
        assert flushed.kept_tokens == 0
        assert flushed.flushed_tokens > 0


async def test_a_device_too_small_for_its_steps_serves_and_says_what_to_change() -> None:
    """Behaviour 62, across processes: the runner says it, the scheduler shrinks the steps, reports carry the advice."""
    runner = msgspec.structs.replace(RUNNER, memory_tokens=6)
    async with serving(msgspec.structs.replace(CONFIG, runner=runner)) as engine:
        outcomes = await asyncio.gather(
            *(read(engine.submit(submit(engine.next_uid(), 10 + i, max_new_tokens=8))) for i in range(12))
        )
        assert [len(tokens) for tokens, _ in outcomes] == [8] * 12
        await until(lambda: engine.last_report and engine.last_report.counters["out_of_memory_prefill"])
        report = engine.last_report
        assert report is not None
        assert report.step_limits < (32, 8)
        assert "--chunked-prefill-size" in report.advice["prefill"]


async def test_a_reader_that_goes_away_frees_its_memory() -> None:
    """Behaviour 6, across processes."""
    async with serving() as engine:
        (await start_long(engine)).close()
        freed = asyncio.Event()
        engine.subscribe(
            lambda notice: None if isinstance(notice, StateChange) or notice.load.kv_protected_tokens else freed.set()
        )
        async with asyncio.timeout(60):
            await freed.wait()
        assert engine.num_open == 0


async def test_a_prompt_larger_than_any_socket_buffer_arrives_whole() -> None:
    runner = msgspec.structs.replace(
        RUNNER, kv_tokens=2**21, chunked_prefill_size=2**18, max_context_tokens=2**21, cost=None, verify=False
    )
    async with serving(msgspec.structs.replace(CONFIG, runner=runner)) as engine:
        prompt = submit(engine.next_uid(), 2**20 + 2**19, max_new_tokens=2)
        tokens, _ = await read(engine.submit(prompt))
        assert len(tokens) == 2
        again = msgspec.structs.replace(prompt, uid=engine.next_uid())
        with engine.submit(again) as stream:
            first = await anext(stream)
            assert first.admitted is not None
            assert first.admitted.cached_tokens == 2**20 + 2**19 - 4, "all but the last page, which computes the logits"
            rest = [] if first.ended is not None else (await read(stream))[0]
            assert first.token_ids + rest == tokens


@pytest.mark.parametrize("victim", ["engine", "runner"])
async def test_a_killed_process_ends_its_streams_and_is_healed(victim: str) -> None:
    """Behaviour 60: seen at once, told to the clients and the fleet, and healed under a new incarnation."""
    async with serving() as engine:
        history = History(engine)
        incarnation = engine.incarnation
        stream = await start_long(engine)
        flush_in_flight = asyncio.ensure_future(engine.flush())
        await flush_in_flight
        old_pids = engine.child_pids
        os.kill(old_pids[0] if victim == "engine" else old_pids[1], signal.SIGKILL)
        with pytest.raises(Unavailable, match=f"the {victim} died, and is being started again") as caught:
            await read(stream)
        assert caught.value.retry_after_s is not None
        assert engine.status is WorkerStatus.FAILED
        assert engine.incarnation != incarnation
        assert engine.last_report is None
        with pytest.raises(Unavailable, match="failed"):
            engine.submit(submit(engine.next_uid()))

        served = await history.until(lambda change: change.status is WorkerStatus.SERVING)
        assert served.incarnation == engine.incarnation
        assert history.statuses == [WorkerStatus.FAILED, WorkerStatus.LOADING, WorkerStatus.SERVING]
        assert len({change.incarnation for change in history.changes}) == 1
        assert not [pid for pid in old_pids if alive(pid)]
        tokens, _ = await read(engine.submit(submit(engine.next_uid(), 6, max_new_tokens=3)))
        assert len(tokens) == 3


async def test_a_flush_that_waits_for_an_engine_that_dies_is_told() -> None:
    async with serving() as engine:
        os.kill(engine.child_pids[0], signal.SIGSTOP)
        flushing = asyncio.ensure_future(engine.flush())
        await asyncio.sleep(0)
        os.kill(engine.child_pids[0], signal.SIGKILL)
        with pytest.raises(Unavailable):
            await flushing


@pytest.mark.parametrize("victim", ["engine", "runner"])
async def test_a_process_that_stands_still_is_noticed_and_replaced(victim: str) -> None:
    """Behaviour 60: an engine that is stuck is not healthy."""
    async with serving(msgspec.structs.replace(CONFIG, stuck_s=2.5, restart_stuck_s=5.0)) as engine:
        history = History(engine)
        stream = await start_long(engine)
        stopped = engine.child_pids[0] if victim == "engine" else engine.child_pids[1]
        os.kill(stopped, signal.SIGSTOP)
        stuck = await history.until(lambda change: change.status is WorkerStatus.FAILED)
        assert "not moved" in stuck.message
        assert not stuck.final
        with pytest.raises(Unavailable, match="failed"):
            engine.submit(submit(engine.next_uid()))
        await history.until(lambda change: change.status is WorkerStatus.SERVING)
        assert not alive(stopped)
        with pytest.raises(Unavailable, match="the engine was stuck, and is being started again"):
            await read(stream)


async def test_an_engine_that_moves_again_serves_again() -> None:
    async with serving(msgspec.structs.replace(CONFIG, stuck_s=2.5)) as engine:
        history = History(engine)
        incarnation = engine.incarnation
        stream = await start_long(engine)
        os.kill(engine.child_pids[1], signal.SIGSTOP)
        await history.until(lambda change: change.status is WorkerStatus.FAILED)
        os.kill(engine.child_pids[1], signal.SIGCONT)
        await history.until(lambda change: change.status is WorkerStatus.SERVING)
        assert engine.incarnation == incarnation
        await anext(stream)
        assert (await anext(stream)).token_ids, "the same request goes on"
        stream.close()


async def test_an_engine_process_that_says_nothing_gets_no_new_requests_until_it_speaks() -> None:
    """Behaviour 60: long before it counts as stuck; what runs there stays and goes on, in the same incarnation."""
    async with serving(msgspec.structs.replace(CONFIG, silent_s=2.0)) as engine:
        history = History(engine)
        incarnation = engine.incarnation
        stream = await start_long(engine)
        os.kill(engine.child_pids[0], signal.SIGSTOP)
        await until(lambda: engine.status is WorkerStatus.FAILED, "it is known to be silent")
        assert re.search(r"said nothing for \d+ s", history.changes[-1].message)
        with pytest.raises(Unavailable, match="failed"):
            engine.submit(submit(engine.next_uid()))
        os.kill(engine.child_pids[0], signal.SIGCONT)
        await until(lambda: engine.status is WorkerStatus.SERVING, "it serves again")
        assert engine.incarnation == incarnation
        await anext(stream)
        assert (await anext(stream)).token_ids, "the same request goes on"
        stream.close()


async def test_a_step_that_takes_long_is_no_silence() -> None:
    """A prefill of half a minute on a slow CPU, a compilation: the engine's loop speaks while the runner computes."""
    runner = msgspec.structs.replace(RUNNER, cost=CostModel(step_s=5.0))
    async with serving(msgspec.structs.replace(CONFIG, runner=runner, silent_s=2.0)) as engine:
        history, pauses = History(engine), Pauses(engine)
        stream = engine.submit(submit(engine.next_uid(), 6, max_new_tokens=1))
        assert len((await read(stream))[0]) == 1
        assert pauses.num_reports >= 3 or pauses.longest_s > 1.0  # two a second
        assert history.changes == [] or pauses.longest_s > 1.0


async def test_a_runner_process_that_is_stopped_gets_no_new_requests_until_it_goes_on() -> None:
    """Behaviour 60: in seconds, though a runner that only computes for long is left alone; also when nothing runs."""
    async with serving(msgspec.structs.replace(CONFIG, silent_s=2.0)) as engine:
        history = History(engine)
        incarnation = engine.incarnation
        os.kill(engine.child_pids[1], signal.SIGSTOP)
        stopped = await history.until(lambda change: "SIGSTOP" in change.message)
        assert re.search(r"the runner process has been stopped \(SIGSTOP\) for \d+ s", stopped.message)
        with pytest.raises(Unavailable, match="failed"):
            engine.submit(submit(engine.next_uid()))
        os.kill(engine.child_pids[1], signal.SIGCONT)
        await history.until(lambda change: change.status is WorkerStatus.SERVING)
        assert engine.incarnation == incarnation
        assert len((await read(engine.submit(submit(engine.next_uid(), 6, max_new_tokens=3))))[0]) == 3


async def test_an_idle_engine_is_not_taken_for_stuck() -> None:
    async with serving(msgspec.structs.replace(CONFIG, stuck_s=2.0)) as engine:
        history, pauses = History(engine), Pauses(engine)
        await pauses.reports(6)  # two a second
        assert history.changes == [] or pauses.longest_s > 1.0


async def test_signals_to_the_whole_group_leave_the_end_to_the_front() -> None:
    """Behaviour 54: on Ctrl-C or SIGTERM the front drains, so its children must still be there."""
    async with serving() as engine:
        history = History(engine)
        for signum in (signal.SIGINT, signal.SIGTERM):
            for pid in engine.child_pids:
                os.kill(pid, signum)
            tokens, _ = await read(engine.submit(submit(engine.next_uid(), 6, max_new_tokens=50)))
            assert len(tokens) == 50
        assert history.changes == []


async def test_a_model_that_cannot_be_loaded_fails_once_with_the_advice() -> None:
    runner = SimRunnerConfig(kv_tokens=17, page_size=16)
    engine = ProcessEngine(msgspec.structs.replace(CONFIG, runner=runner))
    history = History(engine)
    await engine.start()
    pids = engine.child_pids
    async with asyncio.timeout(60):
        with pytest.raises(EngineLoadError, match="kv_tokens 17 is not a multiple of page_size 16"):
            await engine.ready()
    assert history.statuses == [WorkerStatus.FAILED]
    assert history.changes[0].final
    await engine.stop()
    assert not [pid for pid in pids if alive(pid)]


async def test_a_process_that_dies_while_it_loads_is_an_error_and_not_a_loop() -> None:
    runner = msgspec.structs.replace(RUNNER, load_s=60.0)
    engine = ProcessEngine(msgspec.structs.replace(CONFIG, runner=runner))
    await engine.start()
    os.kill(engine.child_pids[1], signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(EngineLoadError, match="runner was killed by SIGKILL while it loaded"):
            await engine.ready()
    assert engine.child_pids == ()
    await engine.stop()


async def test_a_first_load_that_hangs_is_tried_again_and_given_up_in_the_end() -> None:
    """It waits and does nothing, as one whose disk does not answer."""
    runner = msgspec.structs.replace(RUNNER, load_s=100_000.0)
    engine = ProcessEngine(msgspec.structs.replace(CONFIG, runner=runner, load_still_s=1.0, max_restarts=1))
    history = History(engine)
    await engine.start()
    pids = engine.child_pids
    async with asyncio.timeout(100):
        with pytest.raises(EngineLoadError, match="the load hung: it neither computed nor read anything for 1 s"):
            await engine.ready()
    failed, loading = WorkerStatus.FAILED, WorkerStatus.LOADING
    assert history.statuses == [failed, loading, failed, failed]
    assert [change.final for change in history.changes] == [False, False, False, True]
    await engine.stop()
    assert not [pid for pid in pids if alive(pid)]


async def test_a_load_that_hangs_when_the_engine_is_started_again_is_tried_again() -> None:
    """Behaviour 60: one whose processes are stopped while it loads is LOADING for ever, if nobody looks."""
    async with serving(msgspec.structs.replace(CONFIG, load_still_s=3.0)) as engine:
        history = History(engine)
        os.kill(engine.child_pids[1], signal.SIGKILL)
        await history.until(lambda change: change.status is WorkerStatus.LOADING)
        stopped = engine.child_pids[1]
        os.kill(stopped, signal.SIGSTOP)
        hung = await history.until(lambda change: "hung" in change.message)
        assert (hung.status, hung.final) == (WorkerStatus.FAILED, False)
        await history.until(lambda change: change.status is WorkerStatus.SERVING)
        assert not alive(stopped)


async def test_stopping_while_it_loads_takes_no_longer_than_it_must() -> None:
    runner = msgspec.structs.replace(RUNNER, load_s=60.0)
    engine = ProcessEngine(msgspec.structs.replace(CONFIG, runner=runner))
    await engine.start()
    pids = engine.child_pids
    waiting = asyncio.ensure_future(engine.ready())
    async with asyncio.timeout(60):
        await engine.stop()
        with pytest.raises(EngineLoadError, match="stopped"):
            await waiting
    assert not [pid for pid in pids if alive(pid)]


async def test_an_engine_that_dies_again_and_again_is_given_up() -> None:
    async with serving(msgspec.structs.replace(CONFIG, max_restarts=1)) as engine:
        history = History(engine)
        os.kill(engine.child_pids[0], signal.SIGKILL)
        await history.until(lambda change: change.status is WorkerStatus.SERVING)
        os.kill(engine.child_pids[1], signal.SIGKILL)
        final = await history.until(lambda change: change.final)
        assert "the runner was killed by SIGKILL" in final.message
        assert engine.status is WorkerStatus.FAILED
        assert engine.child_pids == ()


FRONT = """
import asyncio, sys, msgspec
from worker.engine.config import EngineConfig
from worker.engine.process import ProcessEngine
async def main():
    engine = ProcessEngine(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    await engine.start()
    if sys.argv[2] == "ready":
        await engine.ready()
    print(*engine.child_pids, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["ready", "loading"])
async def test_children_never_outlive_a_front_that_is_killed(when: str) -> None:
    """Behaviour 61: kill -9 of the front leaves no orphan, neither when serving nor while loading."""
    runner = msgspec.structs.replace(RUNNER, load_s=0.0 if when == "ready" else 60.0)
    config = msgspec.json.encode(msgspec.structs.replace(CONFIG, runner=runner)).decode()
    front = subprocess.Popen([sys.executable, "-c", FRONT, config, when], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    with front, front.stdout:
        children = [psutil.Process(int(pid)) for pid in front.stdout.readline().split()]
        assert len(children) == 2
        front.kill()
        await until(lambda: not survivors(children), "both children have ended")


async def test_the_engine_process_has_no_torch_and_the_runner_no_spinning_threads() -> None:
    async with serving() as engine:
        engine_pid, runner_pid = engine.child_pids
        libraries = [region.path for region in psutil.Process(engine_pid).memory_maps()]
        assert any("numpy" in path for path in libraries)
        assert not any("torch" in path for path in libraries)
        environment = psutil.Process(runner_pid).environ()
        assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
        assert environment["GOMP_SPINCOUNT"] == environment["KMP_BLOCKTIME"] == "0"
        assert "secret" not in " ".join(psutil.Process(engine_pid).cmdline())
