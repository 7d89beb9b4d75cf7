from typing import Any

import numpy as np
import torch

from worker.core.step import RowStart, StepPlan
from worker.runner.rows import RowState, flat_rows_and_positions


def start(row: int, prefix: int = 0, **values: Any) -> RowStart:
    defaults = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 2**64 - 1,
        "prompt_tokens": 10,
        "min_new_tokens": 0,
        "stop_token_ids": (),
    }
    return RowStart(row=row, prefix_slots=np.arange(16, 16 + prefix, dtype=np.int32), **(defaults | values))


def state() -> RowState:
    return RowState(max_rows=4, max_context=32, vocab_size=100, device=torch.device("cpu"))


def test_a_start_fills_the_table_and_the_parameters() -> None:
    rows = state()
    rows.start(start(2, prefix=3))
    assert rows.table[2, :4].tolist() == [16, 17, 18, 0]
    batch = rows.sampling(np.array([2], np.int32), np.array([10], np.int32))
    assert batch.temperature.tolist() == [0.5]
    assert batch.top_k.tolist() == [40]
    assert batch.top_p.tolist() == [0.9]
    assert batch.min_p.tolist() == [0.1]
    assert batch.seeds.tolist() == [2**64 - 1]  # all 64 bits
    assert batch.positions.tolist() == [10]
    assert batch.banned == ()


def test_a_row_keeps_nothing_of_the_request_before() -> None:
    rows = state()
    rows.start(start(1, prefix=5, min_new_tokens=9, stop_token_ids=(3,)))
    rows.start(start(1, temperature=0.0, seed=1, prompt_tokens=2))
    batch = rows.sampling(np.array([1], np.int32), np.array([2], np.int32))
    assert (batch.temperature[0], batch.seeds[0], batch.banned) == (0.0, 1, ())


def test_stop_tokens_are_banned_below_the_minimum_counted_from_the_prompt() -> None:
    """Behaviour 33: the first min_new_tokens positions after the prompt must not end the request."""
    rows = state()
    rows.start(start(0, prompt_tokens=10, min_new_tokens=2, stop_token_ids=(7, 9)))
    rows.start(start(3, prompt_tokens=10, min_new_tokens=5))
    both = np.array([3, 0], np.int32)
    assert rows.sampling(both, np.array([10, 11], np.int32)).banned == ((1, (7, 9)),)
    assert rows.sampling(both, np.array([10, 12], np.int32)).banned == ()


def test_stop_tokens_outside_the_vocabulary_ban_nothing() -> None:
    rows = state()
    rows.start(start(0, min_new_tokens=5, stop_token_ids=(99, 100, 10**9)))
    assert rows.sampling(np.array([0], np.int32), np.array([10], np.int32)).banned == ((0, (99,)),)


def test_new_tokens_are_placed() -> None:
    rows = state()
    rows.start(start(1, prefix=2))
    rows.place(torch.tensor([1, 1, 0]), torch.tensor([2, 3, 0]), torch.tensor([90, 80, 70]))
    assert rows.table[1, :5].tolist() == [16, 17, 90, 80, 0]
    assert rows.table[0, 0] == 70


def test_flat_rows_and_positions() -> None:
    plan = StepPlan(
        step=1,
        row_starts=(),
        rows=np.array([3, 0, 2], np.int32),
        starts=np.array([5, 0, 9], np.int32),
        lengths=np.array([1, 3, 2], np.int32),
        samples=np.zeros(3, np.bool_),
        relayed=np.zeros(3, np.bool_),
        input_ids=np.zeros(6, np.int32),
        slots=np.zeros(6, np.int32),
    )
    rows, positions = flat_rows_and_positions(plan)
    assert rows.tolist() == [3, 0, 0, 0, 2, 2]
    assert positions.tolist() == [5, 0, 1, 2, 9, 10]
