"""What every runner promises (`worker.runner.protocol`), on the simulated one and on torch with a tiny model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixfleet.clock import MonotonicClock
from tests.support.device_marks import QueuedOnCpu
from tests.support.recorded_ops import ReplayedOnCpu
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_model import tiny_model
from worker.model import loading
from worker.runner.protocol import Runner
from worker.runner.sim import SimRunner, SimRunnerConfig
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import make_torch_runner

NAN_TOKEN = 500
PROMPT = np.random.default_rng(1).integers(3, 490, 50).tolist()
OTHERS = [np.random.default_rng(seed).integers(3, 490, 10 + 13 * seed).tolist() for seed in range(2, 6)]


def sim_runner() -> Runner:
    config = SimRunnerConfig(
        vocab_size=512,
        kv_tokens=8192,
        page_size=16,
        max_running_requests=8,
        chunked_prefill_size=256,
        max_context_tokens=512,
        cost=None,
        verify=True,
        nan_token=NAN_TOKEN,
    )
    return SimRunner(config, MonotonicClock())


def poisoned_model(target: Path) -> Path:
    """The tiny model, but that token NAN_TOKEN gives NaN."""
    shutil.copytree(tiny_model(), target)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_TOKEN] = torch.nan
    save_file(weights, target / "model.safetensors")
    return target


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.fixture(scope="module")
def may_load_nan() -> Iterator[None]:
    """NaN in a weight stands for one that comes while the model computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "refuse_nan", lambda _name, _tensor: None)
        yield


@pytest.fixture(scope="module", params=["sim", "cpu", "cpu with a queue", "cpu with graphs", CUDA])
def make_runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, may_load_nan: None
) -> Callable[[], Runner]:
    if request.param == "sim":
        return sim_runner
    directory = poisoned_model(tmp_path_factory.mktemp("runner") / "model")
    config = TorchRunnerConfig(
        model_path=str(directory),
        device=request.param.split()[0],
        dtype="float32",
        device_memory_bytes=256 << 20,
        max_total_tokens=8192,
        max_running_requests=8,
        chunked_prefill_size=256,
        max_context_tokens=512,
    )
    if request.param == "cpu with a queue":
        return lambda: QueuedOnCpu(config)
    if request.param == "cpu with graphs":
        return lambda: ReplayedOnCpu(config)
    return lambda: make_torch_runner(config, MonotonicClock())


@pytest.fixture
def driver(make_runner: Callable[[], Runner]) -> Iterator[RunnerDriver]:
    runner = make_runner()
    yield RunnerDriver(runner)
    runner.close()
    runner.close()  # idempotent


def test_what_is_ready_is_coherent(driver: RunnerDriver) -> None:
    ready = driver.ready
    capacity, memory = ready.capacity, ready.memory
    assert (capacity.kv_tokens, capacity.page_size) == (8192, 16)
    assert (capacity.max_running_requests, capacity.chunked_prefill_size) == (8, 256)
    assert ready.max_context_tokens == 512
    assert memory.weights_bytes + memory.kv_bytes + memory.activations_bytes == memory.total_bytes
    assert memory.bounded_by
    assert ready.num_parameters > 0


@pytest.mark.parametrize("chunk", [1, 7, 16, 49])
def test_chunking_changes_no_token(driver: RunnerDriver, chunk: int) -> None:
    whole = driver.generate(0, PROMPT, 12)
    assert driver.generate(5, PROMPT, 12, chunk=chunk) == whole


def test_a_batch_changes_no_token(driver: RunnerDriver) -> None:
    prompts = [PROMPT, *OTHERS]
    alone = [driver.generate(0, prompt, 10) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        driver.begin(row, prompt)
    # Prefills in one mixed step with chunks of all kinds, then decodes and prefills side by side.
    driver.check(driver.step({0: len(PROMPT), 1: 5, 2: len(OTHERS[1])}))
    driver.check(driver.step({3: 20, 0: 0, 1: len(OTHERS[0]) - 5, 2: 0, 4: 1}))
    driver.prefill(3)
    driver.prefill(4, 40)
    while unfinished := {row: 0 for row in range(5) if len(driver.rows[row].tokens) < 10}:
        driver.check(driver.step(unfinished))
    assert [driver.rows[row].tokens for row in range(5)] == alone


def test_a_cached_prefix_changes_no_token(driver: RunnerDriver) -> None:
    whole = driver.generate(0, PROMPT, 8)
    slots = driver.rows[0].slots
    for cached in (1, 16, 49):
        assert driver.generate(3, PROMPT, 8, prefix_slots=slots[:cached]) == whole


def test_another_prefix_does_change_them(driver: RunnerDriver) -> None:
    """So that the test before can fail: it is the KV in the given slots that is read."""
    whole = driver.generate(0, PROMPT, 8)
    driver.generate(1, [*PROMPT[:20], 7, *PROMPT[21:]], 1)
    assert driver.generate(3, PROMPT, 8, prefix_slots=driver.rows[1].slots[:49]) != whole


def test_a_relayed_token_is_the_one_that_was_sampled(driver: RunnerDriver) -> None:
    """Behaviour 9: a known token in its place, as after a retraction, gives the same continuation."""
    tokens = driver.generate(0, PROMPT, 12)
    for kept in (1, 5, 11):
        again = driver.generate(2, PROMPT + tokens[:kept], 12 - kept, prompt_tokens=len(PROMPT))
        assert again == tokens[kept:]


def test_draws_depend_on_seed_and_position_alone(driver: RunnerDriver) -> None:
    """Behaviour 31: also after a retraction, where generated tokens are prefilled."""
    values = {"temperature": 1.0, "top_p": 0.95}
    drawn = driver.generate(0, PROMPT, 12, seed=7, **values)
    assert driver.generate(1, PROMPT, 12, seed=8, **values) != drawn
    for row, seed in ((2, 7), (3, 9)):
        driver.begin(row, PROMPT, seed=seed, **values)
    driver.check(driver.step({3: 50, 2: 30}))
    driver.prefill(2)
    driver.decode([2, 3], 11)
    assert driver.rows[2].tokens == drawn
    again = driver.generate(4, PROMPT + drawn[:6], 6, seed=7, prompt_tokens=len(PROMPT), **values)
    assert again == drawn[6:]


def test_the_likeliest_token_alone_is_greedy(driver: RunnerDriver) -> None:
    greedy = driver.generate(0, PROMPT, 12)
    for row, seed in ((1, 7), (2, 8)):
        assert driver.generate(row, PROMPT, 12, temperature=5.0, top_k=1, seed=seed) == greedy


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "seed": 3}])
def test_stop_tokens_wait_for_the_minimum(driver: RunnerDriver, values: dict[str, float]) -> None:
    """Behaviour 33: every stop token is masked below min_new_tokens, and none from there on."""
    free = driver.generate(0, PROMPT, 6, **values)
    stops = (*{free[0], free[1], free[2]}, 100_000)
    held = driver.generate(1, PROMPT, 6, min_new_tokens=3, stop_token_ids=stops, **values)
    assert not set(held[:3]) & set(stops)
    unheld = driver.generate(2, PROMPT, 6, min_new_tokens=0, stop_token_ids=stops, **values)
    assert unheld == free
    # Counted from the prompt, not from what is prefilled: a request that comes back is not held longer.
    back = driver.generate(3, PROMPT + held[:3], 3, prompt_tokens=len(PROMPT), min_new_tokens=3, **values)
    assert back == held[3:]


def test_a_nan_fails_its_sequence_alone(driver: RunnerDriver) -> None:
    """Behaviour 35: in a prefill and in a decode beside it, and the row serves the next request."""
    expected = driver.generate(0, PROMPT, 6)
    driver.begin(1, PROMPT)
    driver.begin(2, [5, 6, NAN_TOKEN, 7])
    driver.begin(3, OTHERS[0])
    result = driver.step({1: 50, 2: 4, 3: 3})
    assert result.error is None
    assert result.failed.tolist() == [False, True, False]
    driver.decode([1], 5)
    assert driver.rows[1].tokens == expected
    assert driver.generate(2, PROMPT, 6) == expected


def test_times_are_on_the_clock_that_processes_share(driver: RunnerDriver) -> None:
    before = MonotonicClock().now()
    driver.begin(0, PROMPT)
    result = driver.step({0: 50})
    assert before <= result.started_s <= result.ended_s <= MonotonicClock().now()
    assert result.step == 1
    assert result.token_ids.dtype == np.int32
    assert result.failed.dtype == np.bool_
