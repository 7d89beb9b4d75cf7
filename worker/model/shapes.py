"""Shapes of well-known models, to plan for one without having it.

Each is what the model's published config.json says (its Hugging Face repository is named beside it); the number of
parameters that follows is the one its repository states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from worker.model.configuration import Llama3Scaling, ModelConfig


@dataclass(frozen=True, slots=True)
class KnownShape:
    """One model."""

    source: str
    """Hugging Face repository whose config.json says so."""
    config: ModelConfig


_LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
    max_context_tokens=131_072,
    sliding_window=None,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(128_001, 128_008, 128_009),
)
_QWEN25 = replace(
    _LLAMA,
    architecture="Qwen2ForCausalLM",
    vocab_size=152_064,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    max_context_tokens=32_768,
    qkv_bias=True,
    eos_token_ids=(151_643, 151_645),
)
_QWEN3 = replace(
    _QWEN25,
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    max_context_tokens=40_960,
    qkv_bias=False,
    qk_norm=True,
)
_MISTRAL = replace(
    _LLAMA,
    architecture="MistralForCausalLM",
    vocab_size=32_768,
    rope_theta=1e6,
    rope_scaling=None,
    max_context_tokens=32_768,
    eos_token_ids=(2,),
)
_SMOLLM2 = replace(
    _LLAMA, vocab_size=49_152, rope_theta=100_000.0, rope_scaling=None, max_context_tokens=8192, eos_token_ids=(2,)
)


def _known(
    source: str, family: ModelConfig, sizes: tuple[int, int, int, int, int], head_dim: int, *, is_tied: bool
) -> KnownShape:
    """`sizes`: hidden, intermediate, layers, heads, KV heads."""
    hidden, intermediate, layers, heads, kv_heads = sizes
    config = replace(
        family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=is_tied,
    )
    return KnownShape(source, config)


KNOWN_SHAPES: dict[str, KnownShape] = {
    "llama-3.1-8b": _known("meta-llama/Llama-3.1-8B", _LLAMA, (4096, 14_336, 32, 32, 8), 128, is_tied=False),
    "llama-3.1-70b": _known("meta-llama/Llama-3.1-70B", _LLAMA, (8192, 28_672, 80, 64, 8), 128, is_tied=False),
    "llama-3.1-405b": _known("meta-llama/Llama-3.1-405B", _LLAMA, (16_384, 53_248, 126, 128, 8), 128, is_tied=False),
    "llama-3.2-1b": _known("meta-llama/Llama-3.2-1B", _LLAMA, (2048, 8192, 16, 32, 8), 64, is_tied=True),
    "llama-3.2-3b": _known("meta-llama/Llama-3.2-3B", _LLAMA, (3072, 8192, 28, 24, 8), 128, is_tied=True),
    "qwen2.5-7b": _known("Qwen/Qwen2.5-7B-Instruct", _QWEN25, (3584, 18_944, 28, 28, 4), 128, is_tied=False),
    "qwen2.5-72b": _known("Qwen/Qwen2.5-72B-Instruct", _QWEN25, (8192, 29_568, 80, 64, 8), 128, is_tied=False),
    "qwen3-0.6b": _known("Qwen/Qwen3-0.6B", _QWEN3, (1024, 3072, 28, 16, 8), 128, is_tied=True),
    "qwen3-4b": _known("Qwen/Qwen3-4B", _QWEN3, (2560, 9728, 36, 32, 8), 128, is_tied=True),
    "qwen3-8b": _known("Qwen/Qwen3-8B", _QWEN3, (4096, 12_288, 36, 32, 8), 128, is_tied=False),
    "qwen3-14b": _known("Qwen/Qwen3-14B", _QWEN3, (5120, 17_408, 40, 40, 8), 128, is_tied=False),
    "qwen3-32b": _known("Qwen/Qwen3-32B", _QWEN3, (5120, 25_600, 64, 64, 8), 128, is_tied=False),
    "mistral-7b": _known("mistralai/Mistral-7B-Instruct-v0.3", _MISTRAL, (4096, 14_336, 32, 32, 8), 128, is_tied=False),
    "smollm2-135m": _known("HuggingFaceTB/SmolLM2-135M-Instruct", _SMOLLM2, (576, 1536, 30, 9, 3), 64, is_tied=True),
}
"""By the name that `radixfleet doctor --plan --model` takes."""
