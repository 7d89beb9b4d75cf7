"""Steps of decodes replayed from CUDA graphs against the same steps launched kernel by kernel."""

from __future__ import annotations

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from radixfleet.clock import MonotonicClock
from tests.support.runner_driver import Row, RunnerDriver
from tests.support.tiny_model import tiny_model
from worker.runner.cuda_graphs import CudaRecorder
from worker.runner.torch_config import AttentionName, TorchRunnerConfig
from worker.runner.torch_runner import make_torch_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = [[(position * (7 + row)) % 490 + 3 for position in range(20 + 11 * row)] for row in range(24)]


NEARLY_TIED = 0.25
"""Log probabilities that differ by less are equal but for how bfloat16 rounds sums of another order."""


def decoded(config: TorchRunnerConfig) -> tuple[list[Row], list[str]]:
    """Each row's tokens, while the batch shrinks by one row a step; and what was logged while loading."""
    with capture_logs() as logs:
        driver = RunnerDriver(make_torch_runner(config, MonotonicClock()))
    for row, prompt in enumerate(PROMPTS):
        driver.begin(row, prompt, logprobs=5)
        driver.prefill(row)
    for count in range(len(PROMPTS), 0, -1):
        driver.decode(range(count), 3)
    driver.runner.close()
    torch.cuda.empty_cache()
    return [driver.rows[row] for row in range(len(PROMPTS))], [line["event"] for line in logs]


def part_at_a_tie(ours: Row, theirs: Row) -> bool:
    """The same tokens to the end, or to a place where theirs was all but as likely as ours."""
    for index, (token, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        if token != other:
            _, top_ids, top = ours.told[len(ours.prompt) + index]
            return other in top_ids and top[0] - top[top_ids.index(other)] < NEARLY_TIED
    return True


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_a_replayed_step_gives_the_tokens_of_a_launched_one(attention: AttentionName, deterministic: bool) -> None:
    """To the bit where inference is deterministic. Else a greedy choice may hang on how keys are split."""
    config = TorchRunnerConfig(
        model_path=str(tiny_model(max_context=1024, hidden_size=256)),
        device="cuda",
        dtype="bfloat16",
        device_memory_bytes=4 << 30,
        max_total_tokens=32_768,
        max_running_requests=len(PROMPTS),
        chunked_prefill_size=512,
        attention=attention,
        deterministic=deterministic,
    )
    replayed, logged = decoded(config)
    assert "CUDA graphs recorded" in logged
    launched, logged = decoded(msgspec.structs.replace(config, cuda_graphs=False))
    assert "CUDA graphs recorded" not in logged
    if deterministic:
        assert [row.tokens for row in replayed] == [row.tokens for row in launched]
        assert [row.told for row in replayed] == [row.told for row in launched]
    assert all(part_at_a_tie(*rows) for rows in zip(replayed, launched, strict=True))
    same = sum(ours.tokens[:4] == theirs.tokens[:4] for ours, theirs in zip(replayed, launched, strict=True))
    assert same > len(PROMPTS) / 2, "ties are rare: most rows agree for a while"


def test_a_record_that_fails_leaves_the_device_as_it_was() -> None:
    """What is recorded must not wait for the device. Steps are then launched kernel by kernel, on the same stream."""
    numbers = torch.arange(1000, device="cuda")
    recorder, before = CudaRecorder(numbers.device), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        recorder(lambda: numbers.add_(int(numbers.sum())))
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()
    assert int((numbers + 1).sum() - numbers.sum()) == 1000
