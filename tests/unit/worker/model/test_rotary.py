import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.tiny_model import tiny_model
from worker.model.configuration import LinearScaling, Llama3Scaling, ModelConfig, load_config
from worker.model.rotary import RotaryEmbedding, inverse_frequencies, rotate


def config(**fields: Any) -> ModelConfig:
    return replace(load_config(tiny_model()), head_dim=128, rope_theta=500_000.0, **fields)


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
def test_scaled_frequencies_are_those_of_transformers(
    scaling: LinearScaling | Llama3Scaling, parameters: dict[str, object]
) -> None:
    reference = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500_000.0, **parameters},
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](reference, torch.device("cpu"))
    assert attention_factor == 1.0
    torch.testing.assert_close(inverse_frequencies(config(rope_scaling=scaling)), expected, rtol=1e-6, atol=0)


def test_unscaled_frequencies() -> None:
    frequencies = inverse_frequencies(config())
    assert frequencies[0] == 1.0
    assert frequencies[32].item() == pytest.approx(500_000.0**-0.5)


def test_rotation_is_that_of_complex_numbers() -> None:
    frequencies = torch.tensor([1.0, 0.1])
    rotary = RotaryEmbedding(frequencies, 100, torch.float32, torch.device("cpu"))
    heads = torch.randn(3, 2, 4)
    positions = torch.tensor([0, 7, 99])
    rotated = rotate(heads, rotary.at(positions))
    for token, position in enumerate(positions.tolist()):
        for pair in range(2):
            before = torch.complex(heads[token, :, pair], heads[token, :, pair + 2])
            angle = position * frequencies[pair].item()
            after = before * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(rotated[token, :, pair], after.real, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(rotated[token, :, pair + 2], after.imag, atol=1e-5, rtol=1e-5)
    assert torch.equal(rotated[0], heads[0])
