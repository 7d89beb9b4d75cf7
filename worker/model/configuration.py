"""What a model is: the numbers that shape its forward pass, read from config.json or from GGUF metadata.

One family is supported: decoder-only transformers with RMSNorm, rotary positions, grouped-query attention and a gated
SiLU MLP. Everything that would silently change the result (another activation, an unknown RoPE scaling, quantized
checkpoints, experts) is refused here with a message that names it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from worker.model.bounds import check_bounds, share, whole
from worker.model.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from worker.model.gguf_file import GgufFile

HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MISTRAL_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All rotary frequencies are divided by one factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones kept, and those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model. Sizes in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_context_tokens: int
    """Positions the model was made for."""
    sliding_window: int | None
    """The model attends to no more than this many tokens back. Contexts up to the window need nothing special."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """A bias on attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm of each head's query and key, before the rotation (Qwen3)."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a generation by default, sorted."""

    @property
    def usable_context_tokens(self) -> int:
        """The longest context for which full attention is what the model was made with."""
        return min(self.max_context_tokens, self.sliding_window or self.max_context_tokens)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """K and V of one token over all layers, in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; tied embeddings count once."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value) + 2 * self.head_dim * self.qk_norm
        attention += (query + 2 * key_value) * self.qkv_bias + self.hidden_size * self.output_bias
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size


def load_config(path: Path) -> ModelConfig:
    """The configuration of a Hugging Face directory or a GGUF file."""
    if path.is_dir():
        return config_from_directory(path)
    return config_from_gguf(GgufFile(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model directory. Raises ModelNotFound or BrokenModel."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path.parent} has no {path.name}: is it a Hugging Face model directory?") from error
    except ValueError as error:
        raise BrokenModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BrokenModel(f"{path} does not hold a JSON object")
    return content


def config_from_directory(directory: Path) -> ModelConfig:
    """Reads config.json, and generation_config.json for further end-of-sequence tokens.

    Raises ModelNotFound, BrokenModel (a field is missing, or out of its bounds) or UnsupportedModel.
    """
    path = directory / "config.json"
    raw = read_json(path)
    architecture = next(iter(raw.get("architectures") or []), "none named")
    if architecture not in HF_ARCHITECTURES:
        raise UnsupportedModel(
            f"{directory}: architecture {architecture} is not supported; supported are {', '.join(HF_ARCHITECTURES)}"
        )
    _refuse_unsupported_fields(raw, directory)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = bool(raw.get("attention_bias", False)) and architecture != "MistralForCausalLM"
    try:
        count = partial(_count, raw, path)
        num_heads, hidden_size = count("num_attention_heads"), count("hidden_size")
        head_dim, num_kv_heads = raw.get("head_dim"), raw.get("num_key_value_heads")
        if head_dim is None:
            head_dim = share(path, ("hidden_size", hidden_size), ("num_attention_heads", num_heads))
        rope = _rope_parameters(raw, directory)
        config = ModelConfig(
            architecture=architecture,
            vocab_size=count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=count("intermediate_size"),
            num_layers=count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            rope_scaling=_rope_scaling(rope, directory),
            max_context_tokens=_context_tokens(count("max_position_embeddings"), rope),
            sliding_window=_sliding_window(raw, architecture),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=is_qwen2 or attention_bias,
            output_bias=attention_bias and not is_qwen2,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            eos_token_ids=_token_ids(count("vocab_size"), raw.get("eos_token_id"), generation.get("eos_token_id")),
        )
    except ModelError:
        raise
    except KeyError as error:
        raise BrokenModel(f"{path} lacks the field {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise BrokenModel(f"{path} has a field of the wrong type: {error}") from error
    check_bounds(config, path)
    return config


def _count(raw: dict[str, Any], path: Path, key: str) -> int:
    return whole(path, key, raw[key])


def _refuse_unsupported_fields(raw: dict[str, Any], directory: Path) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{directory}: activation {activation!r} is not supported, only 'silu'")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(
            f"{directory}: {method} checkpoints are not supported; use the unquantized directory or a GGUF file"
        )
    if raw.get("is_causal") is False:
        raise UnsupportedModel(f"{directory}: its tokens attend to later ones too (is_causal), so it makes no text")


def _rope_parameters(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What older files call rope_scaling and newer ones rope_parameters; some say a part of it beside them.

    Raises UnsupportedModel where it is not one rotation of whole heads, the same in all layers.
    """
    beside = {name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if raw.get(name) is not None}
    older, newer = _stated_rope(raw.get("rope_scaling")), _stated_rope(raw.get("rope_parameters"))
    parameters = beside | older | newer
    for name, value in (*beside.items(), *older.items()):
        if parameters[name] != value:
            raise UnsupportedModel(
                f"{directory}: {name} is given as {value} and as {parameters[name]}; remove the one that is not meant"
            )
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModel(f"{directory}: a rotation that differs between layers is not supported")
    if float(parameters.get("partial_rotary_factor") or 1) != 1:
        raise UnsupportedModel(f"{directory}: a partial rotary factor is not supported")
    return parameters


def _stated_rope(stated: Any) -> dict[str, Any]:
    """What is in one of the fields, under the newer names; null says nothing."""
    if not stated:
        return {}
    if not isinstance(stated, dict):
        raise TypeError(f"{stated!r} describes no rotation")
    said = {name: value for name, value in stated.items() if value is not None and name != "type"}
    return {"rope_type": stated.get("type") or "default"} | said


def _rope_scaling(parameters: dict[str, Any], directory: Path) -> RopeScaling | None:
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_factor(parameters["factor"], directory))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=_factor(parameters["factor"], directory),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_context=int(parameters["original_max_position_embeddings"]),
        )
        low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context
        if not (0 < low < high < math.inf and context >= 1):
            raise BrokenModel(
                f"{directory}: RoPE scaling with a low_freq_factor of {low:g}, a high_freq_factor of {high:g} and "
                f"original_max_position_embeddings of {context} is none: all must be positive, low below high"
            )
        return scaling
    raise UnsupportedModel(f"{directory}: RoPE scaling {kind!r} is not supported, only 'linear' and 'llama3'")


def _factor(stated: Any, path: Path) -> float:
    if not isinstance(stated, int | float) or not 0 < stated < math.inf:
        raise BrokenModel(f"{path}: a RoPE scaling factor of {stated!r} is none")
    return float(stated)


def _context_tokens(max_positions: int, rope: dict[str, Any]) -> int:
    """Linear scaling lengthens what a file states, as in vLLM and SGLang, unless the file states the original too."""
    if rope.get("rope_type") == "linear" and "original_max_position_embeddings" not in rope:
        return int(max_positions * float(rope["factor"]))
    return max_positions


def _sliding_window(raw: dict[str, Any], architecture: str) -> int | None:
    """Where a file is silent, transformers' defaults: they are what it was written with."""
    if architecture == "MistralForCausalLM":  # the window alone says so; Qwen has a switch beside it
        window = raw.get("sliding_window", _MISTRAL_WINDOW)
        return window or None
    layers = raw.get("layer_types")
    if not raw.get("use_sliding_window") or (layers and all(kind == "full_attention" for kind in layers)):
        return None
    return raw.get("sliding_window") or None


def _token_ids(vocab_size: int, *values: int | list[int] | None) -> tuple[int, ...]:
    """The union of fields that hold one id, several, or none. Ids that no token has, as -1, say nothing."""
    union: set[int] = set()
    for value in values:
        union.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(token_id for token_id in union if 0 <= token_id < vocab_size))


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the metadata of a GGUF file. Raises BrokenModel (a key is missing, or out of bounds) or UnsupportedModel."""
    architecture = file.metadata.get("general.architecture", "none named")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {architecture} is not supported; supported are {', '.join(GGUF_ARCHITECTURES)}"
        )
    field = partial(_gguf_field, file, architecture)
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(f"{file.path} is one part of several; join them with llama-gguf-split --merge")
    if field("expert_count", 0):
        raise UnsupportedModel(f"{file.path}: mixture-of-experts models are not supported")
    if not field("attention.causal", True):  # noqa: FBT003 - metadata
        raise UnsupportedModel(
            f"{file.path}: its tokens attend to later ones too (attention.causal), so it makes no text"
        )
    try:
        vocab_size = file.tensors["token_embd.weight"].shape[0]
    except KeyError as error:
        raise BrokenModel(f"{file.path} lacks the tensor token_embd.weight") from error
    num_heads, hidden_size = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length", 0)
    if not head_dim:
        head_dim = share(file.path, ("embedding_length", hidden_size), ("attention.head_count", num_heads))
    if field("rope.dimension_count", head_dim) != head_dim or field("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{file.path}: a partial rotation, or values of another size than keys, is not supported"
        )
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=field("feed_forward_length"),
        num_layers=field("block_count"),
        num_heads=num_heads,
        num_kv_heads=field("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_theta=field("rope.freq_base", 10_000.0),
        rope_scaling=_gguf_rope_scaling(file, architecture),
        max_context_tokens=field("context_length"),
        sliding_window=field("attention.sliding_window", 0) or None,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        eos_token_ids=_token_ids(
            vocab_size, *(file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
        ),
    )
    check_bounds(config, file.path, is_gguf=True)
    return config


def _gguf_field(file: GgufFile, architecture: str, name: str, default: Any = None) -> Any:
    """One value of the metadata. Raises BrokenModel, or UnsupportedModel where each layer has a value of its own."""
    value = file.metadata.get(f"{architecture}.{name}", default)
    if value is None:
        raise BrokenModel(f"{file.path} lacks the metadata {architecture}.{name}")
    if isinstance(value, list):
        raise UnsupportedModel(f"{file.path}: {architecture}.{name} differs between layers, which is not supported")
    if not isinstance(value, int | float):
        raise BrokenModel(f"{file.path}: {architecture}.{name} is {value!r}, and must be a number")
    return value


def _gguf_rope_scaling(file: GgufFile, architecture: str) -> RopeScaling | None:
    """Llama 3's scaling is no metadata here: the file carries its divisors as the tensor rope_freqs.weight.

    As llama.cpp reads it, a factor without a type is linear, and older files name the factor otherwise.
    """
    rope, metadata = f"{architecture}.rope.", file.metadata
    kind = metadata.get(rope + "scaling.type", "linear")
    if kind not in {"none", "linear"}:
        raise UnsupportedModel(f"{file.path}: RoPE scaling {kind!r} is not supported, only 'linear'")
    factor = _factor(metadata.get(rope + "scaling.factor") or metadata.get(rope + "scale_linear") or 1, file.path)
    return None if kind == "none" or factor == 1 else LinearScaling(factor)
