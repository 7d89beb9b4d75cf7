"""Rotary position embeddings, rotating the two halves of each head (the layout of Hugging Face checkpoints).

frequency(i) = theta ^ (-2 i / head_dim), scaled as the configuration says
out = x * cos(position * frequency) + swap_halves(x) * (-sin | +sin)(position * frequency)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model.configuration import LinearScaling, Llama3Scaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position for each pair of a head's elements: float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3_scaled(frequencies, config.rope_scaling)


def _llama3_scaled(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths longer than original_context / low_freq_factor are stretched by `factor`, those shorter than
    original_context / high_freq_factor kept, and those between blended linearly in 1 / wavelength.
    """
    rotations = scaling.original_context * frequencies / (2 * math.pi)
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * frequencies + (1 - blend) * frequencies / scaling.factor


class RotaryEmbedding:
    """Rotates queries and keys. Angles are tabled in float32 for all positions once."""

    def __init__(self, frequencies: Tensor, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        cosine, sine = angles.cos(), angles.sin()
        self._cosine = torch.cat((cosine, cosine), dim=-1).to(device, dtype)
        self._signed_sine = torch.cat((-sine, sine), dim=-1).to(device, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self._cosine.nbytes + self._signed_sine.nbytes

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The factors of all positions, each [max_positions, head_dim]."""
        return self._cosine, self._signed_sine

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The factors for `rotate`, each [num_tokens, 1, head_dim]; the same for all layers of a step."""
        return (
            self._cosine.index_select(0, positions).unsqueeze(1),
            self._signed_sine.index_select(0, positions).unsqueeze(1),
        )


def rotate(heads: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates [num_tokens, num_heads, head_dim] by the factors of its tokens' positions."""
    cosine, signed_sine = factors
    low, high = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cosine, torch.cat((high, low), dim=-1), signed_sine)
