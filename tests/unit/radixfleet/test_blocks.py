"""The block hash against committed literals: a change that breaks them breaks every fleet that is being upgraded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash

from radixfleet import blocks
from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, namespace, seed_hash
from radixfleet.types import BlockHash


def slow_seed(parts: tuple[str, ...]) -> int:
    """The definition, byte by byte."""
    data = b"radixfleet-blocks" + bytes([1, 0, 0, 0])
    for part in parts:
        data += len(part.encode()).to_bytes(8, "little") + part.encode()
    return int(xxhash.xxh3_64_hexdigest(data), 16)


def slow_chain(parent: int, tokens: list[int]) -> list[int]:
    """The definition, token by token."""
    hashes = []
    for start in range(0, len(tokens) - 63, 64):
        data = parent.to_bytes(8, "little") + b"".join(
            token.to_bytes(4, "little") for token in tokens[start : start + 64]
        )
        parent = int(xxhash.xxh3_64_hexdigest(data), 16)
        hashes.append(parent)
    return hashes


def test_constants_are_those_of_scheme_1():
    assert (blocks.BLOCK_TOKENS, blocks.BLOCK_SCHEME) == (64, 1)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((), 0x5CA2D5D715E8E05A),
        (namespace("demo"), 0x20BEDD15F7D1FB5A),
        (namespace("m", cache_salt="salt", lora="lora"), 0x32F0D795229B7BD8),
    ],
)
def test_seed_vectors(parts, expected):
    assert seed_hash(parts) == expected
    assert slow_seed(parts) == expected


@pytest.mark.parametrize(
    ("parent", "tokens", "expected"),
    [
        (0x20BEDD15F7D1FB5A, list(range(200)), [0x841666C2C4DDDF40, 0xC42F9A62E75346A7, 0x80C87F11EAE809E2]),
        (0, [2**32 - 1] * 64, [0x1379FCC4834D63B]),
    ],
)
def test_chain_vectors(parent, tokens, expected):
    assert chain_hashes(BlockHash(parent), np.array(tokens, dtype=np.uint32)).tolist() == expected
    assert slow_chain(parent, tokens) == expected


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 1000])
def test_only_whole_blocks_have_a_hash(length):
    hashes = chain_hashes(BlockHash(7), np.arange(length, dtype=np.uint32))
    assert hashes.dtype == np.uint64
    assert len(hashes) == length // BLOCK_TOKENS
    assert hashes.tolist() == slow_chain(7, list(range(length)))


def test_the_form_of_the_array_does_not_matter():
    tokens = np.arange(256, dtype=np.uint32)
    expected = chain_hashes(BlockHash(1), tokens).tolist()
    strided = np.arange(512, dtype=np.uint32)
    strided[::2] = tokens
    read_only = np.frombuffer(tokens.tobytes(), dtype=np.uint32)
    for form in (tokens.astype(np.int32), tokens.astype(">u4"), strided[::2], read_only):
        assert chain_hashes(BlockHash(1), form).tolist() == expected


def test_a_chain_can_be_continued():
    tokens = np.arange(640, dtype=np.uint32)
    whole = chain_hashes(BlockHash(3), tokens)
    head = chain_hashes(BlockHash(3), tokens[:256])
    tail = chain_hashes(BlockHash(int(head[-1])), tokens[256:])
    assert [*head.tolist(), *tail.tolist()] == whole.tolist()


def test_namespaces_that_concatenate_alike_differ():
    """Behaviour 27: namespaces are tuples; moving a character from one part to the next is another namespace."""
    texts = ["", "a", "b", "ab", "ba", "a\0", "\0a"]
    seeds = [seed_hash(parts) for parts in itertools.product(texts, repeat=3)]
    assert len(set(seeds)) == len(seeds)
    assert seed_hash(("a",)) != seed_hash(("a", ""))
