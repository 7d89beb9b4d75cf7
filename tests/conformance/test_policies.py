"""What every routing policy must do, whatever it optimises."""

from __future__ import annotations

from random import Random

import pytest

from radixfleet.types import WorkerStatus
from router.policies import DEFAULT_POLICY, POLICY_NAMES, Policy, make_policy
from router.view import WorkerView
from tests.support.lab_fleet import fleet, requests_by_worker, run, shared
from tests.support.views import request, worker


@pytest.fixture(params=POLICY_NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param)


def random_worker(slot: int, random: Random) -> WorkerView:
    return worker(
        slot,
        running=random.randrange(100),
        waiting=random.choice([0, 0, random.randrange(30)]),
        queued_tokens=random.randrange(20_000),
        max_running=random.choice([0, 64]),
        kv_tokens=100_000,
        kv_protected=random.randrange(100_001),
        sketch_blocks=random.randrange(1_500),
        last_booking=random.randrange(1_000),
        status=random.choice([WorkerStatus.SERVING] * 3 + list(WorkerStatus)),
        connected=random.random() < 0.9,
        breaker_open=random.random() < 0.1,
    )


def test_is_called_what_it_was_asked_for(policy: Policy) -> None:
    assert make_policy(policy.name).name == policy.name


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="min_cost, sglang"):
        make_policy("cache_aware")
    assert DEFAULT_POLICY == "min_cost"


@pytest.mark.parametrize("seed", range(60))
def test_chooses_among_the_eligible_alone(policy: Policy, seed: int) -> None:
    random = Random(seed)
    workers = [random_worker(slot, random) for slot in range(random.randrange(9))]
    view = request(random.randrange(1, 30_000), [random.randrange(500) for _ in range(9)], prefix=seed)
    ranking = policy.rank(view, workers, random)
    serving = {w.slot for w in workers if not w.unavailable}
    assert set(ranking.costs) == serving
    if serving:
        assert ranking.slot in ranking.costs
        assert ranking.order[0] == ranking.slot
        assert (ranking.reason == "only") == (len(ranking.costs) == 1)
    else:
        assert ranking.slot is None
        assert ranking.reason == "none"


def test_nobody_there(policy: Policy) -> None:
    assert policy.rank(request(), [], Random(0)).slot is None


@pytest.mark.parametrize("prompt_tokens", [1, 63, 64, 65, 200_000])
def test_a_single_worker_gets_everything(policy: Policy, prompt_tokens: int) -> None:
    view = request(prompt_tokens, [0] * 8)
    ranking = policy.rank(view, [worker(7, running=500, queued_tokens=10**7, max_running=8)], Random(0))
    assert (ranking.slot, ranking.reason) == (7, "only")


def test_equal_workers_all_get_traffic(policy: Policy) -> None:
    """Behaviour 48: nobody starves."""
    arrivals = shared(groups=60, per_group=4, prefix=512, own=128, new=16, rate=60.0)
    shares = requests_by_worker(run(arrivals, fleet(6), policy.name))
    assert min(shares) >= 10, shares


def test_the_same_randomness_gives_the_same_choice(policy: Policy) -> None:
    workers = [worker(slot) for slot in range(8)]
    for seed in range(20):
        first = policy.rank(request(prefix=seed), workers, Random(seed))
        second = policy.rank(request(prefix=seed), workers, Random(seed))
        assert (first.slot, first.reason, dict(first.costs)) == (second.slot, second.reason, dict(second.costs))


@pytest.mark.parametrize("unhealthy", [{"connected": False}, {"breaker_open": True}, {"status": WorkerStatus.FAILED}])
def test_an_unhealthy_worker_distorts_nothing(policy: Policy, unhealthy: dict[str, object]) -> None:
    """Behaviour 52: the choice among the healthy is the same with and without it, however tempting or loaded it is."""
    for seed in range(40):
        random = Random(seed)
        healthy = [worker(s, running=random.randrange(99), queued_tokens=random.randrange(9_999)) for s in range(4)]
        view = request(5_000, [random.randrange(60) for _ in range(4)] + [78], prefix=seed)
        for running in (0, 1_000):
            sick = worker(4, running=running, **unhealthy)  # type: ignore[arg-type]
            with_it = policy.rank(view, [*healthy[:2], sick, *healthy[2:]], Random(seed))
            without = policy.rank(view, healthy, Random(seed))
            assert (with_it.slot, with_it.reason, dict(with_it.costs)) == (
                without.slot,
                without.reason,
                dict(without.costs),
            )


def test_serves_a_workload_to_its_end_with_receipts_alone(policy: Policy) -> None:
    arrivals = shared(groups=8, per_group=12, prefix=384, own=20, new=16, rate=None)
    result = run(arrivals, fleet(4, kv_tokens=1_536), policy.name, truth="receipts")
    assert [outcome.is_complete for outcome in result.outcomes] == [True] * 96


def test_short_prompts_spread(policy: Policy) -> None:
    """Prompts of less than one block have no hash to go by."""
    shares = requests_by_worker(
        run(shared(groups=1, per_group=100, prefix=0, own=5, new=32, rate=100.0), policy=policy.name)
    )
    assert min(shares) >= 10, shares
