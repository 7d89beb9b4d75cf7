"""Rows that decode side by side on a loaded runner, and whether two ways to compute them part where they may."""

from __future__ import annotations

from typing import Any

import torch
from structlog.testing import capture_logs

from radixfleet.clock import MonotonicClock
from tests.support.runner_driver import Row, RunnerDriver
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import make_torch_runner

PROMPTS = [[(position * (7 + row)) % 490 + 3 for position in range(20 + 11 * row)] for row in range(24)]
NEARLY_TIED = 0.25
"""Log probabilities that differ by less are equal but for how bfloat16 rounds sums of another order."""


def decoded(config: TorchRunnerConfig) -> tuple[list[Row], dict[str, Any]]:
    """Each row's tokens, while the batch shrinks by one row a step; and the lines logged while loading, by event."""
    with capture_logs() as logs:
        driver = RunnerDriver(make_torch_runner(config, MonotonicClock()))
    for row, prompt in enumerate(PROMPTS):
        driver.begin(row, prompt, logprobs=5)
        driver.prefill(row)
    for count in range(len(PROMPTS), 0, -1):
        driver.decode(range(count), 3)
    driver.runner.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [driver.rows[row] for row in range(len(PROMPTS))], {line["event"]: line for line in logs}


def check_alike(ours: list[Row], theirs: list[Row]) -> None:
    """The same tokens, but for what follows where two were all but as likely, which is rare."""
    assert all(_part_at_a_tie(*rows) for rows in zip(ours, theirs, strict=True))
    same = sum(ours.tokens[:4] == theirs.tokens[:4] for ours, theirs in zip(ours, theirs, strict=True))
    assert same > len(PROMPTS) / 2, "ties are rare: most rows agree for a while"


def _part_at_a_tie(ours: Row, theirs: Row) -> bool:
    """The same tokens to the end, or to a place where theirs was all but as likely as ours."""
    for index, (token, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        if token != other:
            _, top_ids, top = ours.told[len(ours.prompt) + index]
            return other in top_ids and top[0] - top[top_ids.index(other)] < NEARLY_TIED
    return True
