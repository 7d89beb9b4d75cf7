"""The model's weights as other engines want them: a Hugging Face directory, or a GGUF file in another format.

A GGUF file is written out once into the cache, in the dtype that everybody computes with. The tensors are the very
ones that our engine loads, dequantized and rounded once.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from worker.dialects.tokenizer_archive import tokenizer_archive
from worker.model.checkpoint import GgufCheckpoint
from worker.model.configuration import LinearScaling, ModelConfig, config_from_gguf
from worker.model.errors import UnsupportedModel
from worker.model.gguf_file import GgufFile
from worker.model.tokenizer_files import load_tokenizer_spec

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}


def hugging_face_directory(model: Path, dtype: torch.dtype, cache: Path) -> Path:
    """The model as a directory: itself, or what its GGUF file says. Raises ModelError."""
    if model.is_dir():
        return model
    return _made_once(
        cache / f"{_stem(model)}-{dtype_name(dtype)}", lambda target: _write_directory(model, dtype, target)
    )


def gguf_file(model: Path, dtype: torch.dtype, cache: Path, convert: Callable[[Path, Path, str], None]) -> Path:
    """A GGUF file with the model's weights in `dtype`. `convert`: from file, to file, name of the format.

    Raises UnsupportedModel for a directory.
    """
    kinds = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

    def write(target: Path) -> None:
        target.mkdir()
        convert(model, target / "model.gguf", kinds[dtype])

    folder = _made_once(cache / f"{_stem(_checked_gguf(model))}-{kinds[dtype]}-gguf", write)
    return folder / "model.gguf"


def quantized_gguf_file(model: Path) -> Path:
    """The model's own GGUF file. Raises UnsupportedModel for a directory."""
    return _checked_gguf(model)


def _checked_gguf(model: Path) -> Path:
    if model.is_dir():
        raise UnsupportedModel(f"llama.cpp reads .gguf files, and {model} is a directory")
    return model


def _stem(model: Path) -> str:
    """Another file under the same name has another size or time."""
    status = model.stat()
    return f"{model.stem}-{status.st_size:x}-{status.st_mtime_ns:x}"


def dtype_name(dtype: torch.dtype) -> str:
    """As options have it, ours and everybody's."""
    return str(dtype).removeprefix("torch.")


def _made_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Whole or not at all, whoever else makes it at the same time."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=target.parent) as temporary:
        made = Path(temporary) / "made"
        write(made)
        try:
            os.replace(made, target)
        except OSError:  # another was first
            if not target.exists():
                raise
    return target


def _write_directory(model: Path, dtype: torch.dtype, target: Path) -> None:
    file = GgufFile(model)
    config = config_from_gguf(file)
    checkpoint = GgufCheckpoint(file, config)
    names = checkpoint.names()
    if "rope_freqs.weight" in names:
        raise UnsupportedModel(f"{model} has RoPE factors of its own: use the Hugging Face directory of this model")
    spec = load_tokenizer_spec(model)
    with zipfile.ZipFile(io.BytesIO(tokenizer_archive(spec, max_context_tokens=config.max_context_tokens))) as files:
        files.extractall(target)
    tensors = {name: checkpoint.tensor(name).to(dtype).contiguous() for name in names}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    ids = {"bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids)}
    fields = {**_config(config), **ids, "torch_dtype": dtype_name(dtype)}
    (target / "config.json").write_text(json.dumps(fields, indent=2))


def _config(config: ModelConfig) -> dict[str, object]:
    """As transformers writes it."""
    architecture, model_type = _ARCHITECTURES[config.architecture]
    scaling = config.rope_scaling
    if scaling is not None and not isinstance(scaling, LinearScaling):
        raise UnsupportedModel("this RoPE scaling is not written: use the Hugging Face directory of the model")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "linear", "factor": scaling.factor},
        "max_position_embeddings": config.max_context_tokens,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
    }
