from __future__ import annotations

import select
import threading

import pytest
from structlog.testing import capture_logs

from radixfleet.types import Grammar
from tests.support.grammars import regex
from worker.core.step import Compile, Compiled
from worker.engine.preparation import Preparation


def readable(preparation: Preparation, timeout_ms: int = 5_000) -> bool:
    poller = select.poll()
    poller.register(preparation, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def test_answers_come_in_the_order_of_the_orders_and_wake_who_waits() -> None:
    asked: list[str] = []

    def compile_grammar(grammar: Grammar) -> str:
        asked.append(grammar.source)
        return "" if grammar.source == "a" else "no"

    with Preparation(compile_grammar) as preparation:
        assert not readable(preparation, 0)
        assert preparation.take() == []
        preparation.begin(Compile(1, regex("a")))
        preparation.begin(Compile(2, regex("b")))
        answers: list[Compiled] = []
        while len(answers) < 2:
            assert readable(preparation)
            answers += preparation.take()
        assert answers == [Compiled(1, ""), Compiled(2, "no")]
        assert asked == ["a", "b"]
        assert not readable(preparation, 0)


def test_an_answer_that_was_taken_leaves_no_wakeup() -> None:
    with Preparation(lambda _: "") as preparation:
        for number in range(300):
            preparation.begin(Compile(number, regex("a")))
            while not preparation.take():  # as early as can be: between the answer and its wakeup, were they two things
                pass
            assert not readable(preparation, 0)


def test_work_is_done_beside_the_caller() -> None:
    """Behaviour 59, of grammars: who asks goes on at once."""
    gate = threading.Event()
    with Preparation(lambda _: str(gate.wait(60))) as preparation:
        preparation.begin(Compile(1, regex("a")))
        assert preparation.take() == []
        gate.set()
        assert readable(preparation)
        assert preparation.take() == [Compiled(1, "True")]


def test_a_crash_of_the_compiler_is_an_answer_and_is_logged() -> None:
    def crash(_: Grammar) -> str:
        raise RuntimeError("boom")

    with capture_logs() as logs, Preparation(crash) as preparation:
        preparation.begin(Compile(7, regex("a")))
        assert readable(preparation)
        assert preparation.take() == [Compiled(7, "it could not be compiled")]
    assert [entry["log_level"] for entry in logs] == ["error"]


@pytest.mark.parametrize("num_orders", [0, 3])
def test_leaving_drops_what_has_not_begun(num_orders: int) -> None:
    gate, began = threading.Event(), threading.Event()
    done: list[str] = []

    def compile_grammar(grammar: Grammar) -> str:
        began.set()
        gate.wait(60)
        done.append(grammar.source)
        return ""

    with Preparation(compile_grammar) as preparation:
        for number in range(num_orders):
            preparation.begin(Compile(number, regex(str(number))))
        if num_orders:
            assert began.wait(60)
        threading.Timer(0.05, gate.set).start()
    assert done == ["0"][:num_orders]
