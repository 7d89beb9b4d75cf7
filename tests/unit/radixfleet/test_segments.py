"""Where a text is cut, and what the cache keeps."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from radixfleet.segments import SegmentCache, SegmentCutter
from tests.support.small_tokenizers import PLAIN, byte_level, token


def cutter(*added, **model) -> SegmentCutter:
    config = json.loads(byte_level(added or PLAIN).to_str())
    config["model"].update(model)
    return SegmentCutter(json.dumps(config))


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("", [""]),
        ("no tokens", ["no tokens"]),
        ("<|end|>", ["<|end|>"]),
        ("a<|end|>", ["a", "<|end|>"]),
        ("<|start|>a<|end|><|end|>b", ["<|start|>a", "<|end|>", "<|end|>b"]),
        ("<|endless|><|end", ["<|endless|><|end"]),
    ],
)
def test_a_text_is_cut_before_each_token(text, segments):
    assert cutter().cut(text) == segments


@pytest.mark.parametrize(
    "added",
    [
        token("<x>", normalized=True),
        token("<x>", lstrip=True),
        token("<x>", single_word=True),
        token("x>"),
        token("_x"),
        token(" x"),
    ],
    ids=lambda added: repr(added.content),
)
def test_tokens_that_are_not_safe_to_cut_at(added):
    text = f"a{added.content}b"
    assert cutter(added).cut(text) == [text]


def test_a_token_that_covers_another_is_not_cut_inside():
    assert cutter(token("<a>"), token("x<a>")).cut("x<a>y<a>") == ["x<a>y", "<a>"]


def test_a_random_model_is_never_cut():
    assert cutter(dropout=0.1).cut("a<|end|>b") == ["a<|end|>b"]
    assert cutter(dropout=0.0).cut("a<|end|>b") == ["a", "<|end|>b"]


def test_a_tokenizer_without_added_tokens():
    assert SegmentCutter('{"model": {}}').cut("a<b") == ["a<b"]


ENTRY = np.arange(50, dtype=np.uint32)
ENTRY_BYTES = 200 + 300 + "k1".__sizeof__()


class TestCache:
    def test_the_least_recently_used_leaves_first(self):
        cache = SegmentCache(10 * ENTRY_BYTES)
        for index in range(10):
            cache.put(f"k{index}", ENTRY)
        assert cache.num_bytes == 10 * ENTRY_BYTES
        assert cache.get("k0") is ENTRY
        cache.put("kk", ENTRY)
        assert cache.get("k1") is None
        assert cache.get("k0") is ENTRY
        assert cache.num_bytes == 10 * ENTRY_BYTES
        assert (cache.hits, cache.misses) == (2, 1)

    def test_one_big_text_does_not_push_out_the_rest(self):
        cache = SegmentCache(10 * ENTRY_BYTES)
        cache.put("k1", ENTRY)
        cache.put("big", np.zeros(1000, dtype=np.uint32))
        assert cache.get("big") is None
        assert cache.get("k1") is ENTRY

    def test_putting_again_counts_once(self):
        cache = SegmentCache(10 * ENTRY_BYTES)
        cache.put("k1", ENTRY)
        cache.put("k1", ENTRY)
        assert cache.num_bytes == ENTRY_BYTES

    def test_many_threads(self):
        cache = SegmentCache(20 * ENTRY_BYTES)
        wrong: list[str] = []

        def work(start: int) -> None:
            for index in range(start, start + 2000):
                key = str(index % 37)
                found = cache.get(key)
                if found is None:
                    cache.put(key, np.full(50, index % 37, dtype=np.uint32))
                elif found[0] != index % 37:
                    wrong.append(key)

        threads = [threading.Thread(target=work, args=(start,)) for start in (0, 11, 23, 31)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert cache.num_bytes <= 20 * ENTRY_BYTES
        assert cache.hits + cache.misses == 8000
