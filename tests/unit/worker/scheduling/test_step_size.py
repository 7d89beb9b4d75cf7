from __future__ import annotations

from worker.scheduling.step_size import StepLimit, StepSize


def test_a_step_that_failed_halves_what_it_failed_by() -> None:
    size = StepSize(8192, 256)
    assert size.is_full
    assert size.ran_out(8192 + 100, 101, in_sampling=False)  # 100 decodes beside a chunk
    assert (size.prompt_tokens.now, size.sequences.now) == (4096, 256)
    assert size.ran_out(200, 200, in_sampling=False)  # decodes alone
    assert (size.prompt_tokens.now, size.sequences.now) == (4096, 100)
    assert not size.is_full


def test_sampling_halves_the_sequences_first() -> None:
    size = StepSize(64, 8)
    size.ran_out(67, 8, in_sampling=True)
    assert (size.prompt_tokens.now, size.sequences.now) == (64, 4)
    size.ran_out(64, 1, in_sampling=True)
    assert (size.prompt_tokens.now, size.sequences.now) == (32, 4)


def test_two_launched_steps_of_one_size_halve_once() -> None:
    size = StepSize(1024, 8)
    for _ in range(2):
        size.ran_out(1024, 1, in_sampling=False)
    assert size.prompt_tokens.now == 512


def test_a_step_far_below_the_limit_that_fails_counts_all_the_same() -> None:
    size = StepSize(8192, 256)
    size.ran_out(100, 1, in_sampling=False)
    assert size.prompt_tokens.now == 50


def test_every_failure_makes_the_next_step_smaller_until_one_token_is_left() -> None:
    size, tokens, sequences, failures = StepSize(8192, 256), 8192 + 255, 256, 0
    while size.ran_out(tokens, sequences, in_sampling=False):
        sequences = min(sequences, size.sequences.now)
        tokens = sequences - 1 + size.prompt_tokens.now
        failures += 1
        assert failures < 30
    assert (tokens, sequences) == (1, 1)
    assert failures == 13 + 8


def passes(limit: StepLimit, size: int, steps: int) -> None:
    for _ in range(steps):
        limit.passed(size)


def test_a_limit_doubles_after_some_steps_that_came_near_it() -> None:
    limit = StepLimit(1024)
    limit.failed(1024)
    passes(limit, 300, 7)
    assert limit.now == 512
    passes(limit, 300, 1)
    assert limit.now == 1024


def test_steps_far_below_a_limit_prove_little_but_not_nothing() -> None:
    """So that a shortage is forgotten in the end by a worker that has little to do."""
    limit = StepLimit(1024)
    limit.failed(1024)
    passes(limit, 1, 8 * 16 - 1)
    assert limit.now == 512
    passes(limit, 1, 1)
    assert limit.now == 1024


def test_it_never_grows_beyond_the_plan() -> None:
    limit = StepLimit(100)
    limit.failed(90)
    passes(limit, 100, 1000)
    assert limit.now == 100
    assert limit.is_full


def failures_while_1024_never_fits(limit: StepLimit, steps: int) -> int:
    failures = 0
    for _ in range(steps):
        if limit.now == 1024:
            limit.failed(1024)
            failures += 1
        else:
            limit.passed(limit.now)
    return failures


def test_a_shortage_that_lasts_costs_few_steps() -> None:
    """Each relapse doubles the wait, up to 256 steps near the limit."""
    assert failures_while_1024_never_fits(StepLimit(1024), 10_000) <= 5 + 10_000 // 256 + 1


def test_patience_is_forgotten_once_the_full_size_has_proven_itself() -> None:
    limit = StepLimit(1024)
    failures_while_1024_never_fits(limit, 1_000)
    passes(limit, 1024, 3 * 256)
    limit.failed(1024)
    passes(limit, 512, 8)
    assert limit.is_full
