"""Random traffic on a device that runs out of memory again and again, in steps of every kind."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from radixfleet.types import FinishReason
from tests.support.memory_faults import Unsteady
from tests.support.sim_worker import SimWorker, make_submit

_VOCAB = 6
_SHARED = np.array([1, 2, 3, 4, 5, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] * 3, dtype=np.int32)


def submit_one(worker: SimWorker, uid: int, random: np.random.Generator) -> None:
    own = random.integers(0, _VOCAB, random.integers(1, 9))
    worker.submit(
        make_submit(
            uid,
            np.concatenate([_SHARED[: random.integers(0, 49)], own]),
            int(random.integers(1, 40)),
            stop_token_ids=((), (0,))[int(random.random() < 0.5)],
            namespace=("m", str(random.integers(0, 2))),
            temperature=float(random.random() < 0.5),
            seed=uid,
            min_new_tokens=int(random.integers(0, 4)),
        )
    )


def run_until(worker: SimWorker, faults: Unsteady, in_flight: int, random: np.random.Generator) -> None:
    """Submit and abort while shortages are left to inject; every invariant is checked after each step."""
    uid = 0
    while faults.left:
        if len(worker.scheduler.running_uids) < 6 and random.random() < 0.5:
            uid += 1
            submit_one(worker, uid, random)
        if random.random() < 0.01 and uid:
            worker.abort(int(random.integers(max(1, uid - 8), uid + 1)))
        worker.step(in_flight=in_flight)
        worker.scheduler.check()
    worker.run(in_flight=in_flight)
    worker.assert_idle()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_shortages_lose_no_page_no_token_and_no_answer() -> None:
    """Behaviours 8, 9, 10, 62: every invariant holds after each step, every request has one outcome, and whoever was
    served has the tokens of a run that nothing interrupted. Pages are short as well, so requests are also retracted.

    25 workers of random sizes, 40 shortages each.
    """
    random = np.random.default_rng(62)
    totals: Counter[str] = Counter()
    for seed in range(25):
        page_size = int(random.choice([1, 2, 4, 16]))
        worker = SimWorker(
            num_pages=128 // page_size + 2,
            page_size=page_size,
            max_running=int(random.integers(2, 9)),
            chunk=int(random.choice([3, 8, 24, 64])),
            vocab_size=_VOCAB,
            order="lpm",
            shared_prefix_tokens=16,
            check_each_act=False,
        )
        for _ in range(60):  # as if many requests had ended early: admission counts on little growth
            worker.scheduler._admission.growth_share.ended(0.0)
        faults = worker.runner.faults.out_of_memory = Unsteady(seed, most=40)
        run_until(worker, faults, in_flight=1 + seed % 2, random=random)
        for uid, told in worker.told.items():
            worker.assert_tokens(uid)
            assert told.ended is not None
            totals[str(told.ended.reason or told.ended.code)] += 1
            assert told.ended.reason is not None or "memory" in told.ended.message or "KV pool" in told.ended.message
        totals.update({name: int(count) for name, count in worker.scheduler.counters.as_dict().items()})
    injected = [totals[f"out_of_memory_{stage}"] for stage in ("prefill", "decode", "sampling")]
    assert sum(injected) == 1_000
    assert min(injected) > 30
    assert totals[FinishReason.STOP] + totals[FinishReason.LENGTH] > 100
    assert totals["RESOURCE_EXHAUSTED"] == totals["failed_requests"] < 20
    assert totals["retractions"] > 10
