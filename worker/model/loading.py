"""Loads a model: a directory or file on disk becomes a `LlamaModel` on a device.

Layers are read, converted and packed one after another: the host needs little more memory than the model itself.
Every tensor of the checkpoint must be used: one that is left over means that the model does something we do not. And
every number must be one: a single NaN spoils whatever reads it, and no request would be to blame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from worker.model.checkpoint import Checkpoint, GgufCheckpoint, SafetensorsCheckpoint
from worker.model.configuration import ModelConfig, config_from_directory, config_from_gguf
from worker.model.errors import BrokenModel, UnsupportedModel
from worker.model.gguf_file import GgufFile
from worker.model.layer_ops import LayerOps
from worker.model.linear import Linear, LinearBackend
from worker.model.llama import LayerWeights, LlamaModel, ModelWeights
from worker.model.rotary import RotaryEmbedding, inverse_frequencies

Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers in all)."""


def load_model(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    linear_backend: LinearBackend,
    max_context: int | None = None,
    ops: LayerOps | None = None,
    progress: Progress = lambda _done, _total: None,
) -> LlamaModel:
    """Loads a Hugging Face directory or a GGUF file.

    `max_context` bounds the positions that can be computed (None: all that the model was made for). `ops`: see
    `LlamaModel`. Raises ModelError.
    """
    config, checkpoint = _open(path)
    loader = _Loader(config, checkpoint, device, dtype, linear_backend)
    weights = loader.weights(progress)
    frequencies = inverse_frequencies(config) / loader.frequency_divisors()
    loader.refuse_leftovers(path)
    rotary = RotaryEmbedding(frequencies, max_context or config.max_context_tokens, dtype, device)
    return LlamaModel(config, weights, rotary, ops)


def _open(path: Path) -> tuple[ModelConfig, Checkpoint]:
    if path.is_dir():
        return config_from_directory(path), SafetensorsCheckpoint(path)
    file = GgufFile(path)
    config = config_from_gguf(file)
    return config, GgufCheckpoint(file, config)


class _Loader:
    """One load. Notes which tensors were taken."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        linear_backend: LinearBackend,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._linear_backend = linear_backend
        self._taken: set[str] = set()
        self._nbytes = 0

    def weights(self, progress: Progress) -> ModelWeights:
        config = self._config
        embedding = self._take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = []
        for index in range(config.num_layers):
            layers.append(self._layer(f"model.layers.{index}."))
            progress(index + 1, config.num_layers)
        if config.tie_word_embeddings:
            self._refuse_other_head()
            head = self._linear_backend.prepare(embedding, None)
            self._nbytes += 0 if self._linear_backend.shares_weight else head.nbytes
        else:
            head = self._fused(("lm_head",), (config.vocab_size,), config.hidden_size, with_bias=False)
        norm = self._norm("model.norm", config.hidden_size)
        return ModelWeights(embedding, tuple(layers), norm, head, self._nbytes + embedding.nbytes)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        return LayerWeights(
            attention_norm=self._norm(prefix + "input_layernorm", hidden),
            qkv=self._fused(
                (attention + "q_proj", attention + "k_proj", attention + "v_proj"),
                (query, key_value, key_value),
                hidden,
                with_bias=config.qkv_bias,
            ),
            query_norm=self._norm(attention + "q_norm", config.head_dim) if config.qk_norm else None,
            key_norm=self._norm(attention + "k_norm", config.head_dim) if config.qk_norm else None,
            output=self._fused((attention + "o_proj",), (hidden,), query, with_bias=config.output_bias),
            mlp_norm=self._norm(prefix + "post_attention_layernorm", hidden),
            gate_up=self._fused(
                (mlp + "gate_proj", mlp + "up_proj"), (inner, inner), hidden, with_bias=config.mlp_bias
            ),
            down=self._fused((mlp + "down_proj",), (hidden,), inner, with_bias=config.mlp_bias),
        )

    def _fused(
        self, names: tuple[str, ...], out_features: tuple[int, ...], in_features: int, *, with_bias: bool
    ) -> Linear:
        weight = self._joined(
            (sum(out_features), in_features),
            [(name + ".weight", (rows, in_features)) for name, rows in zip(names, out_features, strict=True)],
        )
        bias = None
        if with_bias:
            parts = [(name + ".bias", (rows,)) for name, rows in zip(names, out_features, strict=True)]
            bias = self._joined((sum(out_features),), parts)
        linear = self._linear_backend.prepare(weight, bias)
        self._nbytes += linear.nbytes
        return linear

    def _joined(self, shape: tuple[int, ...], parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Parts one below the other, each read into its place: the device holds nothing twice."""
        joined, first = torch.empty(shape, device=self._device, dtype=self._dtype), 0
        for name, part_shape in parts:
            part = self._read(name, part_shape)
            place = joined[first : first + len(part)]
            place.copy_(part)
            first += len(part)
            del part  # before the next one is read
            refuse_nan(name, place)
        return joined

    def _norm(self, name: str, size: int) -> Tensor:
        norm = self._take(name + ".weight", (size,))
        self._nbytes += norm.nbytes
        return norm

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._read(name, shape).to(self._device, self._dtype)
        refuse_nan(name, tensor)
        return tensor

    def _refuse_other_head(self) -> None:
        """Files may hold a tied head a second time. Where it is another one, transformers does not tie it."""
        names = ("lm_head.weight", "model.embed_tokens.weight")
        if names[0] not in self._checkpoint.names():
            return
        self._taken.add(names[0])
        head, embedding = (self._checkpoint.tensor(name).to(self._dtype) for name in names)
        if not torch.equal(head, embedding):
            raise BrokenModel(
                f"tensor {names[0]} is not that of {names[1]}, to which the configuration ties it: "
                "set tie_word_embeddings to false in config.json, or remove the tensor"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """On the host, as the checkpoint has it."""
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise BrokenModel(f"tensor {name} has the shape {tuple(tensor.shape)}, the configuration asks for {shape}")
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"tensor {name} holds {tensor.dtype}: quantized directories are not supported")
        self._taken.add(name)
        return tensor

    def frequency_divisors(self) -> Tensor | float:
        """GGUF files carry the scaling of Llama 3.1 as divisors of the rotary frequencies."""
        name = "rope_freqs.weight"
        if name not in self._checkpoint.names():
            return 1.0
        self._taken.add(name)
        return self._checkpoint.tensor(name).float()

    def refuse_leftovers(self, path: Path) -> None:
        left = {name for name in self._checkpoint.names() - self._taken if "rotary_emb.inv_freq" not in name}
        if left:
            some = ", ".join(sorted(left)[:3])
            raise UnsupportedModel(
                f"{path} holds {len(left)} tensors that a {self._config.architecture} model does not have "
                f"({some}, ...): it is of another kind than its configuration says"
            )


def refuse_nan(name: str, tensor: Tensor) -> None:
    """Raises BrokenModel, for infinity too: a dtype of smaller range has it in place of what is too large."""
    if not all(math.isfinite(bound.item()) for bound in tensor.aminmax()):
        raise BrokenModel(
            f"tensor {name} holds NaN, or numbers too large for {str(tensor.dtype).removeprefix('torch.')}: "
            "download the model again, or set another --dtype"
        )
