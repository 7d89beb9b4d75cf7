"""A `TokenizerSpec` from the contents of a model's tokenizer files, wherever they come from: a directory or an archive.

One function for both, so that a worker that reads a directory and a router that is sent its files by another engine
have equal specs, and equal fingerprints.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from radixfleet.text import TokenizerSpec

MAX_ARCHIVE_FILE_BYTES = 128 * 1024**2
_TOOL_TEMPLATE = "tool_use"
_TEMPLATE_FILES = ("chat_template.jinja", f"additional_chat_templates/{_TOOL_TEMPLATE}.jinja")


def spec_from_files(
    tokenizer_json: str,
    settings: Mapping[str, Any],
    *,
    chat_template: str | None,
    eos_token_ids: Sequence[int],
    vocab_size: int,
) -> TokenizerSpec:
    """`settings`: what is in tokenizer_config.json. `chat_template`: of a file of its own, which goes before theirs.

    Raises ValueError when tokenizer_json is none.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the tokenizer cannot be read: {error}") from error
    bos_token, eos_token = _content(settings.get("bos_token")), _content(settings.get("eos_token"))
    bos_token_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    ends = set(eos_token_ids)
    if eos_token is not None and (eos_id := tokenizer.token_to_id(eos_token)) is not None:
        ends.add(eos_id)  # chat models are made of others, whose end alone config.json goes on to name
    return TokenizerSpec(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template if chat_template is not None else _template(settings),
        bos_token=bos_token,
        eos_token=eos_token,
        bos_token_id=bos_token_id,
        eos_token_ids=tuple(sorted(ends)),
        add_bos=bos_token_id is not None and _adds_bos(tokenizer, settings, bos_token_id),
        vocab_size=vocab_size,
    )


class ArchivedFiles(NamedTuple):
    """What is read of an engine's zip. Equal files make equal ones, where the bytes of two zips may differ."""

    tokenizer_json: str
    config: str
    chat_template: str | None

    def spec(self, *, eos_token_ids: Sequence[int], vocab_size: int) -> TokenizerSpec:
        """Takes seconds for a large one. Raises ValueError for what is no tokenizer."""
        return spec_from_files(
            self.tokenizer_json,
            _json_object("tokenizer_config.json", self.config),
            chat_template=self.chat_template,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
        )


def archived_files(data: bytes) -> ArchivedFiles:
    """The files of a zip. Raises ValueError for anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            tokenizer_json = _read(archive, "tokenizer.json")
            config = _read(archive, "tokenizer_config.json") or "{}"
            chat_template = joined_template(*(_read(archive, name) for name in _TEMPLATE_FILES))
    except Exception as error:  # zipfile raises whatever its decompressors do
        raise ValueError(f"the engine's tokenizer files are no zip that can be read: {error}") from error
    if tokenizer_json is None:
        raise ValueError("the engine's tokenizer files hold no tokenizer.json")
    return ArchivedFiles(tokenizer_json, config, chat_template)


def spec_from_directory(directory: Path) -> TokenizerSpec:
    """From a Hugging Face directory; of the model's own files, only those about its tokens are read, where they are.

    Raises ValueError that says what is missing.
    """
    path = directory / "tokenizer.json"
    try:
        tokenizer_json = path.read_text(encoding="utf-8")
        settings = _json_file(directory / "tokenizer_config.json")
        model = _json_file(directory / "config.json")
        generation = _json_file(directory / "generation_config.json")
        chat_template = template_of_directory(directory)
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{directory} holds no tokenizer that can be read: {error}") from error
    ends = generation.get("eos_token_id", model.get("eos_token_id"))
    return spec_from_files(
        tokenizer_json,
        settings,
        chat_template=chat_template,
        eos_token_ids=ends if isinstance(ends, list) else [] if ends is None else [ends],
        vocab_size=max(tokenizer.get_vocab_size(), model.get("vocab_size") or 0),
    )


def template_of_directory(directory: Path) -> str | None:
    """The chat template that has files of its own. Raises OSError, or UnicodeDecodeError."""
    paths = [directory / name for name in _TEMPLATE_FILES]
    return joined_template(*(path.read_text(encoding="utf-8") if path.exists() else None for path in paths))


def joined_template(default: str | None, with_tools: str | None) -> str | None:
    """One template of a model's two, of which `with_tools` lays out chats with tools, as transformers chooses."""
    if default is None or with_tools is None:
        return default
    # As if each were alone: line breaks after our tags are not rendered, nor is the last one of a template.
    tools, plain = with_tools.removesuffix("\n"), default.removesuffix("\n")
    return f"{{% if tools %}}\n{tools}{{%+ else %}}\n{plain}{{%+ endif %}}"


def _json_file(path: Path) -> dict[str, Any]:
    """Empty when there is no such file."""
    return _json_object(path.name, path.read_text(encoding="utf-8")) if path.exists() else {}


def _json_object(name: str, text: str) -> dict[str, Any]:
    """As Python reads it, which takes NaN and lone surrogates too. Raises ValueError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds no JSON object")  # noqa: TRY004  whoever reads files expects this
    return value


def _read(archive: zipfile.ZipFile, name: str) -> str | None:
    """None when there is no such file."""
    try:
        about = archive.getinfo(name)
    except KeyError:
        return None
    if about.file_size > MAX_ARCHIVE_FILE_BYTES:
        raise ValueError(f"{name} has {about.file_size} bytes, more than a tokenizer's")
    return archive.read(name).decode()


def _content(token: str | dict[str, Any] | None) -> str | None:
    """The text of a special token, which files give as it is or as an object."""
    return token["content"] if isinstance(token, dict) else token


def _adds_bos(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], bos_token_id: int) -> bool:
    """What the configuration says, and where it is silent, what the tokenizer's post-processor does."""
    stated = settings.get("add_bos_token")
    if stated is not None:
        return bool(stated)
    return tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_token_id]


def _template(settings: Mapping[str, Any]) -> str | None:
    """The field, which may hold several by their names."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return joined_template(named.get("default"), named.get(_TOOL_TEMPLATE))
    return template
