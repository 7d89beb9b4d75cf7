"""A model of any shape with random weights, made in memory: to measure what computing it takes."""

from __future__ import annotations

import dataclasses

import torch

from worker.model.configuration import ModelConfig
from worker.model.linear import DenseBackend, Linear
from worker.model.llama import LayerWeights, LlamaModel, ModelWeights
from worker.model.rotary import RotaryEmbedding, inverse_frequencies
from worker.model.shapes import KNOWN_SHAPES


def shape(**sizes: object) -> ModelConfig:
    """A plain Llama of the given sizes."""
    config = KNOWN_SHAPES["llama-3.1-8b"].config
    return dataclasses.replace(config, rope_scaling=None, **sizes)  # type: ignore[arg-type]


def random_model(config: ModelConfig, dtype: torch.dtype) -> LlamaModel:
    """All layers share one layer's weights."""
    cpu, backend = torch.device("cpu"), DenseBackend()

    def linear(out_features: int, in_features: int) -> Linear:
        return backend.prepare(torch.randn(out_features, in_features, dtype=dtype) * 0.02, None)

    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    norm = torch.ones(hidden, dtype=dtype)
    layer = LayerWeights(
        attention_norm=norm,
        qkv=linear(query + 2 * config.num_kv_heads * config.head_dim, hidden),
        query_norm=None,
        key_norm=None,
        output=linear(hidden, query),
        mlp_norm=norm,
        gate_up=linear(2 * config.intermediate_size, hidden),
        down=linear(hidden, config.intermediate_size),
    )
    embedding = torch.randn(config.vocab_size, hidden, dtype=dtype)
    weights = ModelWeights(
        embedding=embedding,
        layers=(layer,) * config.num_layers,
        norm=norm,
        head=linear(config.vocab_size, hidden),
        nbytes=0,
    )
    rotary = RotaryEmbedding(inverse_frequencies(config), config.max_context_tokens, dtype, cpu)
    return LlamaModel(config, weights, rotary)
