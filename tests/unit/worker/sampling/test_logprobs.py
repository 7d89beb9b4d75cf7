import numpy as np
import pytest
import torch

from tests.support.slow_sampling import log_softmax
from worker.sampling.logprobs import logprobs_of


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_the_slow_form(k: int) -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(1)) * 4
    tokens = torch.arange(7) * 11
    told = logprobs_of(logits, tokens, k).arrived(20)
    assert told.top.shape == told.top_ids.shape == (7, k)
    for row in range(7):
        slow = log_softmax(logits[row].double().numpy())
        assert told.tokens[row] == pytest.approx(slow[row * 11], abs=1e-5)
        best = np.argsort(-slow, kind="stable")[:k]
        assert told.top_ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(told.top[row], slow[best], atol=1e-5)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_of_equal_ones_those_with_the_lowest_ids_come_first(k: int) -> None:
    """So that the first of the list is the greedy token; in bfloat16 equal logits are common."""
    logits = torch.randint(0, 12, (5, 4000), generator=torch.Generator().manual_seed(1)).float()
    told = logprobs_of(logits, torch.zeros(5, dtype=torch.int64), k).arrived(20)
    assert told.top_ids.tolist() == np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :k].tolist()


def test_a_nan_disturbs_no_other_row() -> None:
    """Behaviour 35."""
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(1))
    expected = logprobs_of(logits, torch.tensor([5, 6, 7]), 5).arrived(5)
    logits[1, 70] = torch.nan
    told = logprobs_of(logits, torch.tensor([5, 6, 7]), 5).arrived(5)
    for row in (0, 2):
        assert told.tokens[row] == expected.tokens[row]
        assert told.top_ids[row].tolist() == expected.top_ids[row].tolist()


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    told = logprobs_of(torch.zeros(1, 3), torch.tensor([2]), 20).arrived(20)
    assert sorted(told.top_ids[0].tolist()) == [0, 1, 2]
    assert told.tokens[0] == pytest.approx(-np.log(3))


def test_huge_logits_do_not_overflow() -> None:
    told = logprobs_of(
        torch.tensor([[1e30, 0.0], [-1e30, 0.0], [-torch.inf, 0.0]]), torch.tensor([1, 1, 0]), 1
    ).arrived(20)
    assert told.tokens.tolist() == [pytest.approx(-1e30), 0.0, -np.inf]
    assert told.top_ids[:, 0].tolist() == [0, 1, 1]
