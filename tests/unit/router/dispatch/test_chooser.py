from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from radixfleet.errors import Unavailable
from radixfleet.types import WorkerStatus
from radixfleet.v1 import inference_pb2
from router.dispatch.lease import Verdict
from router.dispatch.request import PreparedRequest
from tests.support.router_parts import CAPACITY, MODEL, Parts, prepared, tokens


@pytest.mark.parametrize("policy", ["min_cost", "sglang", "linear", "least_load", "round_robin"])
def test_a_burst_of_equal_prompts_is_spread(policy: str) -> None:
    """Behaviour 45: each choice is booked before the next is made, so 64 at one instant do not pile up on one worker.

    The prompts are new to the fleet, so no worker is cheaper than another but for what was booked on it.
    """
    parts = Parts(4, policy=policy)
    prompt_tokens = 640 if policy != "sglang" else 6400
    leases = [parts.chooser.choose(prepared(tokens(prompt_tokens, first=13 * n))) for n in range(64)]
    shares = Counter(lease.worker.worker_id for lease in leases)
    assert len(shares) == 4
    assert max(shares.values()) <= 2 * 64 / 4
    for lease in leases:
        lease.settle(Verdict.UNKNOWN)
    parts.check_settled()


def test_a_burst_of_the_same_prompt_overflows_to_others() -> None:
    """Behaviour 45: the first worker gets what is cheap there, until its queue costs more than a second prefill."""
    parts = Parts(4)
    leases = [parts.chooser.choose(prepared(640)) for _ in range(64)]
    shares = Counter(lease.worker.worker_id for lease in leases)
    assert len(shares) > 1
    for lease in leases:
        lease.settle(Verdict.UNKNOWN)


def test_the_reason_and_the_numbers_of_a_choice() -> None:
    parts = Parts(2)
    first = parts.chooser.choose(prepared(300))
    assert first.decision.policy == "min_cost"
    assert first.decision.reason == "load"
    first.started(0)
    first.settle(Verdict.ANSWERED)
    second = parts.chooser.choose(prepared(300))
    assert second.worker is first.worker
    assert second.decision.reason == "prefix"
    assert second.decision.predicted_cached_tokens == second.decision.reachable_cached_tokens == 256
    second.settle(Verdict.UNKNOWN)
    decisions = {
        reason: parts.metrics.registry.get_sample_value("radixfleet_router_decisions_total", {"reason": reason})
        for reason in ("load", "prefix", "spill")
    }
    assert decisions == {"load": 1, "prefix": 1, "spill": 0}


def test_what_goes_before_the_worker_begins_is_neither_predicted_nor_reachable() -> None:
    parts = Parts(1)
    kept, waits = prepared(tokens(320, first=500)), prepared(256)
    parts.sketch.set_capacity(0, 4)
    parts.sketch.apply_digest(0, 1, 0, kept.block_hashes[:4])
    begun = parts.chooser.choose(waits)
    begun.started(0)
    lease = parts.chooser.choose(kept)
    assert lease.decision.predicted_cached_tokens == lease.decision.reachable_cached_tokens == 0
    lease.started(0)
    assert lease.worker.books.own_tokens == 256 + 320
    for each in (begun, lease):
        each.settle(Verdict.ANSWERED)
    parts.check_settled()


def test_workers_that_cannot_serve_are_named_when_nobody_can() -> None:
    parts = Parts(2)
    parts.workers[0].status = WorkerStatus.LOADING
    parts.workers[1].connected = False
    for worker in parts.workers:
        worker.changed()
    with pytest.raises(Unavailable, match=r"w0: loading, w1: disconnected") as caught:
        parts.chooser.choose(prepared(300))
    assert caught.value.retry_after_s == 1.0, "a connection may be back in a moment"


@pytest.mark.parametrize(
    ("statuses", "words", "retry_after_s"),
    [
        ([WorkerStatus.LOADING, WorkerStatus.LOADING], "the model is being loaded", 5.0),
        ([WorkerStatus.LOADING, WorkerStatus.FAILED], "the model is being loaded", 5.0),
        ([WorkerStatus.FAILED, WorkerStatus.DRAINING], "is started again", 1.0),
        ([WorkerStatus.DRAINING, WorkerStatus.DRAINING], "w0: draining, w1: draining", 1.0),
    ],
)
def test_whoever_is_refused_hears_what_it_waits_for_and_when_to_ask_again(
    statuses: list[WorkerStatus], words: str, retry_after_s: float
) -> None:
    """Behaviour 60: a model that is being loaded is not there in a second; those who ask each second only cost."""
    parts = Parts(2)
    for worker, status in zip(parts.workers, statuses, strict=True):
        worker.status = status
        worker.changed()
    with pytest.raises(Unavailable, match=words) as caught:
        parts.chooser.choose(prepared(300))
    assert caught.value.retry_after_s == retry_after_s


def test_excluded_workers_are_not_chosen() -> None:
    parts = Parts(2)
    lease = parts.chooser.choose(prepared(300), excluded=[parts.workers[0]])
    assert lease.worker is parts.workers[1]
    lease.settle(Verdict.UNKNOWN)
    with pytest.raises(Unavailable):
        parts.chooser.choose(prepared(300), excluded=parts.workers)


def test_tokens_go_only_to_workers_with_the_tokenizer_that_made_them() -> None:
    parts = Parts(1)
    other = parts.add("other", model=replace(MODEL, tokenizer_fingerprint=99))
    for _ in range(8):
        assert parts.chooser.choose(prepared(300)).worker is not other
    to_other = parts.chooser.choose(prepared(300, fingerprint=None), excluded=parts.workers[:1])
    assert to_other.worker is other


def test_look_aside_requests_go_only_to_workers_of_our_own_dialect() -> None:
    """Their clients call the worker themselves; a request that the router translates may go to any."""
    parts = Parts(1)
    engine = parts.add("engine", dialect="vllm")
    direct = prepared(300, look_aside=True)
    for _ in range(8):
        assert parts.chooser.choose(direct).worker is parts.workers[0]
    assert parts.chooser.choose(prepared(300)).worker is engine
    assert parts.chooser.choose(prepared(300, look_aside=True, fingerprint=None)).worker is parts.workers[0]


def test_look_aside_requests_do_not_count_on_the_places_of_other_engines() -> None:
    parts = Parts(1)
    parts.add("engine", dialect="sglang")
    parts.workers[0].capacity = replace(CAPACITY, max_running_requests=1)
    parts.workers[0].changed()
    assert parts.chooser.choose_unless_saturated(prepared(300, look_aside=True)) is not None
    assert parts.chooser.choose_unless_saturated(prepared(300, look_aside=True)) is None
    assert parts.chooser.choose_unless_saturated(prepared(300)) is not None


def test_look_aside_without_a_worker_of_our_own_says_what_to_do() -> None:
    parts = Parts(0)
    parts.add("engine", dialect="vllm")
    with pytest.raises(Unavailable, match=r"other dialects.*send the request to the router"):
        parts.chooser.choose(prepared(300, look_aside=True))
    parts.workers[0].facts = replace(parts.workers[0].facts, dialect="native")  # type: ignore[type-var]
    parts.workers[0].connected = False
    parts.workers[0].changed()
    with pytest.raises(Unavailable, match="engine: disconnected"):
        parts.chooser.choose(prepared(300, look_aside=True))


def test_a_prompt_too_long_for_some_workers_goes_to_another() -> None:
    parts = Parts(1)
    large = replace(CAPACITY, kv_tokens=2_000_000)
    long = parts.add("long", model=replace(MODEL, max_context_tokens=1_000_000), capacity=large)
    parts.workers[0].facts = replace(parts.workers[0].facts, model=replace(MODEL, max_context_tokens=300))  # type: ignore[type-var]
    for _ in range(8):
        assert parts.chooser.choose(prepared(300)).worker is long
    # Too long for all: any worker says so with the numbers.
    parts.chooser.choose(prepared(tokens(2_000_000)))


def test_an_answer_too_long_for_some_workers_goes_to_another() -> None:
    parts = Parts(1)
    small = parts.add("small", capacity=replace(CAPACITY, kv_tokens=1_000))

    def limited(most: int, generated: int = 0) -> PreparedRequest:
        message = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(max_new_tokens=most))
        request = prepared(300, message=message)
        return request.continued(tokens(generated)) if generated else request

    assert {parts.chooser.choose(limited(701)).worker for _ in range(8)} == {parts.workers[0]}
    assert {parts.chooser.choose(limited(701, generated=200)).worker for _ in range(8)} == {parts.workers[0]}
    assert small in {parts.chooser.choose(limited(700)).worker for _ in range(8)}
    assert small in {parts.chooser.choose(limited(700, generated=200)).worker for _ in range(8)}
    reasons = {report.worker: report.ineligible_reason for report in parts.chooser.explain(limited(701)).candidates}
    assert reasons[small] == "context or KV pool too small"


def test_an_explanation_changes_nothing_and_foretells_the_choice() -> None:
    parts = Parts(3, policy="random")
    for _ in range(10):
        explained = [parts.chooser.explain(prepared(300)).worker for _ in range(3)]
        lease = parts.chooser.choose(prepared(300))
        assert explained == [lease.worker] * 3
        lease.settle(Verdict.UNKNOWN)
    assert parts.sketch.num_blocks == 0
    parts.check_settled()


def test_an_explanation_tells_of_every_worker_of_the_model() -> None:
    parts = Parts(2)
    lease = parts.chooser.choose(prepared(300))
    lease.started(0)
    parts.add("other", model=replace(MODEL, tokenizer_fingerprint=99))
    draining = parts.add("draining")
    draining.status = WorkerStatus.DRAINING
    draining.changed()
    explanation = parts.chooser.explain(prepared(300))
    reports = {report.worker.worker_id: report for report in explanation.candidates}
    assert {name: report.ineligible_reason for name, report in reports.items()} == {
        "w0": "",
        "w1": "",
        "other": "another tokenizer",
        "draining": "draining",
    }
    assert reports[lease.worker.worker_id].matched_blocks == 4
    assert reports[lease.worker.worker_id].matched_tokens == 256
    assert reports["draining"].cost is None
    assert explanation.worker is not None
    costs = {report.worker.worker_id: report.cost for report in explanation.candidates if report.cost is not None}
    assert costs[explanation.worker.worker_id] == min(costs.values())
    lease.settle(Verdict.UNKNOWN)


def test_a_breaker_that_is_open_keeps_requests_away_and_lets_one_probe_through() -> None:
    """Behaviour 52: an unhealthy worker does not distort the choice among healthy ones."""
    parts = Parts(2)
    sick, healthy = parts.workers
    for _ in range(3):
        parts.clock.advance(1.0)
        lease = parts.chooser.choose(prepared(300), excluded=[healthy])
        parts.clock.advance(1.0)
        lease.settle(Verdict.FAILED)
    assert all(parts.chooser.choose(prepared(64 * n)).worker is healthy for n in range(1, 20))
    parts.clock.advance(10.0)
    chosen = [parts.chooser.choose(prepared(tokens(64, first=n))) for n in range(20)]
    assert sum(lease.worker is sick for lease in chosen) == 1
    probe = next(lease for lease in chosen if lease.worker is sick)
    probe.started(0)
    assert sick.breaker.admits
