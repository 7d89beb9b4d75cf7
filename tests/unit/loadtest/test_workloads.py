"""The generated workloads: sizes, sharing, ceilings, reproducibility."""

from itertools import pairwise

import numpy as np
import pytest

from loadtest.tokens import Run, TokenSource
from loadtest.workloads import (
    Arrival,
    Chats,
    SharedPrefix,
    SiblingBursts,
    Workload,
    ceiling,
    reusable_tokens,
    scaled,
)

UNIFORM = SharedPrefix(num_groups=4, prompts_per_group=5, prefix_tokens=32, unique_tokens=8, max_new_tokens=3)
BURSTS = SiblingBursts(num_bursts=5, siblings=3, prefix_tokens=32, unique_tokens=8, max_new_tokens=3, bursts_per_s=2.0)
CHATS = Chats(
    num_chats=20,
    turns=4,
    num_systems=2,
    system_tokens=16,
    user_tokens=10,
    answer_tokens=12,
    think_s=5.0,
    chats_per_s=1.0,
)
SOURCE = TokenSource(1000, 0)


def by_first_run(arrivals: list[Arrival]) -> dict[int, list[Arrival]]:
    groups: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        groups.setdefault(arrival.runs[0].name, []).append(arrival)
    return groups


@pytest.mark.parametrize("workload", [UNIFORM, BURSTS, CHATS])
def test_the_same_seed_gives_the_same_workload_and_another_seed_another(workload: Workload):
    def fingerprint(seed: int) -> list[tuple[float, bytes, bytes]]:
        arrivals = workload.arrivals(vocab_size=1000, seed=seed)
        return [(each.at_s, each.token_ids.tobytes(), each.answer_ids.tobytes()) for each in arrivals]

    assert fingerprint(7) == fingerprint(7)
    assert fingerprint(7) != fingerprint(8)


@pytest.mark.parametrize("workload", [UNIFORM, BURSTS, CHATS])
def test_requests_come_in_order_with_prompts_of_their_length_and_answers_of_their_own(workload: Workload):
    arrivals = workload.arrivals(vocab_size=1000, seed=1)
    assert [each.at_s for each in arrivals] == sorted(each.at_s for each in arrivals)
    assert all(len(each.token_ids) == each.prompt_tokens > 0 for each in arrivals)
    assert all(len(each.answer_ids) == each.max_new_tokens > 0 for each in arrivals)
    assert len({each.answer for each in arrivals}) == len(arrivals)


class TestSharedPrefix:
    def test_every_group_has_its_prompts_and_they_share_exactly_the_prefix(self):
        groups = by_first_run(UNIFORM.arrivals(vocab_size=1000, seed=1))
        assert [len(prompts) for prompts in groups.values()] == [5, 5, 5, 5]
        for arrivals in groups.values():
            prompts = [arrival.token_ids for arrival in arrivals]
            assert len({prompt[:32].tobytes() for prompt in prompts}) == 1
            assert len({prompt[32:].tobytes() for prompt in prompts}) == 5
            assert all(prompt.dtype == np.uint32 and len(prompt) == 40 for prompt in prompts)
        assert len({arrivals[0].token_ids[:32].tobytes() for arrivals in groups.values()}) == 4

    def test_requests_are_shuffled_over_the_groups(self):
        groups = [arrival.runs[0].name for arrival in UNIFORM.arrivals(vocab_size=1000, seed=1)]
        assert groups != sorted(groups)

    def test_without_a_prefix_nothing_is_shared(self):
        workload = SharedPrefix(num_groups=1, prompts_per_group=50, prefix_tokens=0, unique_tokens=40, max_new_tokens=3)
        arrivals = workload.arrivals(vocab_size=1000, seed=1)
        assert ceiling(arrivals) == 0.0
        assert len({arrival.token_ids[:8].tobytes() for arrival in arrivals}) == 50

    def test_zipf_prefers_the_first_groups(self):
        workload = SharedPrefix(
            num_groups=10, prompts_per_group=100, prefix_tokens=4, unique_tokens=1, max_new_tokens=1, zipf=1.2
        )
        groups = [arrival.runs[0].name for arrival in workload.arrivals(vocab_size=50, seed=3)]
        counts = np.bincount(groups, minlength=10)
        assert counts.sum() == 1000
        assert counts[0] > 3 * counts[4] > 0

    def test_poisson_arrivals_keep_the_rate(self):
        workload = SharedPrefix(
            num_groups=2,
            prompts_per_group=1000,
            prefix_tokens=1,
            unique_tokens=1,
            max_new_tokens=1,
            requests_per_s=50.0,
        )
        times = [arrival.at_s for arrival in workload.arrivals(vocab_size=50, seed=3)]
        assert times[-1] == pytest.approx(2000 / 50, rel=0.1)


class TestSiblingBursts:
    def test_siblings_come_at_one_moment_with_a_prefix_of_their_own(self):
        arrivals = BURSTS.arrivals(vocab_size=1000, seed=1)
        bursts = by_first_run(arrivals)
        assert [len(siblings) for siblings in bursts.values()] == [3] * 5
        assert all(len({sibling.at_s for sibling in siblings}) == 1 for siblings in bursts.values())
        assert len({arrival.at_s for arrival in arrivals}) == 5
        assert len({arrival.token_ids[:32].tobytes() for arrival in arrivals}) == 5


class TestChats:
    def test_a_turn_holds_all_turns_and_answers_before_it(self):
        # The first run is the system prompt; the second is the chat's own first turn.
        chats: dict[int, list[Arrival]] = {}
        for arrival in CHATS.arrivals(vocab_size=1000, seed=1):
            chats.setdefault(arrival.runs[1].name, []).append(arrival)
        assert [len(turns) for turns in chats.values()] == [4] * 20
        for turns in chats.values():
            for before, after in pairwise(turns):
                known = np.concatenate([before.token_ids, before.answer_ids])
                assert after.token_ids[: len(known)].tolist() == known.tolist()
                assert after.prompt_tokens > len(known)
                assert after.at_s - before.at_s >= 0.2 * CHATS.think_s

    def test_chats_draw_from_few_system_prompts(self):
        systems = by_first_run(CHATS.arrivals(vocab_size=1000, seed=1))
        assert set(systems) == {0, 1}

    def test_lengths_have_the_wanted_means(self):
        many = Chats(
            num_chats=500,
            turns=4,
            num_systems=1,
            system_tokens=0,
            user_tokens=100,
            answer_tokens=200,
            think_s=5.0,
            chats_per_s=1.0,
        ).arrivals(vocab_size=1000, seed=1)
        assert np.mean([arrival.runs[-1].length for arrival in many]) == pytest.approx(100, rel=0.1)
        assert np.mean([arrival.max_new_tokens for arrival in many]) == pytest.approx(200, rel=0.1)


def arrival(runs: list[Run], answer: Run | None = None) -> Arrival:
    answer = answer or Run(99, 4)
    return Arrival(0.0, tuple(runs), answer.length, answer.name, SOURCE)


class TestCeiling:
    def test_counts_each_prefix_once(self):
        arrivals = UNIFORM.arrivals(vocab_size=1000, seed=1)
        assert ceiling(arrivals) == pytest.approx(16 * 32 / (20 * 40))
        assert ceiling([]) == 0.0

    def test_the_last_token_of_a_prompt_is_always_computed(self):
        assert reusable_tokens([arrival([Run(1, 10)]), arrival([Run(1, 10)])]) == [0, 9]

    def test_an_answer_counts_but_for_its_last_token(self):
        first = arrival([Run(1, 10)], answer=Run(2, 5))
        assert reusable_tokens([first, arrival([Run(1, 10), Run(2, 5), Run(3, 8)])]) == [0, 14]

    def test_what_follows_a_cut_run_is_not_shared(self):
        cut = [Run(1, 10), Run(2, 6)]
        whole = [Run(1, 10), Run(2, 8), Run(3, 4)]
        assert reusable_tokens([arrival(whole), arrival(cut), arrival(whole)]) == [0, 15, 21]
        assert reusable_tokens([arrival(cut), arrival(whole)]) == [0, 16]

    def test_equal_runs_behind_other_prefixes_are_not_shared(self):
        assert reusable_tokens([arrival([Run(1, 10), Run(2, 8)]), arrival([Run(3, 10), Run(2, 8)])]) == [0, 0]

    @pytest.mark.parametrize("workload", [UNIFORM, BURSTS, CHATS])
    def test_is_what_the_tokens_say(self, workload: Workload):
        arrivals = workload.arrivals(vocab_size=100_000, seed=2)
        seen: list[np.ndarray] = []
        for each, reusable in zip(arrivals, reusable_tokens(arrivals), strict=True):
            prompt = each.token_ids
            shared = max((_common(prompt, other) for other in seen), default=0)
            assert reusable == min(shared, len(prompt) - 1)
            seen.append(np.concatenate([prompt, each.answer_ids[:-1]]))


def _common(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


def test_scaled_requests_share_what_they_shared():
    workload = SharedPrefix(num_groups=3, prompts_per_group=4, prefix_tokens=640, unique_tokens=64, max_new_tokens=32)
    whole = workload.arrivals(vocab_size=1000, seed=1)
    short = scaled(whole, 0.25)
    assert {arrival.prompt_tokens for arrival in short} == {160 + 16}
    assert {arrival.max_new_tokens for arrival in short} == {8}
    assert ceiling(short) == pytest.approx(ceiling(whole), abs=0.01)
    for arrival, longer in zip(short, whole, strict=True):
        assert arrival.token_ids[:160].tolist() == longer.token_ids[:160].tolist()
