"""Tiny random models as Hugging Face directories, made in code: nothing is downloaded and transformers is not needed.

`tiny_model()` gives the directory of a two-layer Llama with a byte-level BPE tokenizer of 512 tokens and a ChatML
template. Directories are made once a process and removed at its end. The same arguments give the same files in every
process, so several workers and a reference agree on weights and tokens.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Architecture = Literal["llama", "qwen2", "qwen3", "mistral"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2. `<|im_start|>` is the BOS token, `<|im_end|>` ends a generation."""
EOS_TOKEN_ID = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "the worker keeps the prefix of each prompt in its cache and the router sends the next request where it is found",
    "a long prompt is computed in chunks so that running requests are not held up while the new one is prefilled",
    "pages of the pool are counted when they are taken and when they are given back, and nothing is ever lost",
    "Tell me about the weather in Paris, London and Berlin today, please. I would like to know the temperature.",
    "You are a helpful assistant. You answer briefly, and you say so when you do not know something.",
)


@functools.cache
def _root() -> str:
    root = tempfile.mkdtemp(prefix="radixfleet-tiny-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _train_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    syllables = ("".join(parts) for parts in itertools.product("bdklmnrst", "aeiou", "lnrst"))
    tokenizer.train_from_iterator([*_CORPUS, " ".join(syllables)], trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "the corpus gives no such vocabulary: ask for a smaller one"
    return tokenizer


def _config(architecture: Architecture, **sizes: Any) -> dict[str, Any]:
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    config: dict[str, Any] = {
        "architectures": [f"{names[architecture]}ForCausalLM"],
        "model_type": architecture,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
        **sizes,
    }
    if architecture == "mistral":
        config["sliding_window"] = None
    return config


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights scaled so that the residual stream keeps its size and greedy tokens vary."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, inner, vocab = config["head_dim"], config["intermediate_size"], config["vocab_size"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    weights = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
        "model.norm.weight": norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden, 3.0)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        attention = layer + "self_attn."
        weights |= {
            layer + "input_layernorm.weight": norm(hidden),
            layer + "post_attention_layernorm.weight": norm(hidden),
            attention + "q_proj.weight": matrix(heads * head_dim, hidden, 2.0),
            attention + "k_proj.weight": matrix(kv_heads * head_dim, hidden, 2.0),
            attention + "v_proj.weight": matrix(kv_heads * head_dim, hidden),
            attention + "o_proj.weight": matrix(hidden, heads * head_dim, 2.0),
            layer + "mlp.gate_proj.weight": matrix(inner, hidden),
            layer + "mlp.up_proj.weight": matrix(inner, hidden),
            layer + "mlp.down_proj.weight": matrix(hidden, inner, 2.0),
        }
        if config["model_type"] == "qwen2":
            for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                weights[f"{attention}{name}_proj.bias"] = 0.5 * torch.randn(size * head_dim, generator=generator)
        if config["model_type"] == "qwen3":
            weights |= {attention + "q_norm.weight": norm(head_dim), attention + "k_norm.weight": norm(head_dim)}
    return weights


@functools.cache
def tiny_model(
    architecture: Architecture = "llama",
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 512,
    max_context: int = 4096,
    tie_word_embeddings: bool = False,
    seed: int = 0,
) -> Path:
    """Directory with config, generation_config, tokenizer and tokenizer_config (.json) and model.safetensors."""
    config = _config(
        architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_context,
        tie_word_embeddings=tie_word_embeddings,
    )
    directory = Path(tempfile.mkdtemp(prefix=f"{architecture}-", dir=_root()))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "model_max_length": max_context,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {"bos_token_id": 1, "eos_token_id": [EOS_TOKEN_ID]}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (directory / name).write_text(json.dumps(content, indent=1))
    _train_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    save_file(_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
