"""What the numbers of a model's configuration may be. A model outside of these fails late, or answers with noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.model.errors import BrokenModel

if TYPE_CHECKING:
    from worker.model.configuration import ModelConfig

_WHOLE = "a whole number"


@dataclass(frozen=True, slots=True)
class _Bound:
    field: str
    """Of `ModelConfig`."""
    key: str
    """In config.json."""
    gguf_key: str
    """In GGUF metadata, behind the architecture."""
    is_real: bool = False
    """Any positive number; else a whole one from 1."""


_BOUNDS = (
    _Bound("vocab_size", "vocab_size", "the rows of token_embd.weight"),
    _Bound("hidden_size", "hidden_size", "embedding_length"),
    _Bound("intermediate_size", "intermediate_size", "feed_forward_length"),
    _Bound("num_layers", "num_hidden_layers", "block_count"),
    _Bound("num_heads", "num_attention_heads", "attention.head_count"),
    _Bound("num_kv_heads", "num_key_value_heads", "attention.head_count_kv"),
    _Bound("head_dim", "head_dim", "attention.key_length"),
    _Bound("max_context_tokens", "max_position_embeddings", "context_length"),
    _Bound("sliding_window", "sliding_window", "attention.sliding_window"),
    _Bound("rms_norm_eps", "rms_norm_eps", "attention.layer_norm_rms_epsilon", is_real=True),
    _Bound("rope_theta", "rope_theta", "rope.freq_base", is_real=True),
)


def check_bounds(config: ModelConfig, path: Path, *, is_gguf: bool = False) -> None:
    """Raises BrokenModel, which names the file, the key and what is wrong with it. `path`: of the file."""
    keys = {bound.field: bound.gguf_key if is_gguf else bound.key for bound in _BOUNDS}
    for bound in _BOUNDS:
        value = getattr(config, bound.field)
        if bound.is_real:
            if not 0 < value < math.inf:
                raise BrokenModel(f"{path}: {keys[bound.field]} is {value:g}, and must be a positive number")
        elif value is not None and whole(path, keys[bound.field], value) < 1:
            raise BrokenModel(f"{path}: {keys[bound.field]} is {value}, and must be {_WHOLE} from 1")
    if config.head_dim % 2:
        raise BrokenModel(f"{path}: {keys['head_dim']} is {config.head_dim}, and must be even: pairs are rotated")
    share(path, (keys["num_heads"], config.num_heads), (keys["num_kv_heads"], config.num_kv_heads))


def whole(path: Path, key: str, value: Any) -> int:
    """The same. Raises BrokenModel where it is no whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise BrokenModel(f"{path}: {key} is {value!r}, and must be {_WHOLE}")
    return value


def share(path: Path, whole: tuple[str, int], parts: tuple[str, int]) -> int:
    """One number over another, each with its key. Raises BrokenModel where a rest is left, or there are no parts."""
    (whole_key, of), (key, number) = whole, parts
    if number < 1 or of % number:
        raise BrokenModel(f"{path}: {key} is {number}, and must divide {whole_key}, which is {of}")
    return of // number
