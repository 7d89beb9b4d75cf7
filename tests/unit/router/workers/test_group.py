"""What a choice sees of the workers of one model follows every change of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from radixfleet.types import Load, WorkerStatus
from router.workers.group import Lane, ModelGroup
from router.workers.state import WorkerState
from tests.support.chains import chain
from tests.support.router_parts import CAPACITY, MODEL, Parts


def fail(worker: WorkerState, parts: Parts) -> None:
    """Three failures open the breaker of the parts' workers."""
    for _ in range(3):
        parts.clock.advance(1.0)
        worker.breaker.failure(sent_at_s=parts.clock.now(), probe=False)
    worker.changed()


def test_a_change_of_one_worker_is_seen_and_the_others_stay_as_they_are() -> None:
    parts = Parts(3)
    group = parts.group("m")
    before = list(group.view)
    parts.workers[1].book(500, number=1)
    after = list(group.view)
    assert [old is new for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert after[1].outstanding_prompt_tokens == 500
    assert group.view.columns.queued == 500


def test_an_open_breaker_is_asked_again_with_every_look() -> None:
    parts = Parts(2)
    group = parts.group("m")
    fail(parts.workers[0], parts)
    assert [view.unavailable for view in group.view] == ["breaker", ""]
    parts.clock.advance(10.0)
    assert [view.unavailable for view in group.view] == ["", ""], "no event told that its pause is over"
    parts.workers[0].breaker.acquire()
    assert [view.unavailable for view in group.view] == ["breaker", ""], "its probe is under way"


def test_a_group_made_anew_takes_its_workers_along() -> None:
    parts = Parts(2)
    old = parts.group("m")
    parts.add("late")
    fail(parts.workers[0], parts)
    new = parts.group("m")
    assert new is not old
    parts.workers[1].book(100, number=1)
    parts.clock.advance(10.0)
    assert [view.unavailable for view in new.view] == ["", "", ""]
    assert new.view.columns.queued == 100
    assert new.at(parts.workers[2].slot) is parts.workers[2]


def test_suitable_are_those_that_understand_the_tokens_and_are_not_excluded() -> None:
    parts = Parts(2)
    other = parts.add("other", model=replace(MODEL, tokenizer_fingerprint=99))
    engine = parts.add("engine", dialect="vllm")
    group = parts.group("m")

    def names(fingerprint: int | None, **wanted: object) -> list[str]:
        return [view.worker_id for view in group.suitable(300, fingerprint, **wanted)]  # type: ignore[arg-type]

    assert names(None) == ["w0", "w1", "other", "engine"]
    assert names(MODEL.tokenizer_fingerprint) == ["w0", "w1", "engine"]
    assert names(99) == ["other"]
    assert names(None, excluded=[other, parts.workers[0]]) == ["w1", "engine"]
    assert names(None, look_aside=True, excluded=[engine]) == ["w0", "w1", "other"]
    assert names(MODEL.tokenizer_fingerprint, look_aside=True) == ["w0", "w1"]


def test_those_with_a_context_long_enough_come_first() -> None:
    parts = Parts(1)
    large = replace(CAPACITY, kv_tokens=2_000_000)
    long = parts.add("long", model=replace(MODEL, max_context_tokens=1_000_000), capacity=large)
    group = parts.group("m")
    assert [view.slot for view in group.suitable(200_000, MODEL.tokenizer_fingerprint)] == [long.slot]
    assert len(group.suitable(2_000_000, MODEL.tokenizer_fingerprint)) == 2, "it fits nobody: any may say so"
    assert group.room(1_000, None) == MODEL.max_context_tokens - 1_000
    assert group.room(200_000, None) == 800_000
    assert group.room(2_000_000, None) < 1
    assert group.longest_native_context == 1_000_000


def test_those_with_a_kv_pool_large_enough_come_first() -> None:
    parts = Parts(1)
    small = parts.add("small", capacity=replace(CAPACITY, kv_tokens=1_000))
    engine = parts.add("engine", dialect="openai", capacity=replace(CAPACITY, kv_tokens=1_000))
    group = parts.group("m")
    names = [view.worker_id for view in group.suitable(2_000, MODEL.tokenizer_fingerprint)]
    assert names == ["w0", "engine"], "what an engine of that dialect can hold is assumed, not told"
    assert engine.longest_request == MODEL.max_context_tokens
    assert group.room(900, None) == 100, "wherever it goes"
    assert group.room(2_000, MODEL.tokenizer_fingerprint) == MODEL.max_context_tokens - 2_000
    assert small.longest_request == 1_000


def test_those_with_room_for_prompt_and_answer_come_before_those_with_room_for_the_prompt() -> None:
    parts = Parts(1)
    parts.add("small", capacity=replace(CAPACITY, kv_tokens=1_000))
    parts.add("tiny", capacity=replace(CAPACITY, kv_tokens=500))
    group = parts.group("m")

    def names(prompt_tokens: int, answer_tokens: int) -> list[str]:
        return [view.worker_id for view in group.suitable(prompt_tokens, None, answer_tokens=answer_tokens)]

    assert names(400, 100) == ["w0", "small", "tiny"]
    assert names(400, 600) == ["w0", "small"]
    assert names(400, 601) == ["w0"]
    assert names(600, 2_000_000) == ["w0", "small"], "nobody has room for the answer; an engine may cut it short"
    lanes = [group.lane(tokens, None, answer_tokens=answer) for tokens, answer in ((400, 100), (400, 601), (600, 9**9))]
    assert [lane.least_room for lane in lanes] == [500, MODEL.max_context_tokens, 1_000]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([100, 200, 300]),
            st.sampled_from([7, 8]),
            st.sampled_from(["native", "vllm", "openai"]),
            st.sets(st.sampled_from(["sampling.n", "sampling.seed"])),
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(
        st.tuples(
            st.sampled_from([50, 99, 100, 150, 250, 300]),
            st.sampled_from([1, 50, 51, 900]),
            st.sampled_from([None, 0, 7, 8, 9]),
            st.booleans(),
            st.frozensets(st.sampled_from(["sampling.n", "sampling.seed", "resume"])),
        ),
        min_size=2,
        max_size=6,
    ),
)
def test_the_same_lane_means_the_same_workers_and_they_are_those_that_can_take_it(
    fleet: list[tuple[int, int, str, set[str]]], requests: list[tuple[int, int, int | None, bool, frozenset[str]]]
) -> None:
    parts = Parts(0)
    for number, (context, fingerprint, dialect, lacks) in enumerate(fleet):
        model = replace(MODEL, max_context_tokens=context, tokenizer_fingerprint=fingerprint)
        parts.add(f"w{number}", model=model, dialect=dialect, lacks=frozenset(lacks))
    group = parts.group("m")
    taken: dict[Lane, list[str]] = {}
    for prompt, answer, wanted, look_aside, needs in requests:
        able = [
            worker
            for worker in parts.workers
            if worker.speaks(wanted) and (worker.is_native or not look_aside) and not (needs & worker.lacks)
        ]
        for tokens in (prompt + answer, prompt + 1, 0):
            expected = [worker.name for worker in able if worker.longest_request >= tokens]
            if expected:
                break
        suitable = group.suitable(prompt, wanted, answer_tokens=answer, look_aside=look_aside, needs=needs)
        assert [view.worker_id for view in suitable] == expected
        assert suitable.columns.slots.tolist() == [view.slot for view in suitable]
        lane = group.lane(prompt, wanted, answer_tokens=answer, look_aside=look_aside, needs=needs)
        assert taken.setdefault(lane, expected) == expected


def test_a_worker_that_drains_does_not_shorten_the_answers_of_the_others() -> None:
    parts = Parts(1)
    small = parts.add("small", capacity=replace(CAPACITY, kv_tokens=1_000))
    group = parts.group("m")
    assert group.room(900, None) == 100
    for status in (WorkerStatus.DRAINING, WorkerStatus.FAILED):
        small.status = status
        small.changed()
        assert group.room(900, None) == MODEL.max_context_tokens - 900
    parts.workers[0].status = WorkerStatus.FAILED
    parts.workers[0].changed()
    assert group.room(900, None) == 100, "one of them may come back"


def test_the_longest_context_is_that_of_workers_that_clients_may_call_and_not_known_before_all_tell() -> None:
    parts = Parts(1)
    parts.add("engine", dialect="vllm", model=replace(MODEL, max_context_tokens=1_000_000))
    assert parts.group("m").longest_native_context == MODEL.max_context_tokens
    parts.add("loading", model=replace(MODEL, max_context_tokens=0))
    assert parts.group("m").longest_native_context == 0


def test_a_group_of_nobody() -> None:
    group = ModelGroup()
    assert group.longest_native_context == 0
    assert list(group.view) == []
    assert not group.view.is_saturated(1)
    assert group.room(10, None) < 1


def test_what_a_score_reads_of_a_worker_is_what_its_view_says() -> None:
    """The figures are worked out without the view, which is made when somebody reads it."""
    parts = Parts(2)
    worker, group = parts.workers[0], parts.group("m")
    booking = worker.book(1_000, number=1)

    def drain(*, wanted: bool) -> None:
        worker.drain_wanted = wanted

    changes: list[Callable[[], object]] = [
        lambda: worker.book(500, number=2),
        lambda: worker.report(Load(waiting_requests=3, outstanding_prompt_tokens=9_000, kv_protected_tokens=2_000)),
        lambda: parts.sketch.book(worker.slot, chain("abc"), 200),
        lambda: setattr(worker, "capacity", replace(CAPACITY, kv_tokens=4_096, max_running_requests=2)),
        lambda: drain(wanted=True),
        lambda: drain(wanted=False),
        lambda: setattr(worker, "connected", False),
        lambda: setattr(worker, "connected", True),
        lambda: setattr(worker, "duplicate_of", "elsewhere"),
        lambda: setattr(worker, "duplicate_of", ""),
        lambda: fail(worker, parts),
        lambda: parts.clock.advance(10.0),
        lambda: worker.books.close(booking),
        lambda: setattr(worker, "capacity", None),
    ]
    for change in changes:
        change()
        worker.changed()
        assert worker.figures == worker.view.figures
        assert group.view[0].figures == worker.view.figures
        assert group.view.columns.place[0] == worker.figures[-1]
