from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.slow_sampling import distribution
from worker.sampling.counter_random import uniform
from worker.sampling.sampler import SamplingBatch, sample


def batch(size: int, banned: tuple[tuple[int, tuple[int, ...]], ...] = (), **values: Any) -> SamplingBatch:
    """Parameters of `size` rows: a scalar is for all of them. Greedy unless a temperature is given."""
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0}
    types = {
        "temperature": np.float32,
        "top_k": np.int64,
        "top_p": np.float64,
        "min_p": np.float64,
        "seeds": np.uint64,
        "positions": np.int64,
    }
    return SamplingBatch(
        **{
            name: np.broadcast_to(np.asarray(values.get(name, default), types[name]), size).copy()
            for name, default in defaults.items()
        },
        banned=banned,
    )


def tokens(logits: Tensor, parameters: SamplingBatch) -> list[int]:
    drawn, failed = sample(logits.clone(), parameters)
    assert not failed.any()
    return drawn.tolist()


def test_greedy_rows_take_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.9]])
    assert tokens(logits, batch(2)) == [1, 0]


def chi_square(logits: Tensor, parameters: SamplingBatch, expected: np.ndarray) -> tuple[float, int]:
    """Of the draws of many rows with equal logits, and its degrees of freedom. Impossible tokens must not come."""
    drawn = sample(logits.expand(len(parameters.seeds), -1).clone(), parameters)[0].numpy()
    counts = np.bincount(drawn, minlength=len(expected))
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    wanted = expected[possible] * len(drawn)
    return float(((counts[possible] - wanted) ** 2 / wanted).sum()), int(possible.sum()) - 1


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_draws_follow_the_distribution(parameters: dict[str, Any], along: str) -> None:
    """Behaviour 31: unbiased by chi-square, over seeds and over positions."""
    logits = torch.linspace(-2, 2, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(3))]
    num_draws = 20_000
    drawn = batch(num_draws, **parameters, **{along: np.arange(num_draws)})
    statistic, freedom = chi_square(logits, drawn, distribution(logits.double().numpy(), **parameters))
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5  # far beyond one in 10,000


def test_logits_are_taken_as_log_probabilities() -> None:
    """Behaviour 31: adding a constant to a row's logits changes nothing."""
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(1))
    parameters = batch(50, temperature=0.9, top_p=0.95, seeds=np.arange(50))
    shifted = (logits.double() + 1000).float()
    same = sum(a == b for a, b in zip(tokens(logits, parameters), tokens(shifted, parameters), strict=True))
    assert same >= 48  # float32 keeps only 4 digits after the point at 1000


def test_a_draw_depends_on_its_own_row_alone() -> None:
    """Behaviour 31: each row follows its own seed; alone, in a batch, and in any place of it the token is the same."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(16, 3000, generator=generator) * 2
    parameters: dict[str, np.ndarray] = {
        "temperature": np.linspace(0.0, 2.0, 16),
        "top_k": np.arange(16) % 4 * 50,
        "top_p": np.where(np.arange(16) % 3, 0.9, 1.0),
        "min_p": np.where(np.arange(16) % 5, 0.0, 0.02),
        "seeds": np.arange(16) + 99,
        "positions": np.arange(16) * 7,
    }
    together = tokens(logits, batch(16, **parameters))
    order = np.random.default_rng(0).permutation(16)
    permuted = tokens(logits[torch.from_numpy(order)], batch(16, **{k: v[order] for k, v in parameters.items()}))
    assert permuted == [together[index] for index in order]
    for index in range(16):
        alone = batch(1, **{name: values[index] for name, values in parameters.items()})
        assert tokens(logits[index : index + 1], alone) == [together[index]]


def test_children_with_other_seeds_differ_and_equal_seeds_agree() -> None:
    """Behaviour 31: the children of one request have seeds of their own."""
    logits = torch.zeros(64, 1000)
    drawn = tokens(logits, batch(64, temperature=1.0, seeds=np.arange(64) // 2))
    assert all(drawn[index] == drawn[index + 1] for index in range(0, 64, 2))
    assert len(set(drawn)) > 25


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_in_the_logits_fails_that_row_alone(poison: float, temperature: float) -> None:
    """Behaviour 35: greedy and drawn, with every filter on."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    parameters = batch(4, temperature=temperature, top_p=0.9, top_k=20, min_p=0.01, seeds=np.arange(4))
    expected = tokens(logits, parameters)
    logits[2, 17] = poison
    drawn, failed = sample(logits, parameters)
    assert failed.tolist() == [False, False, True, False]
    assert drawn.tolist() == [expected[0], expected[1], 0, expected[3]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_never_come(temperature: float) -> None:
    """Behaviour 33: every end token of a row is masked, those of others are not."""
    logits = torch.zeros(200, 5)
    logits[:, [1, 3]] = 10.0
    banned = tuple((row, (1, 3)) for row in range(100))
    drawn = tokens(logits, batch(200, temperature=temperature, seeds=np.arange(200), banned=banned))
    assert not {1, 3} & set(drawn[:100])
    assert set(drawn[100:]) <= {1, 3}


def test_a_row_with_everything_banned_fails() -> None:
    drawn, failed = sample(torch.zeros(2, 3), batch(2, banned=((0, (0, 1, 2)),)))
    assert failed.tolist() == [True, False]
    assert drawn[0] == 0


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    logits = torch.tensor([[1.0, 1.5, -40.0, 1.499]]).expand(500, -1)
    assert set(tokens(logits, batch(500, temperature=1e-30, seeds=np.arange(500)))) == {1}
    assert set(tokens(logits, batch(500, temperature=1e30, seeds=np.arange(500)))) == {0, 1, 2, 3}


def test_impossible_tokens_are_not_drawn_at_the_ends_of_the_range() -> None:
    """The inverted distribution function at u = 0 and just below 1: zero-probability tokens lie at both ends."""
    numbers = uniform(np.arange(500_000, dtype=np.uint64), np.zeros(500_000, np.int64))
    extremes = np.concatenate((np.argsort(numbers)[:50], np.argsort(numbers)[-50:]))
    logits = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf]).expand(100, -1)
    assert tokens(logits, batch(100, temperature=1.0, seeds=extremes)) == [1] * 50 + [2] * 50
