"""Makes a `TokenizerSpec` of the tokenizer files of a model. Imports no torch.

directory    tokenizer.json, tokenizer_config.json, chat templates, and config.json for what is above
GGUF         everything is in the metadata: see `gguf_tokenizer`
"""

from __future__ import annotations

from pathlib import Path

from radixfleet.text import TokenizerSpec
from radixfleet.tokenizer_files import joined_template, spec_from_files, template_of_directory
from worker.model.configuration import config_from_directory, config_from_gguf, read_json
from worker.model.errors import BrokenModel, ModelNotFound
from worker.model.gguf_file import GgufFile
from worker.model.gguf_tokenizer import adds_bos, end_token_ids, tokenizer_from_gguf


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
    settings_path = directory / "tokenizer_config.json"
    try:
        return spec_from_files(
            path.read_text(encoding="utf-8"),
            read_json(settings_path) if settings_path.exists() else {},
            chat_template=template_of_directory(directory),
            eos_token_ids=config.eos_token_ids,
            vocab_size=config.vocab_size,
        )
    except ValueError as error:
        raise BrokenModel(f"{path} cannot be read: {error}") from error


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
        chat_template=joined_template(
            metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_template.tool_use")
        ),
        bos_token=_token_at(tokens, bos_token_id, path),
        eos_token=_token_at(tokens, eos_token_id, path),
        bos_token_id=bos_token_id,
        eos_token_ids=tuple(sorted({*config.eos_token_ids, *end_token_ids(file)})),
        add_bos=bos_token_id is not None and adds_bos(file),
        vocab_size=config.vocab_size,
    )


def _token_at(tokens: list[str], token_id: int | None, path: Path) -> str | None:
    if token_id is None:
        return None
    if token_id >= len(tokens):
        raise BrokenModel(f"{path}: token {token_id} is outside the vocabulary of {len(tokens)}")
    return tokens[token_id]
