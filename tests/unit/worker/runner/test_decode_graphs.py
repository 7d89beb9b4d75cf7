from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor

from tests.support.recorded_ops import ReplayedOnCpu, record
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_model import tiny_model
from worker.core.graph_sizes import LARGEST_SIZE, graph_sizes
from worker.core.step import StepPlan
from worker.runner import torch_loading
from worker.runner.cuda_graphs import _stream_of, recorder_for
from worker.runner.decode_graphs import DecodeGraphs, RecordingError, Replay
from worker.runner.step_computer import StepComputer
from worker.runner.torch_config import TorchRunnerConfig

PROMPT = list(range(3, 40))


def config() -> TorchRunnerConfig:
    return TorchRunnerConfig(
        model_path=str(tiny_model()),
        dtype="float32",
        attention="sdpa",
        device_memory_bytes=256 << 20,
        max_total_tokens=1024,
        max_running_requests=7,
        chunked_prefill_size=64,
        max_context_tokens=128,
    )


class Counting:
    """Records, and counts what is replayed."""

    def __init__(self) -> None:
        self.replays = 0
        self.recordings = 0

    def __call__(self, compute: Callable[[], None]) -> Replay:
        replay = record(compute)
        self.recordings += 1

        def counted() -> None:
            self.replays += 1
            replay()

        return counted


def decodes(positions: list[int], relayed: bool = True) -> StepPlan:
    count = len(positions)
    return StepPlan(
        step=1,
        row_starts=(),
        rows=np.arange(count, dtype=np.int32),
        starts=np.array(positions, np.int32),
        lengths=np.ones(count, np.int32),
        samples=np.ones(count, np.bool_),
        relayed=np.full(count, relayed),
        input_ids=np.zeros(count, np.int32),
        slots=np.array(positions, np.int32) + 16,
    )


@given(st.integers(1, 4096))
def test_sizes_ascend_to_the_largest_step_and_waste_little(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_rows, LARGEST_SIZE)
    for size, smaller in zip(sizes, [0, *sizes], strict=False):
        assert size - smaller <= min(max(1, smaller), 16)


def test_a_step_is_padded_by_its_shortest_sequence() -> None:
    seen: list[list[list[int]]] = []

    def compute(*inputs: Tensor) -> Tensor:
        seen.append([values.tolist() for values in inputs])
        return inputs[1][:, None].float() * 10

    graphs = DecodeGraphs(compute, sizes=[1, 4, 8], hidden=torch.zeros(8, 1), record=lambda compute: compute)
    hidden = graphs.hidden(decodes([7, 3, 9, 5, 6]))
    assert seen[-1] == [[0, 1, 2, 3, 4, 1, 1, 1], [7, 3, 9, 5, 6, 3, 3, 3], [23, 19, 25, 21, 22, 19, 19, 19]]
    assert hidden is not None
    assert hidden[:, 0].tolist() == [70, 30, 90, 50, 60]
    assert graphs.hidden(decodes([2])) is not None
    assert seen[-1] == [[0], [2], [18]]


def test_other_steps_are_not_replayed() -> None:
    graphs = DecodeGraphs(
        lambda *inputs: inputs[1][:, None].float(), sizes=[1, 2], hidden=torch.zeros(2, 1), record=record
    )
    assert graphs.hidden(decodes([5, 6, 7])) is None
    assert graphs.hidden(decodes([5], relayed=False)) is None


def test_what_reads_numbers_of_the_host_is_found_out() -> None:
    """As a graph would keep the numbers that the recording saw."""

    def compute(rows: Tensor, positions: Tensor, _slots: Tensor) -> Tensor:
        return torch.full((len(rows), 1), float(positions.numpy()[0])) + 1

    graphs = DecodeGraphs(compute, sizes=[1, 4], hidden=torch.zeros(4, 1), record=record)
    with pytest.raises(RecordingError, match="a step of 4 sequences is off by"):
        graphs.check(lambda plan: torch.from_numpy(plan.starts)[:, None].float() + 1, page_size=16)


def test_steps_of_decodes_are_replayed_and_change_no_token() -> None:
    counting = Counting()
    replayed, plain = RunnerDriver(ReplayedOnCpu(config(), counting)), RunnerDriver(ReplayedOnCpu(config(), failing))
    assert counting.recordings == 2 * len(graph_sizes(7)), "recorded once to be measured, and once to stay"
    tried = counting.replays
    for driver in (replayed, plain):
        for row in range(6):
            driver.begin(row, PROMPT[row:], temperature=0.5, seed=row)
            driver.prefill(row)
    assert counting.replays == tried
    for driver in (replayed, plain):
        driver.decode(range(6), 10)
        driver.decode([4, 2], 5)
        driver.begin(6, PROMPT)
        driver.step({0: 0, 6: 20, 5: 0})
    assert counting.replays == tried + 15
    assert {row: replayed.rows[row].tokens for row in range(6)} == {row: plain.rows[row].tokens for row in range(6)}


def test_the_pool_leaves_room_for_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 62: graphs are recorded when the pool has taken the rest of the device."""
    keeps, counting = 600 << 10, Counting()
    scarce = msgspec.structs.replace(config(), max_total_tokens=None, mem_fraction_static=0.999)
    plain = ReplayedOnCpu(msgspec.structs.replace(scarce, cuda_graphs=False)).load().memory
    monkeypatch.setattr(torch_loading, "driver_bytes", lambda _device: counting.recordings * keeps)
    with capture_logs() as logs:
        recorded = ReplayedOnCpu(scarce, counting).load().memory
    (line,) = [line for line in logs if line["event"] == "CUDA graphs recorded"]
    assert line["planned_bytes"] > len(graph_sizes(7)) * keeps
    page_bytes = 16 * 2 * 2 * 2 * 16 * 4
    assert abs(line["planned_bytes"] - (plain.kv_bytes - recorded.kv_bytes)) < page_bytes
    assert "CUDA graphs of" in recorded.bounded_by


def failing(_: Callable[[], None]) -> Replay:
    raise RuntimeError("operation not permitted when stream is capturing")


def forgetful(compute: Callable[[], None]) -> Replay:
    compute()
    return lambda: None


@pytest.mark.parametrize(
    ("recorder", "why"), [(failing, "not permitted when stream is capturing"), (forgetful, "is off by")]
)
def test_a_worker_whose_steps_cannot_be_recorded_serves_without(
    recorder: Callable[[Callable[[], None]], Replay], why: str
) -> None:
    runner = ReplayedOnCpu(config(), recorder)
    with capture_logs() as logs:
        driver = RunnerDriver(runner)
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert "each step is launched kernel by kernel" in warning["event"]
    assert why in warning["why"]
    assert len(driver.generate(0, PROMPT, 5)) == 5


def test_what_could_not_be_measured_is_not_recorded_later() -> None:
    """Behaviour 62: the pool has taken the rest of the device, and nothing was left for them."""
    tried: list[int] = []

    def fails_at_first(compute: Callable[[], None]) -> Replay:
        tried.append(1)
        return failing(compute) if len(tried) == 1 else record(compute)

    runner = ReplayedOnCpu(config(), fails_at_first)
    with capture_logs() as logs:
        driver = RunnerDriver(runner)
    assert len(tried) == 1
    assert [line["why"] for line in logs if line["log_level"] == "warning"] == [
        "operation not permitted when stream is capturing"
    ]
    assert len(driver.generate(0, PROMPT, 5)) == 5


@pytest.mark.parametrize("why", ["no kernel image is available", "CUDA out of memory"])
def test_steps_of_decodes_that_fail_in_their_trial_are_not_recorded(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that cannot plan so many decodes on the device can plan them from the host."""
    counting = Counting()

    def fails(_computer: StepComputer, _size: int) -> Tensor:
        raise RuntimeError(why)

    monkeypatch.setattr(StepComputer, "try_decodes", fails)
    with capture_logs() as logs:
        driver = RunnerDriver(ReplayedOnCpu(config(), counting))
    assert counting.recordings == 0
    assert [line["why"] for line in logs if line["log_level"] == "warning"] == [why]
    assert len(driver.generate(0, PROMPT, 5)) == 5


def test_what_was_tried_leaves_the_padding_sink_empty() -> None:
    runner = ReplayedOnCpu(config())
    runner.load()
    assert runner._computer is not None
    pool = runner._computer._pool
    assert not any(tensor[: pool.page_size].any() for tensor in (*pool.keys, *pool.values))


def test_without_the_setting_nothing_is_recorded() -> None:
    counting = Counting()
    values = {field: getattr(config(), field) for field in TorchRunnerConfig.__struct_fields__}
    ReplayedOnCpu(TorchRunnerConfig(**(values | {"cuda_graphs": False})), counting).load()
    assert counting.recordings == 0


def test_measuring_and_recording_take_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each that it has seen, of which the plan would count one."""
    streams: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", streams.append)
    device = torch.device("cuda", 99)  # no other test's
    _stream_of.cache_clear()  # what an earlier run of this test has left
    for _ in range(2):
        assert recorder_for(device) is not None
    assert streams == [device]
