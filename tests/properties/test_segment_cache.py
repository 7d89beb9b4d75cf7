"""Cutting text at added tokens never changes its ids, for every kind of tokenizer and of added token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixfleet.segments import SegmentCache, SegmentCutter
from radixfleet.text import Tokenizer
from tests.support.small_tokenizers import (
    PLAIN,
    byte_level,
    digits_then_bytes,
    metaspace,
    prepending,
    spec_of,
    token,
    unigram,
    word_piece,
)

# Tokens that overlap, contain each other, begin with letters or spaces, strip, want to stand alone, or are normalized.
AWKWARD = (
    *PLAIN,
    token("<|end|>x"),
    token("<|end|><"),
    token("|><|"),
    token("word"),
    token("word<|"),
    token(" gap"),
    token("<left>", lstrip=True),
    token("<right>", rstrip=True),
    token("<both>", lstrip=True, rstrip=True),
    token("<alone>", single_word=True),
    token("alone", single_word=True),
    token("[Norm]", normalized=True),
    token("<tool>", special=False),
    token("fox", special=False, normalized=True),
)
KINDS = {
    "byte level": byte_level,
    "byte level with prefix space": lambda added: byte_level(added, prefix_space=True),
    "digits": digits_then_bytes,
    "metaspace first": lambda added: metaspace("first", added),
    "metaspace always": lambda added: metaspace("always", added),
    "metaspace never": lambda added: metaspace("never", added),
    "prepending normalizer": prepending,
    "word piece": word_piece,
    "unigram": unigram,
}
TOKENIZERS = {
    (kind, name): make(added)
    for (kind, make), (name, added) in itertools.product(KINDS.items(), [("plain", PLAIN), ("awkward", AWKWARD)])
}
pieces = st.sampled_from([added.content for added in AWKWARD]) | st.sampled_from(
    [
        "hello",
        " hello",
        "the ",
        " ",
        "  ",
        "\n",
        "_",
        "x",
        "7",
        "É",
        "▁",
        "<",
        "|",
        "<|",
        "|>",
        "<|end",
        "12 3",
        "[norm]",
        "🦊",
    ]
)
texts = st.lists(pieces, max_size=12).map("".join)


@pytest.mark.parametrize("key", TOKENIZERS, ids=" ".join)
@settings(max_examples=60)
@given(text=texts)
def test_cut_ids_are_whole_ids(key, text):
    tokenizer = TOKENIZERS[key]
    cutter = SegmentCutter(tokenizer.to_str())
    segments = cutter.cut(text)
    assert "".join(segments) == text
    ids = [token_id for segment in segments for token_id in tokenizer.encode(segment, add_special_tokens=False).ids]
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("key", TOKENIZERS, ids=" ".join)
@settings(max_examples=20)
@given(conversation=st.lists(texts, max_size=4))
def test_cached_encoding_is_uncached_encoding(key, conversation):
    """A chat grows turn by turn, with a cache so small that entries come and go."""
    spec = spec_of(TOKENIZERS[key])
    cached, uncached = Tokenizer(spec, cache_bytes=8_000), Tokenizer(spec, cache_bytes=0)
    for turns in itertools.accumulate(conversation):
        assert cached.encode(turns).tolist() == uncached.encode(turns).tolist()
        assert cached.cache.num_bytes <= 8_000


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 40)), max_size=60), st.integers(0, 3000))
def test_the_cache_is_bounded_and_never_wrong(operations, max_bytes):
    cache = SegmentCache(max_bytes)
    written: dict[str, list[int]] = {}
    for key, size in operations:
        found = cache.get(key)
        if found is None:
            cache.put(key, np.arange(size, dtype=np.uint32))
            written[key] = list(range(size))
        else:
            assert found.tolist() == written[key]
        assert 0 <= cache.num_bytes <= max_bytes
    assert cache.hits + cache.misses == len(operations)
