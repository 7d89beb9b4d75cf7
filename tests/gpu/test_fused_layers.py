"""Layers with kernels of Triton between linear ones and attention, against torch's operations in their place."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.support.decoded_rows import PROMPTS, check_alike, decoded
from tests.support.tiny_model import Architecture, tiny_model
from worker.runner.torch_config import Dtype, TorchRunnerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_fused_layers_give_the_tokens_of_torch(architecture: Architecture, dtype: Dtype, cuda_graphs: bool) -> None:
    config = TorchRunnerConfig(
        model_path=str(tiny_model(architecture, max_context=1024, hidden_size=256)),
        device="cuda",
        dtype=dtype,
        device_memory_bytes=4 << 30,
        max_total_tokens=32_768,
        max_running_requests=len(PROMPTS),
        chunked_prefill_size=512,
        cuda_graphs=cuda_graphs,
    )
    fused, logged = decoded(config)
    assert "layers by kernels of Triton" in logged, logged
    plain, logged = decoded(msgspec.structs.replace(config, fused_layers=False))
    assert "layers by kernels of Triton" not in logged
    check_alike(fused, plain)
