"""Writes a model directory of `tiny_model` as a GGUF file, in the form that llama.cpp's converter gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    directory: Path,
    target: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "default",
    metadata: dict[str, Any] | None = None,
    rope_freqs: np.ndarray | None = None,
) -> Path:
    """`kind` is the format of matrices (vectors stay F32); `metadata` adds unsigned integers and strings."""
    config = json.loads((directory / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, directory, config, pre)
    for name, value in (metadata or {}).items():
        writer.add_key_value(
            name, value, gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
        )
    for name, tensor in load_file(directory / "model.safetensors").items():
        if architecture == "llama":
            tensor = _interleaved(name, tensor, config)
        used = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(tensor, used), raw_dtype=used)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any], pre: str) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    size = tokenizer.get_vocab_size()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokenizer.id_to_token(index) for index in range(size)])
    writer.add_token_types([3 if index in special else 1 for index in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"])


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, index, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{index}.{_PARTS[part]}.{suffix}"


def _interleaved(name: str, tensor: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """llama.cpp's order of the rows of q and k: the two elements that are rotated together become neighbours."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for part, num_heads in heads.items():
        if f".{part}." in name:
            half = len(tensor) // num_heads // 2
            return tensor.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(tensor.shape)
    return tensor
