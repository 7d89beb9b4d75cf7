"""Deterministic inference on a CUDA device: the bits of a request do not depend on what is computed with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from radixfleet.clock import MonotonicClock
from tests.support.runner_driver import RunnerDriver
from tests.support.scarce_memory import LoadedRunner
from tests.support.tiny_model import tiny_model
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import make_torch_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPT = [(position * 7919) % 500 + 3 for position in range(300)]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedRunner]:
    config = TorchRunnerConfig(
        model_path=str(tiny_model(max_context=1024, hidden_size=192, num_heads=6, num_kv_heads=2)),
        device="cuda",
        dtype=request.param,
        device_memory_bytes=2 << 30,
        max_total_tokens=32_768,
        max_running_requests=40,
        chunked_prefill_size=512,
        deterministic=True,
    )
    runner = make_torch_runner(config, MonotonicClock())
    yield LoadedRunner(runner, runner.load())
    runner.close()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("chunk", "companions"), [(1 << 30, 20), (7, 3), (16, 35), (64, 0)])
def test_bits_do_not_depend_on_batch_and_chunks(
    loaded: LoadedRunner, values: dict[str, float], chunk: int, companions: int
) -> None:
    """Behaviour 30: tokens and their log probabilities, and those of the prompt."""
    alone = RunnerDriver(loaded)
    alone.generate(0, PROMPT, 24, logprobs=5, prompt_logprobs=5, history=PROMPT_ARRAY, **values)
    beside = RunnerDriver(loaded)
    for row in range(1, companions + 1):
        beside.begin(row, PROMPT[: 20 + row], temperature=0.7, seed=row)
        beside.prefill(row)
    beside.begin(0, PROMPT, logprobs=5, prompt_logprobs=5, history=PROMPT_ARRAY, **values)
    others = dict.fromkeys(range(1, companions + 1), 0)
    while (left := len(PROMPT) - beside.rows[0].computed) > 0:
        beside.check(beside.step({0: min(chunk, left), **others}))
    beside.decode(range(companions + 1), 23)
    assert beside.rows[0].tokens == alone.rows[0].tokens
    assert beside.rows[0].told == alone.rows[0].told


PROMPT_ARRAY = torch.tensor(PROMPT, dtype=torch.int32).numpy()
