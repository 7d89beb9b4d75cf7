"""The demonstration model's real file: its tokenizer by hand-checked ids, and what is known of its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixfleet.text import Tokenizer
from radixfleet.types import ChatMessage, ChatPrompt
from worker.model.configuration import load_config
from worker.model.sources import resolve_model
from worker.model.tokenizer_files import load_tokenizer_spec


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(load_tokenizer_spec(path))


def test_configuration(path: Path) -> None:
    config = load_config(path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.max_context_tokens, config.rope_theta, config.tie_word_embeddings) == (8192, 100_000.0, True)
    assert config.eos_token_ids == (2,)
    assert config.num_parameters == 134_515_008
    assert config.kv_bytes_per_token(2) == 23_040


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("1234", [33, 34, 35, 36]),
        ("x1234y", [104, 33, 34, 35, 36, 105]),
        ("½ a½b²", [16738, 253, 16738, 82, 19133]),
        ("<|im_start|>user\nHello<|im_end|>\n", [1, 4093, 198, 19556, 2, 198]),
        ("", []),
    ],
)
def test_ids(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """Numerals, fractions and superscripts stand alone: the pre-tokenizer that common converters lose."""
    assert tokenizer.encode(text).tolist() == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chats_get_the_models_own_system_prompt_when_they_have_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(ChatPrompt((ChatMessage("user", "Hi"),))) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
