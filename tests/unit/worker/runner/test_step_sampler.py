"""When a step's tokens are found without its logits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from worker.core.logits import LogitEdits
from worker.core.step import RowStart, StepPlan
from worker.runner.row_edits import RowEdits
from worker.runner.rows import RowState
from worker.runner.step_sampler import StepSampler

CPU = torch.device("cpu")
VOCAB = 10


class Head:
    """A model whose hidden states are its logits."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def logits(self, hidden: Tensor, output_rows: Tensor) -> Tensor:
        self.asked.append("logits")
        return hidden[output_rows].clone()

    def likeliest(self, hidden: Tensor, output_rows: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append("likeliest")
        largest, tokens = hidden[output_rows].max(dim=1)
        return largest, tokens


def row_start(row: int, **asked: Any) -> RowStart:
    plain: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 3}
    plain |= {"prompt_tokens": 1, "min_new_tokens": 0, "stop_token_ids": (4,), "history": np.array([5], np.int32)}
    return RowStart(row, np.empty(0, np.int32), **(plain | asked))


def drawn(hidden: Tensor, starts: list[RowStart]) -> tuple[list[str], list[int], list[bool]]:
    """What the head was asked for, and tokens and failures of a step in which each row computes its only token."""
    rows = RowState(max_rows=4, max_context=8, vocab_size=VOCAB, device=CPU)
    with ThreadPoolExecutor(1) as threads:
        edits = RowEdits(max_rows=4, vocab_size=VOCAB, device=CPU, compiler=None, threads=threads)
        sampler = StepSampler(rows=rows, edits=edits, max_rows=4, device=CPU)
        for start in starts:
            rows.start(start)
            sampler.start(start)
        ones = np.ones(len(starts), np.int32)
        samples, relayed = ones.astype(np.bool_), ones == 0
        numbers = np.array([start.row for start in starts], np.int32)
        plan = StepPlan(1, tuple(starts), numbers, ones * 0, ones, samples, relayed, ones, ones)
        head = Head()
        result = sampler.settle(sampler.draw(sampler.begin(plan), None, head, hidden))  # type: ignore[arg-type]
    assert rows.relay[numbers].tolist() == result.token_ids.tolist()
    return head.asked, result.token_ids.tolist(), result.failed.tolist()


HIDDEN = torch.arange(2 * VOCAB, dtype=torch.float32).view(2, VOCAB) % 7


def test_greedy_rows_need_no_logits() -> None:
    assert drawn(HIDDEN, [row_start(2), row_start(0)]) == (["likeliest"], [6, 3], [False, False])


@pytest.mark.parametrize("asked", [{}, {"logprobs": 0}], ids=["without logits", "from logits"])
def test_the_likeliest_one_is_the_first_of_those_that_are_equal(asked: dict[str, Any]) -> None:
    """top_k 1 is greedy at any temperature, whatever the seed; the filter alone would keep all the equal ones."""
    hidden = torch.zeros(2, VOCAB)
    hidden[:, [3, 5, 8]] = 4.0
    for seed in range(20):
        values = {"temperature": 2.0, "top_k": 1, "seed": seed, **asked}
        head_asked, tokens, _ = drawn(hidden, [row_start(2, **values), row_start(0, **values)])
        assert (head_asked, tokens) == (["logits" if asked else "likeliest"], [3, 3])


def test_a_nan_fails_its_row_alone_also_without_logits() -> None:
    """Behaviour 35."""
    hidden = HIDDEN.clone()
    hidden[0, 3] = torch.nan
    assert drawn(hidden, [row_start(2), row_start(0)]) == (["likeliest"], [0, 3], [True, False])


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0},
        {"min_new_tokens": 2},
        {"logprobs": 0},
        {"edits": LogitEdits(bias=((1, 0.5),))},
        {"edits": LogitEdits(presence_penalty=0.5)},
    ],
    ids=str,
)
def test_rows_that_ask_for_more_need_logits(asked: dict[str, Any]) -> None:
    assert drawn(HIDDEN, [row_start(2), row_start(0, **asked)])[0] == ["logits"]
