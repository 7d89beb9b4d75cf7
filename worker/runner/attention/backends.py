"""Attention backends by the names of the settings."""

from __future__ import annotations

from worker.model.configuration import ModelConfig
from worker.runner.attention.protocol import AttentionBackend
from worker.runner.attention.sdpa import SdpaBackend
from worker.runner.torch_config import AttentionName


def make_attention_backend(name: AttentionName, config: ModelConfig) -> AttentionBackend:
    """The backend of the given name for a model."""
    match name:
        case "sdpa":
            return SdpaBackend(config.num_kv_heads)
