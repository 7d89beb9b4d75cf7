"""Steps of decodes replayed from CUDA graphs against the same steps launched kernel by kernel."""

from __future__ import annotations

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from radixfleet.clock import MonotonicClock
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_model import tiny_model
from worker.runner.torch_config import AttentionName, TorchRunnerConfig
from worker.runner.torch_runner import make_torch_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = [[(position * (7 + row)) % 490 + 3 for position in range(20 + 11 * row)] for row in range(24)]


def decoded(config: TorchRunnerConfig) -> tuple[list[list[int]], list[str]]:
    """Tokens of each row, while the batch shrinks by one row a step; and what was logged while loading."""
    with capture_logs() as logs:
        driver = RunnerDriver(make_torch_runner(config, MonotonicClock()))
    for row, prompt in enumerate(PROMPTS):
        driver.begin(row, prompt)
        driver.prefill(row)
    for count in range(len(PROMPTS), 0, -1):
        driver.decode(range(count), 3)
    driver.runner.close()
    torch.cuda.empty_cache()
    return [driver.rows[row].tokens for row in range(len(PROMPTS))], [line["event"] for line in logs]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_a_replayed_step_gives_the_tokens_of_a_launched_one(attention: AttentionName, deterministic: bool) -> None:
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
    # Keys may be split otherwise, and a greedy choice hang on the last bit.
    same = sum(ours == theirs for ours, theirs in zip(replayed, launched, strict=True))
    assert same >= (len(PROMPTS) if deterministic else len(PROMPTS) - 2)
