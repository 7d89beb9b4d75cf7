"""The filters against the slow form, on rows small enough to hold many ties and on rows larger than the candidates."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.slow_sampling import distribution
from worker.sampling.filters import keep_likely


def kept(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens the filters keep, bool [vocab]; beside it in the batch is a row that keeps all."""
    scores = torch.from_numpy(((logits - logits.max()) / temperature).astype(np.float32))
    rows = torch.stack((scores, scores))
    result = keep_likely(
        rows,
        torch.tensor([top_k, 0]),
        torch.tensor([top_p, 1.0], dtype=torch.float64),
        torch.tensor([min_p, 0.0], dtype=torch.float64),
    )
    assert torch.equal(result[1], scores)
    assert torch.equal(rows[0], scores), "the input was changed"
    alive = result[0] > -torch.inf
    assert torch.equal(result[0][alive], scores[alive])
    return alive.numpy()


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
