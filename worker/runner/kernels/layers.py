"""All layers of a step in one call of the kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from worker.memory.kv_pool import TokenToKVPool
from worker.model.configuration import ModelConfig
from worker.model.linear import Linear
from worker.model.llama import LayerWeights, LlamaModel
from worker.runner.attention.protocol import AttentionBatch
from worker.runner.kernels.batches import HostBatch
from worker.runner.kernels.library import AttentionShape, Kernels, Layer, LinearWeight, Model, Step
from worker.runner.kernels.linear import KernelLinear

_MULTIPLE = 32
_MAX_HEAD_DIM = 256
_MAX_LAYERS = 500


def supports(config: ModelConfig) -> bool:
    """The kernels can compute whole steps of this model."""
    sizes = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    return (
        all(size % _MULTIPLE == 0 for size in sizes)
        and config.head_dim <= _MAX_HEAD_DIM
        and config.head_dim % 2 == 0
        and config.num_layers <= _MAX_LAYERS
    )


def are_fast_for(kernels: Kernels | None, config: ModelConfig) -> bool:
    """There are kernels, and they compute whole steps of this model by vectors."""
    return kernels is not None and kernels.have_vectors and supports(config)


class KernelLayers:
    """The layers of a model over one KV pool. The model's linear layers were made by `KernelLinearBackend`."""

    def __init__(self, kernels: Kernels, model: LlamaModel, pool: TokenToKVPool) -> None:
        config = model.config
        self._kernels = kernels
        self._config = config
        self._held = (model, pool)  # whose memory the structures below point into
        self._layers = (Layer * len(model.weights.layers))(*(_layer(layer) for layer in model.weights.layers))
        cosine, signed_sine = model.rotary_tables
        self._model = Model(
            num_layers=len(model.weights.layers),
            hidden_size=config.hidden_size,
            shape=AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, 1),
            norm_epsilon=config.rms_norm_eps,
            embedding=model.weights.embedding.data_ptr(),
            layers=self._layers,
            cosine=cosine.data_ptr(),
            signed_sine=signed_sine.data_ptr(),
        )
        for tensor in (*pool.keys, *pool.values):
            kernels.prefer_large_pages(tensor)
        self._keys = np.array([tensor.data_ptr() for tensor in pool.keys], np.uint64)
        self._values = np.array([tensor.data_ptr() for tensor in pool.values], np.uint64)

    def hidden(self, input_ids: Tensor, positions: Tensor, slots: Tensor, batch: AttentionBatch) -> Tensor:
        """As `LlamaModel.hidden`; K and V of the new tokens are in the pool afterwards. int64 [num_tokens] each."""
        library, num_tokens = self._kernels.library, len(input_ids)
        host = HostBatch(batch)
        num_bytes = library.rf_workspace_bytes(self._kernels.team, ctypes.byref(self._model), num_tokens)
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        hidden = torch.empty((num_tokens, self._config.hidden_size), dtype=torch.bfloat16)
        step = Step(
            batch=host.batch,
            num_tokens=num_tokens,
            input_ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            keys=self._keys.ctypes.data,
            values=self._values.ctypes.data,
            workspace=workspace.data_ptr(),
            hidden=hidden.data_ptr(),
        )
        if library.rf_forward(self._kernels.team, ctypes.byref(self._model), ctypes.byref(step)):
            raise MemoryError("no memory for the attention plan of a step")
        return hidden


def _layer(layer: LayerWeights) -> Layer:
    return Layer(
        attention_norm=layer.attention_norm.data_ptr(),
        qkv=_weight(layer.qkv),
        query_norm=None if layer.query_norm is None else layer.query_norm.data_ptr(),
        key_norm=None if layer.key_norm is None else layer.key_norm.data_ptr(),
        output=_weight(layer.output),
        mlp_norm=layer.mlp_norm.data_ptr(),
        gate_up=_weight(layer.gate_up),
        down=_weight(layer.down),
    )


def _weight(linear: Linear) -> LinearWeight:
    assert isinstance(linear, KernelLinear), "the kernels compute what they have packed"
    return linear.weight
