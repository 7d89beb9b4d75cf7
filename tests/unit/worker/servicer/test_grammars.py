"""Trying grammars in a process of their own, and remembering what came of it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from radixfleet.clock import ManualClock, MonotonicClock
from radixfleet.errors import InvalidRequest, Overloaded, Unavailable
from radixfleet.text import TokenizerSpec
from radixfleet.types import Grammar, GrammarKind
from tests.support.fake_engine import FakeEngine
from tests.support.grammars import PERSON, regex, schema
from tests.support.tiny_model import tiny_model
from tests.support.waiting import until
from worker.core.messages import Prepare, Prepared
from worker.model.tokenizer_files import load_tokenizer_spec
from worker.servicer import grammar_checker
from worker.servicer.grammar_checker import GrammarChecker
from worker.servicer.grammars import Grammars

ENDLESS = schema({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 30)]})
"""What llguidance cannot compile within minutes."""


@pytest.fixture(scope="module")
def spec() -> TokenizerSpec:
    return load_tokenizer_spec(tiny_model())


@pytest.fixture
async def checker(spec: TokenizerSpec) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(spec, MonotonicClock())
    yield checker
    await checker.close()


class Answering(FakeEngine):
    """Ready, and answers Prepare with `refusal`."""

    def __init__(self, refusal: str = "") -> None:
        super().__init__()
        self.refusal = refusal
        self.become_ready()

    def _send(self, message: object) -> None:
        super()._send(message)
        if isinstance(message, Prepare):
            self._hear(Prepared(message.ticket, self.refusal))

    @property
    def prepared(self) -> list[Grammar]:
        return [message.grammar for message in self.heard if isinstance(message, Prepare)]


class Counting(GrammarChecker):
    """Says `verdicts` by source, and counts; waits for `gate`."""

    def __init__(self, verdicts: dict[str, str] | None = None) -> None:
        self.verdicts = verdicts or {}
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def why_not(self, grammar: Grammar) -> str:
        self.asked.append(grammar.source)
        await self.gate.wait()
        return self.verdicts.get(grammar.source, "")

    async def close(self) -> None:
        """Nothing runs."""


async def test_good_and_bad_grammars_are_told_apart(checker: GrammarChecker) -> None:
    assert await checker.why_not(schema(PERSON)) == ""
    assert "unclosed group" in await checker.why_not(regex("a("))
    assert await checker.why_not(Grammar(GrammarKind.JSON_OBJECT, "")) == ""


async def test_a_schema_that_nothing_satisfies_is_refused_in_plain_words(checker: GrammarChecker) -> None:
    assert (await checker.why_not(schema({"$ref": "#"}))).startswith("no answer can keep to it")


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
async def test_a_large_grammar_that_is_wrong_is_refused_in_few_words_and_the_next_one_served(
    checker: GrammarChecker, kind: str
) -> None:
    """However much of it the compiler repeats; no answer is taken for that to another grammar."""
    long = "a" * 200_000
    wrong = regex(f"{long}(") if kind == "regex" else schema({"type": long})
    refusals = [await checker.why_not(wrong) for _ in range(2)]
    assert [refusal.rpartition("aaa")[2] for refusal in refusals] == [" ..."] * 2
    assert max(map(len, refusals)) < 600
    assert await checker.why_not(regex("a+")) == ""


async def test_what_takes_too_long_is_ended_and_the_next_one_is_served(spec: TokenizerSpec) -> None:
    """Behaviour 59, of grammars: bounded in time, whatever llguidance's own limits are."""
    checker = GrammarChecker(spec, MonotonicClock(), try_s=1.0)
    try:
        assert await checker.why_not(regex("a+")) == ""
        process = checker._process
        assert await checker.why_not(ENDLESS) == "compiling it takes longer than 1 s"
        assert process is not None
        assert process.returncode is not None
        assert await checker.why_not(regex("b+")) == ""
    finally:
        await checker.close()


async def test_a_process_that_gets_no_cpu_is_waited_for(spec: TokenizerSpec) -> None:
    """How busy the machine is says nothing of a grammar, and would be remembered."""
    checker = GrammarChecker(spec, MonotonicClock(), try_s=0.5)
    try:
        assert await checker.why_not(regex("a+")) == ""
        assert checker._process is not None
        os.kill(checker._process.pid, signal.SIGSTOP)
        trying = asyncio.create_task(checker.why_not(regex("b+")))
        await asyncio.wait([trying], timeout=1.0)
        os.kill(checker._process.pid, signal.SIGCONT)
        assert await trying == ""
    finally:
        await checker.close()


async def test_the_start_of_the_process_takes_none_of_the_time_for_a_grammar(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 50 s by the loop's clock, of 60."""
    loop, late_s = asyncio.get_running_loop(), 0.0
    now, answer = loop.time, grammar_checker._answer
    monkeypatch.setattr(loop, "time", lambda: now() + late_s)

    async def answer_late(process: Process, grammar: Grammar) -> str | None:
        nonlocal late_s
        late_s += 50.0
        return await answer(process, grammar)

    class StartsLate(GrammarChecker):
        async def _running(self) -> Process:
            nonlocal late_s
            late_s += 50.0
            return await super()._running()

    monkeypatch.setattr(grammar_checker, "_answer", answer_late)
    checker = StartsLate(spec, MonotonicClock(), wall_s=60.0)
    try:
        assert await checker.why_not(regex("a+")) == ""
        assert late_s == 100.0, "at once, by the only process"
    finally:
        await checker.close()


async def test_a_process_that_is_stopped_is_replaced(spec: TokenizerSpec) -> None:
    clock = ManualClock()
    checker = GrammarChecker(spec, clock)
    try:
        assert await checker.why_not(regex("a+")) == ""
        assert checker._process is not None
        os.kill(checker._process.pid, signal.SIGSTOP)
        checker._wall_s = 0.2
        with pytest.raises(Unavailable) as refused:
            await checker.why_not(regex("b+"))
        checker._wall_s = 60.0
        clock.advance(refused.value.retry_after_s or 0.0)
        assert await checker.why_not(regex("b+")) == ""
    finally:
        await checker.close()


async def test_a_killed_process_says_nothing_of_a_grammar(checker: GrammarChecker) -> None:
    """Before it has been asked, and while it tries: by the OOM killer, say."""
    assert await checker.why_not(regex("a+")) == ""
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    assert await checker.why_not(regex("b+")) == ""
    trying = asyncio.create_task(checker.why_not(schema(PERSON)))
    await asyncio.sleep(0)
    os.kill(checker._process.pid, signal.SIGKILL)
    assert await trying == ""


@pytest.fixture
def gated() -> tuple[Counting, Grammars]:
    """Nothing is tried to its end until the gate is opened."""
    checker = Counting()
    checker.gate.clear()
    return checker, Grammars(Answering(), checker)


async def test_a_small_grammar_passes_large_ones_and_a_large_one_gets_its_turn(
    gated: tuple[Counting, Grammars],
) -> None:
    checker, grammars = gated
    sources = ["a" * 50, "a" * 40, "a" * 30, *"bcdef"]
    asking = [asyncio.create_task(grammars.admit(regex(source))) for source in sources]
    await until(lambda: checker.asked)
    checker.gate.set()
    await asyncio.gather(*asking)
    assert checker.asked == ["a" * 50, "b", "c", "d", "a" * 40, "e", "f", "a" * 30]


async def test_what_nobody_waits_for_any_more_is_not_tried_and_takes_no_place(
    gated: tuple[Counting, Grammars],
) -> None:
    checker, grammars = gated
    leaving = [asyncio.create_task(grammars.admit(regex(str(number)))) for number in range(32)]
    await until(lambda: checker.asked == ["0"])
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    behind = asyncio.create_task(grammars.admit(regex("behind")))
    checker.gate.set()
    await behind
    assert checker.asked == ["0", "behind"]


async def test_a_try_that_has_begun_serves_who_asks_after_the_others_left(gated: tuple[Counting, Grammars]) -> None:
    checker, grammars = gated
    for _ in range(2):
        leaving = asyncio.create_task(grammars.admit(regex("a")))
        await until(lambda: checker.asked)
        leaving.cancel()
        await asyncio.wait([leaving])
    checker.gate.set()
    await grammars.admit(regex("b"))
    await grammars.admit(regex("a"))
    assert checker.asked == ["a", "b"]


async def test_each_grammar_is_tried_and_prepared_once() -> None:
    engine, checker = Answering(), Counting({"bad": "it is bad"})
    grammars = Grammars(engine, checker)
    for _ in range(3):
        await grammars.admit(regex("a"))
        with pytest.raises(InvalidRequest, match="it is bad") as caught:
            await grammars.admit(regex("bad"))
        assert caught.value.field == "sampling.grammar.regex"
    assert checker.asked == ["a", "bad"]
    assert engine.prepared == [regex("a")]


async def test_a_new_engine_is_asked_again() -> None:
    engine, checker = Answering(), Counting()
    grammars = Grammars(engine, checker)
    await grammars.admit(regex("a"))
    engine.crash()
    with pytest.raises(Unavailable):
        await grammars.admit(regex("a"))
    engine.become_ready()
    await grammars.admit(regex("a"))
    assert checker.asked == ["a"]
    assert engine.prepared == [regex("a")] * 2


async def test_a_refusal_of_the_runner_is_one_too() -> None:
    grammars = Grammars(Answering("no grammars here"), None)
    with pytest.raises(InvalidRequest, match="no grammars here"):
        await grammars.admit(schema({}))


async def test_what_was_not_used_for_long_is_forgotten() -> None:
    engine, checker = Answering(), Counting()
    grammars = Grammars(engine, checker)
    for number in range(40):
        await grammars.admit(regex(str(number)))
    await grammars.admit(regex("39"))
    await grammars.admit(regex("0"))
    assert checker.asked == [*map(str, range(40)), "0"]


async def test_many_who_ask_for_the_same_wait_for_one_try_and_too_many_new_ones_are_turned_away() -> None:
    checker = Counting()
    checker.gate.clear()
    grammars = Grammars(Answering(), checker)
    same = [asyncio.create_task(grammars.admit(regex("same"))) for _ in range(5)]
    others = [asyncio.create_task(grammars.admit(regex(str(number)))) for number in range(31)]
    await until(lambda: checker.asked)
    with pytest.raises(Overloaded):
        await grammars.admit(regex("one more"))
    checker.gate.set()
    await asyncio.gather(*same, *others)
    assert checker.asked.count("same") == 1


async def test_nobody_waits_for_long_behind_a_try_that_hangs_and_its_end_is_remembered() -> None:
    checker = Counting()
    checker.gate.clear()
    grammars = Grammars(Answering(), checker, longest_wait_s=0.05)
    for refused in await asyncio.gather(*map(grammars.admit, map(regex, "ab")), return_exceptions=True):
        assert isinstance(refused, Overloaded)
        assert refused.retry_after_s
    checker.gate.set()
    await until(lambda: grammars._queue._trying is None)
    await grammars.admit(regex("a"))
    assert checker.asked == ["a"], "b was asked for by nobody any more"


@pytest.fixture
def break_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Make the process that tries grammars run a line of shell instead; without one, there is no such program."""

    def break_it(line: str) -> None:
        broken = tmp_path / "python"
        if line:
            broken.write_text(f"#!/bin/sh\n{line}\n")
            broken.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(broken))

    return break_it


@pytest.mark.parametrize(
    "line",
    ["exit 1", "exec sleep 60", "echo ready; exec sleep 60", "echo ready; read it; read it; kill -9 $$", ""],
)
async def test_a_process_that_does_not_start_or_answer_is_no_fault_of_a_grammar(
    break_python: Callable[[str], None], spec: TokenizerSpec, line: str
) -> None:
    """Nobody waits for another one until it has rested, and the grammar is not taken for a bad one."""
    clock, python = ManualClock(), sys.executable
    checker = GrammarChecker(spec, clock, wall_s=0.2 if "sleep" in line else 60.0)
    grammars = Grammars(Answering(), checker)
    try:
        break_python(line)
        first, second = await asyncio.gather(*map(grammars.admit, map(regex, "ab")), return_exceptions=True)
        assert isinstance(first, Unavailable)
        assert isinstance(second, Unavailable)
        assert (first.__cause__ is not None, second.__cause__) == (True, None), "one attempt for both"
        sys.executable = python
        with pytest.raises(Unavailable):
            await grammars.admit(regex("a"))
        clock.advance(first.retry_after_s or 0.0)
        checker._wall_s = 60.0
        await grammars.admit(regex("a"))
    finally:
        await checker.close()


@pytest.mark.parametrize(("line", "tries"), [("exec sleep 60", 1), ("echo ready; exec sleep 60", 1), ("exit 1", 2)])
async def test_a_process_that_hangs_is_not_waited_for_twice(
    break_python: Callable[[str], None], spec: TokenizerSpec, line: str, tries: int
) -> None:
    """The next one is as likely to get no CPU, and no other grammar is tried meanwhile."""
    asked: list[Grammar] = []

    class Noting(GrammarChecker):
        async def _ask(self, grammar: Grammar) -> str:
            asked.append(grammar)
            return await super()._ask(grammar)

    break_python(line)
    checker = Noting(spec, ManualClock(), wall_s=0.2 if "sleep" in line else 60.0)
    with pytest.raises(Unavailable):
        await checker.why_not(regex("a"))
    assert len(asked) == tries


async def test_a_grammar_that_gets_its_processes_killed_waits_longer_than_the_others(
    break_python: Callable[[str], None], spec: TokenizerSpec
) -> None:
    """By the OOM killer, say: who tries it again and again would keep everybody else's from being tried."""
    clock, python = ManualClock(), sys.executable
    checker = GrammarChecker(spec, clock)
    try:
        break_python("echo ready; read it; read it; kill -9 $$")
        with pytest.raises(Unavailable) as refused:
            await checker.why_not(regex("a"))
        assert refused.value.retry_after_s == 60.0
        sys.executable = python
        clock.advance(10.0)
        assert await checker.why_not(regex("b")) == ""
        with pytest.raises(Unavailable) as refused:
            await checker.why_not(regex("a"))
        assert (refused.value.retry_after_s, refused.value.__cause__) == (50.0, None)
        clock.advance(50.0)
        assert await checker.why_not(regex("a")) == ""
    finally:
        await checker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere its memory is not limited")
async def test_a_grammar_that_needs_too_much_memory_is_refused_for_good(
    break_python: Callable[[str], None], checker: GrammarChecker
) -> None:
    """The process ends by a limit of its own, before the OOM killer has to end it, which would say nothing."""
    greedy = (
        "import worker.servicer.grammar_check as it; it.why_not = lambda *_: str(len(bytearray(1 << 30))); it.main()"
    )
    python = sys.executable
    break_python(f"exec {python} -P -c '{greedy}' $4 $5")
    grammars = Grammars(Answering(), checker)
    with pytest.raises(InvalidRequest, match="too large"):
        await grammars.admit(regex("a"))
    sys.executable = python
    with pytest.raises(InvalidRequest, match="too large"):
        await grammars.admit(regex("a"))
    await grammars.admit(regex("b"))


async def test_a_failure_that_nobody_waits_for_any_more_leaves_no_complaint(
    break_python: Callable[[str], None], spec: TokenizerSpec
) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    break_python("exit 1")
    grammars = Grammars(Answering(), GrammarChecker(spec, ManualClock()))
    leaving = asyncio.create_task(grammars.admit(regex("a")))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    del leaving
    await until(lambda: grammars._queue._trying is None)
    gc.collect()
    assert not complaints
