"""The filters against the slow form, on rows small enough to hold many ties and on rows larger than the candidates."""

import platform
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.slow_sampling import distribution
from worker.sampling.batch import SamplingBatch
from worker.sampling.filters import keep_likely, nucleus_by_halving
from worker.sampling.host_draw import Drawing, thresholds
from worker.sampling.nucleus import nucleus_by_kernel


def least_kept(scores: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> np.ndarray:
    """The form for CPUs: a score [n]."""
    nothing = np.zeros(len(scores))
    ones = nothing.astype(np.float32) + 1
    batch = SamplingBatch(ones, top_k, top_p, min_p, nothing.astype(np.uint64), nothing.astype(np.int64))
    return thresholds(Drawing(scores, np.arange(len(scores)), ones - 1, batch))


def nucleus_by_sorting(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The same, of top_p alone: [n, 1]."""
    nothing = np.zeros(len(scores))
    return torch.from_numpy(least_kept(scores.numpy(), nothing.astype(np.int64), shares.numpy(), nothing))[:, None]


FORMS = [nucleus_by_sorting, nucleus_by_halving, *([nucleus_by_kernel] if platform.system() == "Linux" else [])]


@pytest.fixture(scope="module", autouse=True)
def _without_the_kernel() -> Iterator[None]:
    """Which has tests of its own: Triton's interpreter takes seconds for what these ask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.sampling.filters.kernel_or", lambda other, _device: other)
        yield


def kept(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens the filters keep, bool [vocab], on GPUs and CPUs; beside it in the batch is a row that keeps all."""
    scores = torch.from_numpy(((logits - logits.max()) / temperature).astype(np.float32))
    rows = torch.stack((scores, scores))
    filters = np.array([top_k, 0]), np.array([top_p, 1.0]), np.array([min_p, 0.0])
    result, least = keep_likely(rows, *filters), least_kept(rows.numpy(), *filters)
    assert least[1] == -np.inf
    assert torch.equal(result[1], scores)
    assert torch.equal(rows[0], scores), "the input was changed"
    alive = result[0] > -torch.inf
    assert torch.equal(result[0][alive], scores[alive])
    assert abs(int((scores >= float(least[0])).sum()) - int(alive.sum())) <= 1
    of_host: np.ndarray = scores.numpy() >= least[0]
    return of_host


@settings(max_examples=300, deadline=None)
@given(
    quarters=st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.11, 0.57, 1.0]),
)
def test_filters_keep_what_the_slow_form_keeps(quarters: list[int], top_k: int, top_p: float, min_p: float) -> None:
    """Behaviour 31: with ties in abundance, as logits are quarters here."""
    logits = np.array(quarters, np.float64) / 4
    slow = distribution(logits, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p) > 0
    fast = kept(logits, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_array_equal(fast, slow)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.5, 0.99, 0.9999])
@pytest.mark.parametrize("top_k", [0, 10, 3000])
def test_nuclei_larger_than_the_candidates_are_exact_too(temperature: float, top_p: float, top_k: int) -> None:
    logits = np.random.default_rng(4).normal(size=5000).astype(np.float32).astype(np.float64)
    slow = distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p) > 0
    fast = kept(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.0)
    # float32 scores may put one token at the boundary on the other side
    assert abs(int(fast.sum()) - int(slow.sum())) <= 1
    assert (fast != slow).sum() <= 1


@settings(max_examples=300, deadline=None)
@given(
    sixteenths=st.lists(st.integers(-160, 0), min_size=1, max_size=60),
    top_p=st.sampled_from([0.001, 0.05, 0.3, 0.5, 0.77, 0.9, 0.999]),
    num_excluded=st.integers(0, 20),
)
def test_the_nucleus_without_sorting_is_the_one_with_it(sixteenths: list[int], top_p: float, num_excluded: int) -> None:
    """The form for GPUs, which waits for nothing; rows beside each other, tokens excluded before."""
    row = torch.tensor([*sixteenths, 0] + [-torch.inf] * num_excluded, dtype=torch.float32) / 16
    scores = torch.stack((row, row.flip(0), torch.where(row < -3, -torch.inf, row)))
    shares = torch.tensor([top_p, top_p / 2, 0.6], dtype=torch.float64)
    sorting, halving = nucleus_by_sorting(scores, shares), nucleus_by_halving(scores, shares)
    check_alike(scores, shares, sorting, halving)


@settings(max_examples=8, deadline=None)
@given(
    sixteenths=st.lists(st.integers(-160, 0), min_size=1, max_size=60),
    top_p=st.sampled_from([0.001, 0.05, 0.3, 0.5, 0.77, 0.9, 0.999]),
    num_excluded=st.integers(0, 20),
)
@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is for Linux")
def test_the_nucleus_by_a_kernel_is_the_one_by_sorting(sixteenths: list[int], top_p: float, num_excluded: int) -> None:
    """Triton's interpreter computes what a GPU would."""
    row = torch.tensor([*sixteenths, 0] + [-torch.inf] * num_excluded, dtype=torch.float32) / 16
    scores, shares = torch.stack((row, row.flip(0))), torch.tensor([top_p, 0.6], dtype=torch.float64)
    check_alike(scores, shares, nucleus_by_sorting(scores, shares), nucleus_by_kernel(scores, shares))


def check_alike(scores: torch.Tensor, shares: torch.Tensor, sorting: torch.Tensor, halving: torch.Tensor) -> None:
    """The same thresholds, or one token apart where both are right.

    Sums in float32 and float64 may reach a share one token apart where it falls on the very end of a token.
    """
    same = sorting == halving
    for index in (~same).nonzero()[:, 0].tolist():
        weights = scores[index].double().exp()
        for threshold in (sorting[index], halving[index]):
            kept = weights[scores[index] >= threshold].sum() / weights.sum()
            assert kept >= shares[index] - 1e-6
            assert weights[scores[index] > threshold].sum() / weights.sum() < shares[index] + 1e-6


def test_a_large_nucleus_without_sorting() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.3], [1.0], [8.0]])
    scores = logits - logits.max(dim=1, keepdim=True).values
    for share in (0.5, 0.99, 0.9999):
        shares = torch.full((3,), share, dtype=torch.float64)
        counts = [(scores >= nucleus(scores, shares)).sum(1) for nucleus in FORMS]
        assert all((counts[0] - count).abs().max() <= 1 for count in counts[1:])
