"""Runs of tokens: the same name gives the same tokens, wherever it stands."""

import numpy as np
import pytest

from loadtest.tokens import Run, TokenSource

SOURCE = TokenSource(vocab_size=32_000, seed=7)


def test_a_run_is_the_same_wherever_it_stands():
    alone = SOURCE.tokens([Run(5, 100)])
    among = SOURCE.tokens([Run(1, 37), Run(5, 100), Run(5, 100)])
    assert among[37:137].tolist() == among[137:].tolist() == alone.tolist()


def test_a_shorter_run_is_the_beginning_of_a_longer_one():
    assert SOURCE.tokens([Run(5, 64)]).tolist() == SOURCE.tokens([Run(5, 512)])[:64].tolist()


def test_names_and_seeds_tell_runs_apart_from_the_first_tokens_on():
    beginnings = {SOURCE.tokens([Run(name, 4)]).tobytes() for name in range(2_000)}
    beginnings |= {TokenSource(32_000, seed).tokens([Run(0, 4)]).tobytes() for seed in range(100)}
    assert len(beginnings) == 2_099


@pytest.mark.parametrize("vocab_size", [2, 512, 151_936])
def test_tokens_are_spread_evenly_over_the_vocabulary(vocab_size):
    tokens = TokenSource(vocab_size, 0).tokens([Run(name, 1_000) for name in range(200)])
    assert tokens.dtype == np.uint32
    assert tokens.max() < vocab_size
    eighths = np.bincount(tokens.astype(np.int64) * 2 // vocab_size, minlength=2)
    assert eighths.min() > 0.97 * eighths.max()


def test_tokens_stay_what_they_are_so_that_a_seed_means_the_same_workload_in_every_version():
    told = SOURCE.tokens([Run(0, 4), Run(1, 3), Run(2**32 - 1, 2)])
    assert told.tolist() == [22112, 21752, 29753, 15198, 687, 31839, 2017, 27052, 5244]


def test_nothing_is_no_tokens():
    assert SOURCE.tokens([]).tolist() == SOURCE.tokens([Run(3, 0)]).tolist() == []
