"""The forward pass of the Llama family over a flat batch: tokens of all sequences one after another, no padding.

    hidden [num_tokens, hidden_size]
    each layer: hidden += output(attention(rotate(q), rotate(k), v))    q, k, v: one fused projection of norm(hidden)
                hidden += down(silu(gate) * up)                        gate, up: another
    logits = head(norm(hidden[output_rows]))                                   float32

What is neither linear nor attention is done by `LayerOps`, which compute it each in one go where the device has kernels
for that. The model keeps no state between calls and knows neither sequences nor the KV cache: whoever calls it passes
an `Attention`, which says where the new keys and values are kept and attends over the right ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from worker.memory.kv_pool import KvPlace
from worker.model.configuration import ModelConfig
from worker.model.layer_ops import HeadNorms, LayerOps, torch_ops
from worker.model.linear import LikeliestLinear, Linear
from worker.model.rotary import RotaryEmbedding

_FEW_LOGITS = 1 << 21
"""Above, several threads are faster in any case: one takes a millisecond for so many."""


class Attention(Protocol):
    """What a layer asks for: a place for K and V of the batch's tokens, then to attend with its queries."""

    def place(self, layer: int) -> KvPlace:
        """Where the layer writes K and V of all tokens before it attends."""
        ...

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]. Each token attends to itself and
        all before it in its sequence.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; projections that read the same input are fused into one."""

    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    """Per-head norms [head_dim] of models that have them."""
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear
    nbytes: int
    """Memory of all this on the device; a tied head counts again where its backend keeps a copy."""


class LlamaModel:
    """One model on one device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        rotary: RotaryEmbedding,
        ops: LayerOps | None = None,
    ) -> None:
        """`ops`: None: those of torch."""
        self.config = config
        self.weights = weights
        self._rotary = rotary
        self._ops = ops or torch_ops()
        # Asked once: whether something is of a protocol takes some 20 us to find out.
        self._likeliest = weights.head.likeliest if isinstance(weights.head, LikeliestLinear) else None

    @property
    def nbytes(self) -> int:
        """Bytes of weights and tables on the device."""
        return self.weights.nbytes + self._rotary.nbytes

    @property
    def rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of all positions: see `RotaryEmbedding`."""
        return self._rotary.tables

    def first_layers(self, num_layers: int) -> LlamaModel:
        """The same weights with only the first layers: to measure what a layer takes."""
        weights = replace(self.weights, layers=self.weights.layers[:num_layers])
        return LlamaModel(self.config, weights, self._rotary, self._ops)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention, output_rows: Tensor) -> Tensor:
        """Logits float32 [len(output_rows), vocab_size] of the tokens at the given indices of the batch.

        `input_ids` and `positions` are int64 [num_tokens]; `output_rows` is int64.
        """
        return self.logits(self.hidden(input_ids, positions, attention), output_rows)

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """What the layers make of the batch: [num_tokens, hidden_size], not normalized yet."""
        hidden = functional.embedding(input_ids, self.weights.embedding)
        added: Tensor | None = None  # what the last part of a layer gave: it is added where the next norm reads it
        factors = self._rotary.at(positions)
        for index, layer in enumerate(self.weights.layers):
            hidden, normed = self._add_and_norm(hidden, added, layer.attention_norm)
            added = self._attend(index, layer, normed, factors, attention)
            hidden, normed = self._add_and_norm(hidden, added, layer.mlp_norm)
            added = layer.down(self._ops.gate(layer.gate_up(normed)))
        return hidden if added is None else hidden + added

    @torch.inference_mode()
    def logits(self, hidden: Tensor, output_rows: Tensor) -> Tensor:
        """Logits float32 [len(output_rows), vocab_size] of some tokens of the batch, from what `hidden` returned."""
        if not len(output_rows):
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return _float32(self.weights.head(self._normed(hidden, output_rows)))

    @torch.inference_mode()
    def likeliest(self, hidden: Tensor, output_rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of some tokens of the batch the largest of the `logits`, float32, and the first token id that has it, int64;
        NaN is the largest. None where the head has no way to it that is faster than the logits.
        """
        return self._likeliest(self._normed(hidden, output_rows)) if self._likeliest is not None else None

    def _attend(
        self, index: int, layer: LayerWeights, normed: Tensor, factors: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        heads = layer.qkv(normed).view(len(normed), -1, self.config.head_dim)
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = HeadNorms(layer.query_norm, layer.key_norm, self.config.rms_norm_eps)
        q = self._ops.rotate_and_keep(heads, factors, norms, attention.place(index))
        return layer.output(attention(index, q))

    def _normed(self, hidden: Tensor, output_rows: Tensor) -> Tensor:
        _, normed = self._add_and_norm(hidden.index_select(0, output_rows), None, self.weights.norm)
        return normed

    def _add_and_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.add_and_norm(hidden, added, weight, self.config.rms_norm_eps)


def _float32(logits: Tensor) -> Tensor:
    """Few of a CPU's are converted by this thread alone: where cores are shared, 8 rows of 49,152 took 0.2 ms so, and 8
    with two threads of torch's, one of which had to be woken up.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.bfloat16 or logits.numel() > _FEW_LOGITS:
        return logits.float()
    converted = torch.empty(logits.shape, dtype=torch.float32)
    upper_halves = logits.view(torch.int16).numpy().view(np.uint16)  # a bfloat16 is the upper half of a float32
    np.left_shift(upper_halves, 16, out=converted.numpy().view(np.uint32), dtype=np.uint32)
    return converted
