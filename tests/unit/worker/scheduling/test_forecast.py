"""The forecast against a simulation of the same growth, and the share that it learns."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.sim_worker import make_submit
from worker.scheduling.forecast import Forecast, GrowthShare
from worker.scheduling.request import Request
from worker.scheduling.rows import Rows


def make_request(prompt_tokens: int, max_new_tokens: int) -> Request:
    submit = make_submit(1, np.zeros(prompt_tokens), max_new_tokens)
    return Request(submit, arrival=1, fill_ids=submit.token_ids)


def make_rows(facts: list[tuple[int, int, int, int]]) -> tuple[np.ndarray, Rows]:
    """Running requests: (pages, prompt tokens, max_new_tokens, planned) of each, on rows that are out of order."""
    rows, places = Rows(2 * len(facts) + 1), np.arange(len(facts))[::-1] * 2 + 1
    for row, (pages, prompt, new, planned) in zip(places.tolist(), facts, strict=True):
        rows.own_pages[row], rows.filled[row], rows.planned[row] = pages, prompt, planned
        rows.final[row] = prompt + new - 1
    return places, rows


def simulated_peak(requests: list[tuple[int, int]], page_size: int) -> int:
    """Let (length now, tokens to come) grow a token a step, and release each when it has them."""
    peak = 0
    for elapsed in range(max(to_come for _, to_come in requests) + 1):
        alive = [length + elapsed for length, to_come in requests if to_come >= elapsed]
        peak = max(peak, sum(-(-length // page_size) for length in alive))
    return peak


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_peak_is_exact_in_tokens_and_careful_by_less_than_a_page_each(page_size: int) -> None:
    random = np.random.default_rng(page_size)
    for _ in range(200):
        forecast, simulated, running = Forecast(page_size, share=1.0), [], []
        for _ in range(random.integers(0, 8)):
            prompt, new = int(random.integers(1, 60)), int(random.integers(1, 60))
            planned = int(random.integers(0, prompt + new))
            length = max(planned, prompt)
            running.append((-(-length // page_size), prompt, new, planned))
            simulated.append((length, prompt + new - 1 - length))
        forecast.add_all(*make_rows(running))
        for _ in range(random.integers(1, 5)):
            prompt, new = int(random.integers(1, 60)), int(random.integers(1, 60))
            forecast.add(make_request(prompt, new), -(-prompt // page_size))
            simulated.append((prompt, new - 1))
        assert forecast.own_pages == sum(-(-length // page_size) for length, _ in simulated)
        truth = simulated_peak(simulated, page_size)
        assert truth <= forecast.peak_pages() <= truth + (len(simulated) if page_size > 1 else 0)


def test_nobody_needs_nothing() -> None:
    assert Forecast(4, share=1.0).peak_pages() == 0


def test_a_smaller_share_counts_less_growth() -> None:
    peaks = []
    for share in (0.1, 0.5, 1.0):
        forecast = Forecast(1, share)
        forecast.add(make_request(10, 101), 10)
        peaks.append(forecast.peak_pages())
    assert peaks == [20, 60, 110]


class TestGrowthShare:
    """What part of max_new_tokens admission counts on."""

    def test_it_begins_with_everything(self) -> None:
        assert GrowthShare().value == 1.0

    def test_it_learns_from_those_that_ended(self) -> None:
        share = GrowthShare()
        for _ in range(20):
            share.ended(0.1)
        assert 0.1 < share.value < 0.25
        for _ in range(300):
            share.ended(0.1)
        assert share.value == pytest.approx(0.125, rel=0.05)
        for _ in range(300):
            share.ended(1.0)
        assert share.value == 1.0

    def test_a_retraction_counts_everything_for_a_while(self) -> None:
        share = GrowthShare()
        for _ in range(300):
            share.ended(0.1)
        share.retracted()
        assert share.value == 1.0
        for _ in range(64):
            share.stepped()
        assert 0.7 < share.value < 0.8
        for _ in range(256):
            share.stepped()
        assert share.value == pytest.approx(0.125, rel=0.05)
