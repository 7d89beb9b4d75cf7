"""What an engine is made from, on its way to the processes."""

from __future__ import annotations

import msgspec
import pytest
from structlog.testing import capture_logs

from radixfleet.clock import ManualClock
from worker.engine.config import EngineConfig, load_failure, make_runner
from worker.memory.advisor import Advice
from worker.memory.plan import MemoryPlanError
from worker.model.errors import ModelError
from worker.runner.sim import CostModel, SimRunner, SimRunnerConfig
from worker.runner.torch_config import TorchRunnerConfig

TORCH = TorchRunnerConfig(model_path="model", num_threads=3)


@pytest.mark.parametrize("runner", [SimRunnerConfig(cost=CostModel(step_s=0.5)), SimRunnerConfig(cost=None), TORCH])
def test_it_reaches_a_child_process_unchanged(runner: SimRunnerConfig | TorchRunnerConfig) -> None:
    config = EngineConfig(runner=runner, overlap=False, schedule_order="priority", stuck_s=7.0)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_threads_of_the_runner_do_not_spin_and_are_as_many_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    environment = EngineConfig(runner=TORCH).runner_environment()
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["GOMP_SPINCOUNT"] == environment["KMP_BLOCKTIME"] == "0"


def test_what_the_operator_has_set_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    environment = EngineConfig(runner=TORCH).runner_environment()
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_memory_of_a_gpu_is_not_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the operator says how it is cut, by either name that torch knows."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert EngineConfig(runner=TORCH).runner_environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert "PYTORCH_ALLOC_CONF" not in EngineConfig(runner=TORCH).runner_environment()


def test_a_simulated_runner_gets_the_clock_it_is_given() -> None:
    clock = ManualClock()
    runner = make_runner(SimRunnerConfig(load_s=5.0), clock)
    assert isinstance(runner, SimRunner)
    runner.load()
    assert clock.now() == 5.0


@pytest.mark.parametrize(
    "error", [ModelError("no such file"), ValueError("no such file"), FileNotFoundError("no such file")]
)
def test_an_error_for_people_is_its_message_alone(error: Exception) -> None:
    with capture_logs() as logs:
        assert load_failure(error) == "no such file"
    assert [entry["log_level"] for entry in logs] == ["debug"]


def test_advice_on_memory_reaches_the_operator_as_it_is() -> None:
    advice = Advice("lower --chunked-prefill-size", setting="chunked_prefill_size")
    assert load_failure(MemoryPlanError(advice)) == advice.text


@pytest.mark.parametrize("error", [KeyError("lm_head"), ZeroDivisionError("division by zero"), ValueError()])
def test_any_other_error_names_its_type_and_is_logged_with_its_traceback(error: Exception) -> None:
    with capture_logs() as logs:
        assert load_failure(error).startswith(f"{type(error).__name__}: ")
    assert [(entry["log_level"], entry["exc_info"]) for entry in logs] == [("error", error)]
