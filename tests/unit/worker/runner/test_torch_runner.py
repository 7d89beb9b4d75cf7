import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from radixfleet.clock import ManualClock
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_model import Architecture, tiny_model
from worker.core.messages import Ready
from worker.core.step import StepPlan, StepResult
from worker.memory.plan import MemoryPlanError
from worker.model.errors import ModelNotFound, UnsupportedModel
from worker.runner.devices import DeviceError
from worker.runner.largest_step import largest_step
from worker.runner.protocol import TellsLayersComputed
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

MIB = 1 << 20


def config(path: Path | None = None, **values: Any) -> TorchRunnerConfig:
    defaults = {
        "model_path": str(path or tiny_model()),
        "dtype": "float32",
        "device_memory_bytes": 64 * MIB,
        "max_running_requests": 4,
        "chunked_prefill_size": 64,
    }
    return TorchRunnerConfig(**(defaults | values))


def ready(path: Path | None = None, **values: Any) -> Ready:
    runner = TorchRunner(config(path, **values))
    try:
        return runner.load()
    finally:
        runner.close()


def with_config(tmp_path: Path, architecture: Architecture, **fields: Any) -> Path:
    target = tmp_path / "model"
    shutil.copytree(tiny_model(architecture), target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return target


def test_the_three_pools_add_up() -> None:
    said = ready()
    memory = said.memory
    assert memory.total_bytes == 64 * MIB
    assert memory.weights_bytes + memory.kv_bytes + memory.activations_bytes == memory.total_bytes
    kv_bytes_per_token = 2 * 2 * 2 * 16 * 4
    assert memory.kv_bytes == (said.capacity.kv_tokens + 16) * kv_bytes_per_token
    assert memory.kv_bytes <= 0.9 * (memory.total_bytes - memory.weights_bytes)
    assert said.num_parameters * 4 < memory.weights_bytes < said.num_parameters * 4 + 2 * MIB  # and the rotary tables
    assert memory.bounded_by == "mem_fraction_static = 0.9"


def test_the_share_and_the_cap_bound_the_pool() -> None:
    assert ready(mem_fraction_static=0.3).capacity.kv_tokens < 0.4 * ready().capacity.kv_tokens
    capped = ready(max_total_tokens=1000)
    assert capped.capacity.kv_tokens == 1008  # whole pages of 16
    assert capped.max_context_tokens == 1008  # a request longer than the pool can never be served
    assert "max_total_tokens" in capped.memory.bounded_by


def test_a_larger_chunk_leaves_the_pool_less_where_activations_bound_it() -> None:
    small = ready(mem_fraction_static=0.999, chunked_prefill_size=64)
    large = ready(mem_fraction_static=0.999, chunked_prefill_size=4096)
    assert "activation" in large.memory.bounded_by
    assert large.capacity.kv_tokens < small.capacity.kv_tokens
    # The MLP's input and output alone, of a chunk: 64 + 2 * 128 floats a token.
    assert large.memory.activations_bytes > 4096 * (64 + 256) * 4


def test_rows_are_derived_from_the_memory_and_the_chunk_from_the_device() -> None:
    said = ready(max_running_requests=None, chunked_prefill_size=None)
    assert said.capacity.max_running_requests == 32
    assert said.capacity.chunked_prefill_size == 1024
    small = ready(max_running_requests=None, chunked_prefill_size=None, max_total_tokens=2000)
    assert small.capacity.max_running_requests == 3
    assert ready(max_context_tokens=100, chunked_prefill_size=None).capacity.chunked_prefill_size == 100


def test_weights_that_cannot_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """Behaviour 62: the stage and the advice point the right way."""
    path = with_config(tmp_path, "llama")
    (path / "model.safetensors").unlink()
    with pytest.raises(MemoryPlanError, match=r"weights alone need .* smaller model"):
        ready(path, device_memory_bytes=100_000)


def test_a_pool_too_small_for_the_context_asked_for_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match="--mem-fraction-static"):
        ready(mem_fraction_static=0.01, max_context_tokens=4096)


def test_contexts_beyond_the_model_are_refused() -> None:
    assert ready(max_context_tokens=300).max_context_tokens == 300
    with pytest.raises(UnsupportedModel, match=r"can use 4096 \(what it was made for\); set --context-length to 4096"):
        ready(max_context_tokens=5000)


def test_a_sliding_window_limits_the_context_and_says_so(tmp_path: Path) -> None:
    path = with_config(tmp_path, "mistral", sliding_window=128)
    with capture_logs() as logs:
        assert ready(path).max_context_tokens == 128
    assert any("sliding window" in entry["event"] for entry in logs)
    with pytest.raises(UnsupportedModel, match=r"can use 128 \(its sliding window\)"):
        ready(path, max_context_tokens=129)


def test_other_failures_of_loading_carry_their_advice(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        ready(tmp_path)
    with pytest.raises(DeviceError, match="no device cuda"):
        ready(device="cuda:99")


def test_auto_dtype_is_served_and_named() -> None:
    assert ready(dtype="auto").dtype in ("bfloat16", "float32")
    assert ready(dtype="bfloat16").dtype == "bfloat16"


def test_the_largest_step_is_what_a_plan_can_ask_for_at_most() -> None:
    step = largest_step(4, 64, 500)
    assert (step.num_sequences, step.num_tokens) == (4, 64 + 3)
    assert (step.starts + step.lengths).tolist() == [500] * 4
    assert step.samples.all()


def broken_plan(step: int) -> StepPlan:
    return StepPlan(
        step=step,
        row_starts=(),
        rows=np.array([99], np.int32),
        starts=np.array([0], np.int32),
        lengths=np.array([1], np.int32),
        samples=np.array([True]),
        relayed=np.array([False]),
        input_ids=np.array([5], np.int32),
        slots=np.array([20], np.int32),
    )


def test_a_step_that_fails_is_told_and_the_next_one_works() -> None:
    """Behaviour 62: rows that were not in the failed step keep what they hold."""
    runner = TorchRunner(config())
    driver = RunnerDriver(runner)
    expected = driver.generate(0, list(range(3, 30)), 6)
    driver.begin(1, list(range(3, 30)))
    driver.prefill(1)
    driver.decode([1], 2)
    with capture_logs() as logs:
        result = runner.run(broken_plan(99))
    assert result.error is not None
    assert result.error.startswith("IndexError")
    assert result.failed.tolist() == [True]
    assert result.token_ids.shape == (1,)
    assert [entry["log_level"] for entry in logs] == ["error"]
    driver.decode([1], 3)
    assert driver.rows[1].tokens == expected


def test_plans_from_read_only_memory_are_taken() -> None:
    """Plans come out of a message buffer, whose arrays cannot be written."""
    runner = TorchRunner(config())
    runner.load()
    plan = broken_plan(1)
    arrays = {name: getattr(plan, name) for name in ("starts", "lengths", "samples", "relayed", "input_ids", "slots")}
    arrays["rows"] = np.array([0], np.int32)
    for array in arrays.values():
        array.setflags(write=False)
    assert runner.run(StepPlan(step=1, row_starts=(), **arrays)).error is None


def test_threads_are_those_of_the_setting() -> None:
    before = torch.get_num_threads()
    try:
        ready(num_threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_times_are_those_of_the_given_clock() -> None:
    driver = RunnerDriver(TorchRunner(config(), ManualClock(5.0)))
    driver.begin(0, [5, 6, 7])
    result = driver.step({0: 3})
    assert (result.started_s, result.ended_s) == (5.0, 5.0)


def test_closing_frees_the_pools() -> None:
    runner = TorchRunner(config())
    runner.load()
    runner.close()
    runner.close()
    with pytest.raises(AssertionError, match="run before load"):
        runner.run(broken_plan(1))


@pytest.mark.parametrize("prompt_tokens", [5, 100], ids=["that samples", "that only computes a part of a prompt"])
def test_in_each_step_it_is_told_once_that_its_layers_are_computed_before_it_ends(prompt_tokens: int) -> None:
    runner = TorchRunner(config())
    driver = RunnerDriver(runner)
    told: list[int] = []
    try:
        assert isinstance(runner, TellsLayersComputed)
        runner.tell_layers_computed(lambda: told.append(len(results)))
        results: list[StepResult] = []
        driver.begin(0, list(range(prompt_tokens)))
        results.append(driver.step({0: min(prompt_tokens, 64)}))
        results.append(driver.step({0: max(0, prompt_tokens - 64)}))
        assert told == [0, 1]
        assert all(result.error is None for result in results)
    finally:
        runner.close()
