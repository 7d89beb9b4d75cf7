"""Builds a byte-level BPE tokenizer from GGUF metadata: vocabulary, merges, and no more than the pre-tokenizer's name.

    tokenizer.ggml.model         "gpt2": byte-level BPE. SentencePiece ("llama") and others are refused
    tokenizer.ggml.pre           how text is cut before merging: one of `PRE_TOKENIZERS`
    tokenizer.ggml.tokens        the vocabulary, in the byte-to-character alphabet of GPT-2
    tokenizer.ggml.merges        "left right", best first
    tokenizer.ggml.token_type    3: control, recognised in text and skipped on decoding; 4: user-defined, recognised

A wrong cut gives wrong ids without any error, so an unknown `pre` is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from worker.model.errors import BrokenModel, UnsupportedModel
from worker.model.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family of models cuts text."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken as that token, whatever the merges say."""
    nfc: bool = False
    """Text is brought to Unicode normal form C first."""
    adds_bos: bool = False
    """Texts begin with the BOS token where the file does not say."""


def _byte_level() -> pre_tokenizers.PreTokenizer:
    """GPT-2's own expression."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    """Every numeric character (fractions and superscripts too) by itself, the rest as GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _expression(expression: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = PreTokenizer(lambda: _expression(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer(lambda: _expression(rf"{_WORDS}|\p{{N}}|{_REST}"), nfc=True)
_GPT2 = PreTokenizer(_byte_level)

PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": PreTokenizer(_single_digits),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
"""By the names that llama.cpp gives them in `tokenizer.ggml.pre`."""


_ENDS = frozenset({"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"})


def end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Control tokens that end an answer by their names, as in llama.cpp: a file names one or two, where the model's
    generation_config.json lists all.
    """
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
    return tuple(
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _ENDS
    )


def adds_bos(file: GgufFile) -> bool:
    """Whether texts begin with the BOS token, for a file whose tokenizer `tokenizer_from_gguf` makes."""
    default = PRE_TOKENIZERS[file.metadata.get("tokenizer.ggml.pre", "default")].adds_bos
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", default))


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises UnsupportedModel or BrokenModel."""
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind != "gpt2":
        raise UnsupportedModel(
            f"{file.path}: tokenizers of type {kind!r} are not read from GGUF files, only byte-level BPE ('gpt2'); "
            "use the Hugging Face directory of this model, whose tokenizer.json is complete"
        )
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{file.path}: the pre-tokenizer {name!r} is unknown (known: {', '.join(sorted(PRE_TOKENIZERS))}); "
            "use the Hugging Face directory of this model"
        )
    chosen = PRE_TOKENIZERS[name]
    try:
        tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    except KeyError as error:
        raise BrokenModel(f"{file.path} lacks the metadata {error}") from error
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [_merge(text, vocabulary, file) for text in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=chosen.ignore_merges))
    tokenizer.pre_tokenizer = chosen.make()
    tokenizer.decoder = decoders.ByteLevel()
    if chosen.nfc:
        tokenizer.normalizer = normalizers.NFC()
    types = metadata.get("tokenizer.ggml.token_type", [])
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    user_defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])
    return tokenizer


def _merge(text: str, vocabulary: dict[str, int], file: GgufFile) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not (left in vocabulary and right in vocabulary and left + right in vocabulary):  # the library would panic
        raise BrokenModel(f"{file.path}: vocabulary and merges do not fit together: {text!r} is merged and unknown")
    return left, right
