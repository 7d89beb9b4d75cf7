"""A tokenizer as the files that a Hugging Face directory has of it, in a zip: what gateways make their own one from.

Everything comes from the `TokenizerSpec`, so models from GGUF files have them, too. Equal specs give equal bytes.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping

from radixfleet.text import TokenizerSpec

_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest that a zip can name: the bytes must not depend on when they were made."""


def tokenizer_archive(spec: TokenizerSpec, *, max_context_tokens: int) -> bytes:
    """tokenizer.json, tokenizer_config.json, config.json, generation_config.json and the chat template, zipped."""
    ids = {"bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids)}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": spec.bos_token,
        "eos_token": spec.eos_token,
        "add_bos_token": spec.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context_tokens,
        "chat_template": spec.chat_template,
    }
    config = {"vocab_size": spec.vocab_size, "max_position_embeddings": max_context_tokens, **ids}
    files = {
        "tokenizer.json": spec.tokenizer_json,
        "tokenizer_config.json": _json(tokenizer_config),
        "config.json": _json(config),
        "generation_config.json": _json(ids),
    }
    if spec.chat_template is not None:
        files["chat_template.jinja"] = spec.chat_template
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), text, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _json(fields: Mapping[str, object]) -> str:
    return json.dumps({name: value for name, value in fields.items() if value is not None}, ensure_ascii=False)
