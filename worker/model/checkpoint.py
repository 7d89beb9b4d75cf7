"""Weights by their Hugging Face names, whatever file they come from.

GGUF files name their tensors otherwise, and those of the `llama` architecture hold the rows of the q and k projections
in another order: llama.cpp rotates neighbouring pairs of elements where this code rotates the two halves of a head.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.model.configuration import ModelConfig, read_json
from worker.model.errors import BrokenModel, ModelNotFound
from worker.model.gguf_file import GgufFile


class Checkpoint(Protocol):
    """Read-only access to a model's tensors."""

    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU, in the dtype of the file. Raises BrokenModel when there is none."""
        ...


class SafetensorsCheckpoint:
    """A directory with model.safetensors, or several files and model.safetensors.index.json, which says what is where.

    Files may hold a tensor that the index takes from another one: what was replaced stays there.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ModelNotFound or BrokenModel."""
        self._directory = directory
        self._file_of: dict[str, Any] = {}  # open (mapped) files of the safetensors library, which has no public type
        self._indexed: dict[str, str] = {}
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if index.exists():
            self._open_indexed(index, single)
        elif single.exists():
            file, names = self._opened(single)
            self._file_of = dict.fromkeys(names, file)
        else:
            raise ModelNotFound(
                f"{directory} has no model.safetensors; models in pickle files (.bin, .pt) are not read: convert them"
            )

    def _open_indexed(self, index: Path, single: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise BrokenModel(f"{index} does not say which file holds which tensor; download it again")
        files = {name: self._opened(self._directory / name) for name in sorted(set(weight_map.values()))}
        if single.exists() and single.name not in files:
            raise BrokenModel(f"{single} is not among the files of {index.name}: remove the one that is out of date")
        for name, (file, held) in files.items():
            self._file_of |= {tensor: file for tensor in held if weight_map.get(tensor, name) == name}
        self._indexed = weight_map

    def _opened(self, path: Path) -> tuple[Any, frozenset[str]]:
        """A file, and the names of its tensors."""
        try:
            file: Any = safe_open(path, framework="pt")
            return file, frozenset(file.keys())
        except FileNotFoundError as error:
            raise BrokenModel(
                f"{self._directory} lacks {path.name}, which its index names; download it again"
            ) from error
        except SafetensorError as error:
            raise BrokenModel(f"{path} is damaged or cut short ({error}); download it again") from error

    def names(self) -> frozenset[str]:
        """Names of all tensors that are there, whether or not an index has them."""
        return frozenset(self._file_of)

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU. Raises BrokenModel when there is none."""
        if name not in self._file_of:
            raise BrokenModel(f"{self._directory / self._indexed.get(name, '')} lacks the tensor {name}")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


_GGUF_GLOBALS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r".*\.self_attn\.([qk])_proj\.(weight|bias)")


class GgufCheckpoint:
    """A GGUF file; all tensors come dequantized, as float32."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._gguf_name_of = {_hugging_face_name(name): name for name in file.tensors}

    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors; `rope_freqs.weight` has no counterpart there and keeps its name."""
        return frozenset(self._gguf_name_of)

    def tensor(self, name: str) -> Tensor:
        """One tensor as float32 on the CPU, with rows in Hugging Face order. Raises BrokenModel when there is none."""
        if name not in self._gguf_name_of:
            raise BrokenModel(f"{self._file.path} lacks the tensor {name}")
        tensor = torch.from_numpy(self._file.dequantized(self._gguf_name_of[name]))
        rotated = _ROTATED.fullmatch(name) if self._config.architecture == "llama" else None
        if rotated is None:
            return tensor
        return split_pairs(tensor, self._config.num_heads if rotated[1] == "q" else self._config.num_kv_heads)


def _hugging_face_name(name: str) -> str:
    layer = _GGUF_LAYER_TENSOR.fullmatch(name)
    if layer is None or layer[2] not in _GGUF_PARTS:
        return _GGUF_GLOBALS.get(name, name)
    return f"model.layers.{layer[1]}.{_GGUF_PARTS[layer[2]]}.{layer[3]}"


def split_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Undoes llama.cpp's order of the rows of one projection [num_heads * head_dim, ...].

    Within a head, rows 0 1 2 3 ... of the file are elements 0, d/2, 1, d/2 + 1, ...: pairs that are rotated together.
    """
    head_dim = len(rows) // num_heads
    return rows.view(num_heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
