"""Vocabularies made in code, cut so that characters lie across tokens, for tests of text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_characters() -> list[str]:
    """The character by which a byte-level vocabulary writes each byte: index is the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        characters.setdefault(byte, chr(256 + len(characters) - len(printable)))
    assert set(characters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [characters[byte] for byte in range(256)]


def byte_level_tokenizer(pieces: Sequence[bytes], special: Sequence[str] = ()) -> Tokenizer:
    """A byte-level vocabulary of 256 single bytes (id = byte), then `pieces` in order, then special tokens."""
    characters = byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(characters)}
    for piece in pieces:
        vocabulary.setdefault("".join(characters[byte] for byte in piece), len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def piece_ids(tokenizer: Tokenizer, pieces: Sequence[bytes]) -> list[int]:
    """The ids of pieces of a byte-level vocabulary."""
    characters = byte_characters()
    vocabulary = tokenizer.get_vocab()
    return [vocabulary["".join(characters[byte] for byte in piece)] for piece in pieces]


def byte_fallback_tokenizer(words: Sequence[str]) -> Tokenizer:
    """A SentencePiece-like vocabulary: 256 byte tokens (id = byte), then `words`, their spaces written U+2581."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in words:
        vocabulary.setdefault(word.replace(" ", "▁"), len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0x00>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
