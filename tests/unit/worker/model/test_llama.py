"""The forward pass against transformers, on random models with every switch of the configuration."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.support.plain_attention import CausalAttention
from tests.support.tiny_model import Architecture, tiny_model
from worker.model import llama
from worker.model.linear import DenseBackend
from worker.model.loading import load_model

SIZES = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "plain": (LlamaConfig, LlamaForCausalLM, {}),
    "biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "heads wider than the hidden size": (LlamaConfig, LlamaForCausalLM, {"head_dim": 16}),
    "as many KV heads as heads": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 6}),
    "rope llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "rope linear": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3 with biases": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "attention_bias": True}),
}


@pytest.mark.parametrize(("make_config", "make_model", "fields"), CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(
    tmp_path: Path, make_config: Any, make_model: Any, fields: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    reference = make_model(make_config(**(SIZES | fields))).eval()
    for name, parameter in reference.named_parameters():
        if name.endswith("bias") or "norm" in name:  # they begin as zeros and ones, which would hide a mistake
            parameter.data += 0.3 * torch.randn_like(parameter)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, linear_backend=DenseBackend())
    ids = torch.randint(100, (70,), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(70)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    logits = model.forward(ids, positions, CausalAttention(model.config, len(ids)), positions)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is for Linux")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_layers_by_kernels_of_triton_give_the_same_logits(architecture: Architecture) -> None:
    """Put together as a layer puts them together; by Triton's interpreter, where there is no GPU."""
    from worker.model.fused_ops import FUSED

    ids, positions, logits = torch.tensor([3, 77, 401, 9, 250]), torch.arange(5), []
    for ops in (None, FUSED):
        model = load_model(
            tiny_model(architecture),
            device=torch.device("cpu"),
            dtype=torch.float32,
            linear_backend=DenseBackend(),
            ops=ops,
        )
        logits.append(model.forward(ids, positions, CausalAttention(model.config, len(ids)), positions))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-4)


def test_first_layers_share_the_weights(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, linear_backend=DenseBackend())
    first = model.first_layers(1)
    assert len(first.weights.layers) == 1
    assert first.weights.layers[0] is model.weights.layers[0]
    assert len(model.weights.layers) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_every_dtype_are_exact_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of torch's threads is the whole process's: nobody touches it meanwhile."""
    monkeypatch.delattr(torch, "set_num_threads")
    logits = torch.randn((7, 100), generator=torch.Generator().manual_seed(3)).to(dtype)
    logits[0, :5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    with torch.inference_mode():
        converted = llama._float32(logits)
    assert converted.dtype == torch.float32
    torch.testing.assert_close(converted, logits.float(), rtol=0, atol=0, equal_nan=True)
    assert converted[0, :2].signbit().tolist() == [False, True]
