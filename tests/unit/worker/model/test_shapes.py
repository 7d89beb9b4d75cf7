from __future__ import annotations

import pytest

from worker.model.shapes import KNOWN_SHAPES

PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
    "smollm2-135m": 134_515_008,
}
"""As their repositories state them: a wrong size anywhere would give another number."""


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert KNOWN_SHAPES[name].config.num_parameters == PARAMETERS[name]


def test_key_value_heads_divide_the_heads() -> None:
    """What the number of parameters would not tell: heads and their size."""
    for name, shape in KNOWN_SHAPES.items():
        assert shape.config.num_heads % shape.config.num_kv_heads == 0, name
        assert shape.config.head_dim in (64, 128), name
        assert "/" in shape.source
