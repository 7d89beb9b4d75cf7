"""What a model takes of a device, by arithmetic from its configuration: for plans made without model or device.

weights       parameters x bytes of their format; formats below 16 bits hold the linear layers only, and leave the
              embedding, the head and the norms at 16 bits, as published checkpoints do
KV            2 (K and V) x layers x KV heads x head size x bytes, a token
activations   an estimate of the largest step; a worker measures instead, at start
CUDA graphs   the activations of the largest recorded step, and what the driver keeps of each; measured as well
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.core.graph_sizes import graph_sizes
from worker.model.configuration import ModelConfig

_GATHERED_TOKENS = 65_536
"""Keys and values of so many tokens are gathered at once (worker/runner/attention/sdpa.py)."""
_SAMPLING_BYTES = 36
"""A row and vocabulary entry, while the sampler filters and cumulates: logits, a copy as the model gave them and scores
in float32, sums in 64."""

GRAPH_LAYER_BYTES = 256 << 10
"""What the driver keeps of one layer of a recorded step: an assumption, of the order of what engines that record steps
of 8B models report. A worker measures it.
"""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are stored."""

    name: str
    linear_bits: float
    """Bits of a weight in a linear layer of the transformer's blocks, scales of its group included."""
    other_bits: int
    """Bits of all other weights."""
    is_served: bool
    """Whether this engine computes with it. The others are planned for all the same."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of an element of the KV cache and of activations beside such weights."""
        return self.other_bits // 8


FORMATS = {
    each.name: each
    for each in (
        WeightFormat("float32", 32, 32, is_served=True),
        WeightFormat("bfloat16", 16, 16, is_served=True),
        WeightFormat("float16", 16, 16, is_served=True),
        WeightFormat("fp8", 8, 16, is_served=False),
        WeightFormat("int8", 8, 16, is_served=False),
        WeightFormat("int4", 4.25, 16, is_served=False),
    )
}
"""By name, larger ones first. int4: groups of 128 with a 16-bit scale and a zero point."""


@dataclass(frozen=True, slots=True)
class ActivationEstimate:
    """Bytes that the largest step is thought to hold beside weights and KV: its parts."""

    layer: int
    """One layer's tensors for all tokens of the step, and the keys and values that attention gathers."""
    sampling: int
    """Logits, and the sampler's scores and sums over the vocabulary."""
    rows: int
    """For each request, one row of KV slots of the longest context, and counts of tokens. Always there."""

    @property
    def total(self) -> int:
        """Layer and sampling follow each other, so the larger of them counts."""
        return max(self.layer, self.sampling) + self.rows


def weights_bytes(config: ModelConfig, weights: WeightFormat) -> int:
    """Bytes of all weights in the given format."""
    linear = config.num_layers * num_linear_weights(config)
    bits = linear * weights.linear_bits + (config.num_parameters - linear) * weights.other_bits
    return round(bits / 8)


def num_linear_weights(config: ModelConfig) -> int:
    """Elements of the weight matrices of one layer."""
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * query + 2 * key_value) + 3 * config.hidden_size * config.intermediate_size


def estimate_activations(
    config: ModelConfig, *, chunk: int, rows: int, context: int, element_bytes: int
) -> ActivationEstimate:
    """For a step of a prompt's chunk beside a decode on each other row, at the longest context.

    The formula follows worker/model/llama.py: hidden states and their norm, then either the MLP's fused projection,
    its two halves' product and its activation, or q, k and v with their rotated copies and what attention gathers.
    """
    tokens = chunk + rows - 1
    key_value = config.num_kv_heads * config.head_dim
    gathered = 2 * key_value * min(max(_GATHERED_TOKENS, context), rows * context)
    layer = _layer_elements(config, tokens, gathered) * element_bytes
    return ActivationEstimate(
        layer=layer,
        sampling=rows * config.vocab_size * _SAMPLING_BYTES + tokens * config.hidden_size * element_bytes,
        rows=rows * (context + config.vocab_size) * 4,
    )


def estimate_graphs(config: ModelConfig, *, rows: int, element_bytes: int) -> int:
    """Bytes of the CUDA graphs of all sizes that a worker with so many rows records."""
    sizes = graph_sizes(rows)
    activations = _layer_elements(config, sizes[-1], gathered=0) * element_bytes
    return activations + len(sizes) * config.num_layers * GRAPH_LAYER_BYTES


def _layer_elements(config: ModelConfig, tokens: int, gathered: int) -> int:
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp = tokens * 4 * config.intermediate_size
    attention = tokens * (4 * query + 4 * key_value) + gathered
    return tokens * 2 * config.hidden_size + max(mlp, attention)
