"""Steps of decodes replayed from CUDA graphs against the same steps launched kernel by kernel."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.support.decoded_rows import PROMPTS, check_alike, decoded
from tests.support.tiny_model import tiny_model
from worker.runner.cuda_graphs import CudaRecorder
from worker.runner.torch_config import AttentionName, TorchRunnerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 1 << 20


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
    check_alike(replayed, launched)


def test_the_plan_leaves_room_for_what_graphs_keep() -> None:
    """Behaviour 62: what recording took is what had been measured for it, give or take what an allocator rounds to.

    On a device that nobody else uses meanwhile.
    """
    config = TorchRunnerConfig(
        model_path=str(tiny_model(num_layers=24, max_context=1024, hidden_size=512, num_heads=8, num_kv_heads=2)),
        device="cuda",
        dtype="bfloat16",
        device_memory_bytes=8 << 30,
        max_total_tokens=32_768,
        max_running_requests=128,
        chunked_prefill_size=512,
    )
    line = decoded(config)[1]["CUDA graphs recorded"]
    print(f"graphs: {line['bytes'] / MIB:.0f} MiB taken, {line['planned_bytes'] / MIB:.0f} MiB planned")
    assert line["bytes"] <= line["planned_bytes"] + 64 * MIB
    assert line["planned_bytes"] <= 4 * line["bytes"] + 128 * MIB


def test_a_record_that_fails_leaves_the_device_as_it_was() -> None:
    """What is recorded must not wait for the device. Steps are then launched kernel by kernel, on the same stream."""
    numbers = torch.arange(1000, device="cuda")
    recorder, before = CudaRecorder(numbers.device), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        recorder(lambda: numbers.add_(int(numbers.sum())))
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()
    assert int((numbers + 1).sum() - numbers.sum()) == 1000
