"""The generated workloads: sizes, sharing, reproducibility."""

import numpy as np
import pytest

from loadtest.workloads import SharedPrefix

UNIFORM = SharedPrefix(num_groups=4, prompts_per_group=5, prefix_tokens=32, unique_tokens=8, max_new_tokens=3)


def test_every_group_has_its_prompts_and_they_share_exactly_the_prefix():
    arrivals = UNIFORM.arrivals(vocab_size=1000, seed=1)
    by_group = {group: [a.token_ids for a in arrivals if a.group == group] for group in range(4)}
    assert [len(prompts) for prompts in by_group.values()] == [5, 5, 5, 5]
    for prompts in by_group.values():
        assert len({prompt[:32].tobytes() for prompt in prompts}) == 1
        assert len({prompt[32:].tobytes() for prompt in prompts}) == 5
    assert len({prompts[0][:32].tobytes() for prompts in by_group.values()}) == 4
    assert all(prompt.dtype == np.uint32 and len(prompt) == 40 for prompts in by_group.values() for prompt in prompts)


def test_the_same_seed_gives_the_same_workload_and_another_seed_another():
    def fingerprint(seed: int) -> list[bytes]:
        return [arrival.token_ids.tobytes() for arrival in UNIFORM.arrivals(vocab_size=1000, seed=seed)]

    assert fingerprint(7) == fingerprint(7)
    assert fingerprint(7) != fingerprint(8)


def test_requests_are_shuffled_over_the_groups():
    groups = [arrival.group for arrival in UNIFORM.arrivals(vocab_size=1000, seed=1)]
    assert groups != sorted(groups)


def test_the_ceiling_counts_each_prefix_once():
    arrivals = UNIFORM.arrivals(vocab_size=1000, seed=1)
    assert UNIFORM.ceiling(arrivals) == pytest.approx(16 * 32 / (20 * 40))
    assert UNIFORM.ceiling([]) == 0.0


def test_zipf_prefers_the_first_groups():
    workload = SharedPrefix(
        num_groups=10, prompts_per_group=100, prefix_tokens=4, unique_tokens=1, max_new_tokens=1, zipf=1.2
    )
    counts = np.bincount([arrival.group for arrival in workload.arrivals(vocab_size=50, seed=3)], minlength=10)
    assert counts.sum() == 1000
    assert counts[0] > 3 * counts[4] > 0


def test_poisson_arrivals_are_in_order_and_keep_the_rate():
    workload = SharedPrefix(
        num_groups=2, prompts_per_group=1000, prefix_tokens=1, unique_tokens=1, max_new_tokens=1, requests_per_s=50.0
    )
    times = [arrival.at_s for arrival in workload.arrivals(vocab_size=50, seed=3)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000 / 50, rel=0.1)
