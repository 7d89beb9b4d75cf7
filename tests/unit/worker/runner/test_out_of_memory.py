"""A torch runner on a device whose memory is short: at load, at start, in chunks, in decodes, in sampling."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from radixfleet.types import FinishReason
from tests.support.grammars import regex
from tests.support.runner_driver import RunnerDriver
from tests.support.scarce_memory import ScarceMemory, ScarceRunner, ScheduledRunner
from tests.support.sim_worker import make_submit
from tests.support.tiny_model import tiny_model
from worker.core.logits import LogitEdits
from worker.core.messages import Ready, Submit
from worker.memory.plan import MemoryPlanError
from worker.runner.largest_step import largest_step
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

KIB = 1 << 10
MIB = 1 << 20


def config(**values: Any) -> TorchRunnerConfig:
    defaults = {
        "model_path": str(tiny_model(max_context=512)),
        "dtype": "float32",
        "device_memory_bytes": 64 * MIB,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        "attention": "sdpa",
    }
    return TorchRunnerConfig(**(defaults | values))


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[TorchRunner, Ready]]:
    runner = TorchRunner(config())
    yield runner, runner.load()
    runner.close()


@pytest.fixture
def scarce(loaded: tuple[TorchRunner, Ready]) -> ScarceRunner:
    return ScarceRunner(*loaded)


def requests(num_requests: int, prompt_tokens: int, max_new_tokens: int = 12) -> list[Submit]:
    random = np.random.default_rng(7)
    return [
        make_submit(uid, random.integers(3, 500, prompt_tokens), max_new_tokens, temperature=0.7 * (uid % 2), seed=uid)
        for uid in range(num_requests)
    ]


def served(runner: ScarceRunner, submits: list[Submit], in_flight: int) -> ScheduledRunner:
    scheduled = ScheduledRunner(runner, in_flight=in_flight)
    scheduled.serve(submits)
    return scheduled


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("prompt_tokens", "share"), [(150, 0.5), (150, 0.35), (4, 0.6)])
def test_with_half_the_memory_all_requests_are_served_with_the_same_tokens(
    scarce: ScarceRunner, prompt_tokens: int, share: float, in_flight: int
) -> None:
    """Behaviours 9, 62: real tensors, real failures in the middle of layers; steps shrink until they fit."""
    submits = requests(6, prompt_tokens)
    expected = served(scarce, submits, in_flight)
    assert expected.scheduler.counters.finished_requests == 6
    scarce.step_bytes = int(share * scarce.peak_bytes)
    scheduled = served(scarce, submits, in_flight)
    assert scarce.failures > 0
    assert scheduled.scheduler.counters.failed_requests == 0
    assert scheduled.tokens() == expected.tokens()
    stage = "prefill" if prompt_tokens > 4 else "decode"
    assert scheduled.scheduler.counters.as_dict()[f"out_of_memory_{stage}"] > 0


@pytest.mark.parametrize(("share", "failing_steps"), [(0.6, ()), (0.35, ()), (1.0, range(3, 60, 4))])
def test_penalties_grammars_and_log_probabilities_survive_it(
    scarce: ScarceRunner, share: float, failing_steps: Collection[int]
) -> None:
    """Behaviours 32, 62: what a runner keeps of a row is told anew: no token is counted twice, none forgotten."""
    submits = [
        msgspec.structs.replace(
            submit,
            edits=LogitEdits(
                frequency_penalty=0.5 * (submit.uid % 2),
                repetition_penalty=1.0 + 0.2 * (submit.uid % 3),
                grammar=regex("[a-f ]{30,60}") if submit.uid % 2 else None,
            ),
            logprobs=2,
            prompt_logprobs=1,
        )
        for submit in requests(6, 120)
    ]
    expected = served(scarce, submits, 2)
    assert expected.scheduler.counters.finished_requests == 6
    scarce.step_bytes = int(share * scarce.peak_bytes)
    scarce.failing_steps = failing_steps
    scheduled = served(scarce, submits, 2)
    assert scarce.failures > 0
    assert scheduled.scheduler.counters.failed_requests == 0
    assert scheduled.tokens() == expected.tokens()
    for uid in range(6):
        assert len(scheduled.prompt_logprobs[uid]) == 119
        assert scheduled.prompt_logprobs[uid] == pytest.approx(expected.prompt_logprobs[uid], abs=1e-3)
        assert scheduled.logprobs[uid] == pytest.approx(expected.logprobs[uid], abs=1e-3)


def test_where_the_logits_find_no_room_fewer_sequences_are_sampled_from(scarce: ScarceRunner) -> None:
    """Behaviours 9, 62: some drawn, some greedy, of all some log probabilities, which are of copies of the logits."""
    submits = [msgspec.structs.replace(submit, logprobs=2) for submit in requests(6, 4)]
    expected = served(scarce, submits, 2)
    scarce.step_bytes = int(0.4 * scarce.peak_bytes)
    scheduled = served(scarce, submits, 2)
    assert scheduled.scheduler.counters.out_of_memory_sampling > 0
    assert scheduled.scheduler.counters.failed_requests == 0
    assert scheduled.tokens() == expected.tokens()
    for uid in range(6):
        assert scheduled.logprobs[uid] == pytest.approx(expected.logprobs[uid], abs=1e-3)


def test_without_any_memory_requests_fail_and_the_runner_goes_on(scarce: ScarceRunner) -> None:
    submits = requests(3, 40)
    expected = served(scarce, submits, 1).tokens()
    scarce.step_bytes = 0
    failed = served(scarce, submits, 2)
    for told in failed.told.values():
        assert told.ended is not None
        assert (told.ended.reason, told.ended.code) == (None, "RESOURCE_EXHAUSTED")
        assert "Lower --max-running-requests" in told.ended.message
    scarce.step_bytes = 64 * MIB
    again = served(scarce, submits, 2)
    assert {told.ended.reason for told in again.told.values() if told.ended} == {FinishReason.LENGTH}
    assert again.tokens() == expected


def test_the_step_tells_stage_and_numbers_and_makes_no_noise() -> None:
    """The engine tells the operator once an episode; a traceback for each step would drown that."""
    runner = TorchRunner(config())
    driver = RunnerDriver(runner)
    driver.begin(0, list(range(3, 60)))
    with capture_logs() as logs, ScarceMemory(20 * KIB):
        result = driver.step({0: 57})
    assert result.error is not None
    assert result.out_of_memory is not None
    assert not result.out_of_memory.in_sampling
    assert result.out_of_memory.needed_bytes is not None
    assert 0 < result.out_of_memory.needed_bytes < 1 * MIB
    assert result.failed.all()
    assert {entry["log_level"] for entry in logs} == {"debug"}
    runner.close()


def test_what_fails_in_sampling_says_so(loaded: tuple[TorchRunner, Ready], monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = loaded
    step = largest_step(8, 8, 64)

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")

    monkeypatch.setattr("worker.runner.step_sampler.sample", no_room)
    result = runner.run(step)
    assert result.out_of_memory is not None
    assert result.out_of_memory.in_sampling
    monkeypatch.undo()
    assert runner.run(step).error is None


@pytest.mark.parametrize(
    ("limit", "words", "setting"),
    [
        (150 * KIB, "while the weights were read", "device_memory"),
        (1 * MIB, "The largest step, tried at start", "chunked_prefill_size"),
        (20 * MIB, "refused the KV pool that was planned", "mem_fraction_static"),
    ],
)
def test_running_out_while_loading_is_advised_by_stage(limit: int, words: str, setting: str) -> None:
    """Behaviour 62: load and start are told apart, and each has its own way out."""
    runner = TorchRunner(config(chunked_prefill_size=512, dtype="bfloat16"))
    with pytest.raises(MemoryPlanError, match=words) as failed, ScarceMemory(limit):
        runner.load()
    assert failed.value.advice.setting == setting
    assert "it asked for" in str(failed.value)
    runner.close()
