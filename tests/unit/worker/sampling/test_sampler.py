from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.slow_sampling import distribution
from worker.sampling.batch import SamplingBatch
from worker.sampling.counter_random import stream_bits
from worker.sampling.host_draw import Drawing, thresholds
from worker.sampling.noise import gumbel, hashes, noise
from worker.sampling.sampler import sample


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


def streams(seeds: np.ndarray, positions: np.ndarray) -> Tensor:
    return torch.from_numpy(stream_bits(seeds, positions).view(np.int32).reshape(-1, 2))


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


def test_impossible_tokens_are_not_drawn_and_a_lone_one_always_is() -> None:
    """Whatever their noise: among half a million draws are the largest and the smallest that there is."""
    numbers = np.arange(250_000)
    only_middle = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf]).expand(len(numbers), -1)
    assert set(tokens(only_middle, batch(len(numbers), temperature=1.0, seeds=numbers))) == {1, 2}
    alone = torch.tensor([-torch.inf, -torch.inf, 3.0]).expand(len(numbers), -1)
    assert set(tokens(alone, batch(len(numbers), temperature=1.0, positions=numbers))) == {2}


def test_draws_at_neighbouring_positions_are_independent() -> None:
    """Behaviour 31: pairs of tokens come as often as their probabilities multiplied."""
    logits = torch.linspace(-1, 1, 5)
    num_draws = 40_000
    first, second = (
        np.array(tokens(logits.expand(num_draws, -1), batch(num_draws, temperature=1.0, seeds=seeds, positions=at)))
        for seeds, at in ((np.arange(num_draws), 7), (np.arange(num_draws), 8))
    )
    expected = np.outer(*[distribution(logits.double().numpy(), temperature=1.0)] * 2).ravel() * num_draws
    counts = np.bincount(first * 5 + second, minlength=25)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 24 + 5 * 48**0.5 + 5


def test_last_bits_of_logits_flip_few_draws() -> None:
    """Two kernels differ in the last bits. What flips is little more than what must, and nothing that ranks far away.

    No way to draw flips less than the distance (total variation) of the two distributions; inverting the distribution
    function flips several times that, as each boundary moves with all the probabilities before it.
    """
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(4000, 500, generator=generator) * 2
    changed = logits + torch.randn(logits.shape, generator=generator) * 0.02
    parameters = batch(4000, temperature=1.0, seeds=np.arange(4000))
    before, after = np.array(tokens(logits, parameters)), np.array(tokens(changed, parameters))
    probabilities = [each.double().softmax(1) for each in (logits, changed)]
    least = float((probabilities[0] - probabilities[1]).abs().sum(1).mean() / 2)
    targets = torch.rand(4000, 1, dtype=torch.float64, generator=generator)
    inverted = [torch.searchsorted(each.cumsum(1), targets).clamp(max=499)[:, 0].numpy() for each in probabilities]
    flips, flips_inverted = (before != after).mean(), (inverted[0] != inverted[1]).mean()
    assert flips < 3 * least
    assert flips < flips_inverted / 2


def test_noise_is_fixed_forever() -> None:
    """A recorded (seed, position) must replay in later versions, and on other devices."""
    rows = streams(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 5, 10**6]))
    expected = torch.tensor(
        [
            [1.777847, 0.5755, 0.322725, 3.380201],
            [1.180416, -0.371755, 3.524349, -0.449837],
            [0.383699, 0.580684, -0.220161, -0.938741],
        ]
    )
    torch.testing.assert_close(noise(rows, 4), expected, rtol=2e-6, atol=1e-6)
    assert torch.equal(noise(rows, 49_152)[:, :4], noise(rows, 4)), "a token's noise does not depend on the vocabulary"


def test_the_noise_of_some_tokens_is_that_of_all() -> None:
    """The form for CPUs, which makes it for few tokens, and the one for GPUs."""
    seeds, positions = np.arange(30, dtype=np.uint64), np.arange(30) * 3
    of_all = noise(streams(seeds, positions), 5000).numpy()
    words = stream_bits(seeds, positions).view(np.uint32).reshape(-1, 2)
    np.testing.assert_allclose(gumbel(hashes(words, np.arange(5000, dtype=np.uint32))), of_all, rtol=2e-6, atol=1e-6)
    some = np.arange(30, dtype=np.uint32) * 160
    np.testing.assert_allclose(
        gumbel(hashes(words, some[:, None]))[:, 0], of_all[range(30), some], rtol=2e-6, atol=1e-6
    )
    ends = gumbel(np.array([0, 2**31 - 1], np.uint32))
    assert np.isfinite(ends).all()
    assert ends[0] > 22 > -2 > ends[1]


@settings(max_examples=100, deadline=None)
@given(
    vocab_size=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 20, 2000]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.95, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.03]),
    seed=st.integers(0, 2**32),
)
def test_what_is_drawn_has_the_largest_score_and_noise(
    vocab_size: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Behaviour 31: of all tokens that the filters keep, although the noise of few is looked at."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((5, vocab_size)) * spread).astype(np.float32)
    logits[random.random(logits.shape) < 0.1] = -np.inf
    logits[:, vocab_size // 2] = 1.0
    asked = batch(5, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=random.integers(0, 2**63, 5))
    drawn = tokens(torch.from_numpy(logits), asked)
    scores = (logits - logits.max(1, keepdims=True)) / asked.temperature[:, None]
    kept = scores >= thresholds(Drawing(logits, np.arange(5), logits.max(1), asked))[:, None]
    values = np.where(kept, scores + noise(streams(asked.seeds, asked.positions), vocab_size).numpy(), -np.inf)
    assert (values[range(5), drawn] >= values.max(1) - 1e-5).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_noise_and_nuclei_are_the_same_on_a_gpu() -> None:
    rows = streams(np.arange(50, dtype=np.uint64), np.arange(50))
    torch.testing.assert_close(noise(rows.cuda(), 5000).cpu(), noise(rows, 5000), rtol=1e-5, atol=1e-5)
    logits = torch.randn(50, 5000, generator=torch.Generator().manual_seed(2)) * 3
    parameters = batch(50, temperature=1.0, top_p=0.9, top_k=400, min_p=0.001, seeds=np.arange(50))
    expected, _ = sample(logits.clone(), parameters)
    drawn, failed = sample(logits.cuda(), parameters)
    assert not failed.any()
    assert int((drawn.cpu() == expected).sum()) >= 49


def test_noise_is_gumbels() -> None:
    """By its quantiles, over tokens, over positions and over seeds; tokens beside each other are independent."""
    for seeds, positions, size in ((np.zeros(1), np.zeros(1), 200_000), (np.arange(200_000), np.zeros(200_000), 1)):
        rows = streams(seeds.astype(np.uint64), positions.astype(np.int64))
        values = noise(rows, size).ravel().double()
        uniform = (-(-values).exp()).exp().numpy()
        counts = np.histogram(uniform, bins=100, range=(0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 161  # 99 degrees of freedom: above this once in 10,000
        assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.009  # 4 standard deviations
