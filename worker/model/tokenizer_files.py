"""Makes a `TokenizerSpec` of the tokenizer files of a model. Imports no torch.

directory    tokenizer.json, tokenizer_config.json, chat_template.jinja, and config.json for what is above
GGUF         everything is in the metadata: see `gguf_tokenizer`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from radixfleet.text import TokenizerSpec
from worker.model.configuration import config_from_directory, config_from_gguf, read_json
from worker.model.errors import BrokenModel, ModelNotFound
from worker.model.gguf_file import GgufFile
from worker.model.gguf_tokenizer import adds_bos, tokenizer_from_gguf


def load_tokenizer_spec(path: Path) -> TokenizerSpec:
    """The tokenizer of a Hugging Face directory or a GGUF file. Raises ModelError."""
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _from_directory(directory: Path) -> TokenizerSpec:
    config = config_from_directory(directory)
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ModelNotFound(
            f"{directory} has no tokenizer.json; save it with transformers' AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...)"
        )
    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise BrokenModel(f"{path} cannot be read: {error}") from error
    settings_path = directory / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    bos_token, eos_token = _content(settings.get("bos_token")), _content(settings.get("eos_token"))
    bos_token_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    eos_token_ids = config.eos_token_ids
    if not eos_token_ids and eos_token is not None and (eos_id := tokenizer.token_to_id(eos_token)) is not None:
        eos_token_ids = (eos_id,)
    return TokenizerSpec(
        tokenizer_json=text,
        chat_template=_chat_template(directory, settings),
        bos_token=bos_token,
        eos_token=eos_token,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        add_bos=bos_token_id is not None and _adds_bos(tokenizer, settings, bos_token_id),
        vocab_size=config.vocab_size,
    )


def _content(token: str | dict[str, Any] | None) -> str | None:
    """The text of a special token, which files give as it is or as an object."""
    return token["content"] if isinstance(token, dict) else token


def _adds_bos(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any], bos_token_id: int) -> bool:
    """What the configuration says, and where it is silent, what the tokenizer's post-processor does."""
    stated = settings.get("add_bos_token")
    if stated is not None:
        return bool(stated)
    return tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_token_id]


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """The file of its own, as newer directories have it, before the field; of several named ones, "default"."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _from_gguf(path: Path) -> TokenizerSpec:
    file = GgufFile(path)
    config = config_from_gguf(file)
    metadata = file.metadata
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    bos_token_id: int | None = metadata.get("tokenizer.ggml.bos_token_id")
    eos_token_id: int | None = metadata.get("tokenizer.ggml.eos_token_id")
    tokenizer = tokenizer_from_gguf(file)
    return TokenizerSpec(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=_token_at(tokens, bos_token_id, path),
        eos_token=_token_at(tokens, eos_token_id, path),
        bos_token_id=bos_token_id,
        eos_token_ids=config.eos_token_ids,
        add_bos=bos_token_id is not None and adds_bos(file),
        vocab_size=config.vocab_size,
    )


def _token_at(tokens: list[str], token_id: int | None, path: Path) -> str | None:
    if token_id is None:
        return None
    if token_id >= len(tokens):
        raise BrokenModel(f"{path}: token {token_id} is outside the vocabulary of {len(tokens)}")
    return tokens[token_id]
