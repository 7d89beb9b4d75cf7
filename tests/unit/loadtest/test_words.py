"""Prompts as words: what is shared stays shared, and nothing else becomes so."""

from __future__ import annotations

import numpy as np

from loadtest.tokens import Run, TokenSource
from loadtest.words import WORDS, as_words


def test_a_word_for_each_id_and_shared_prefixes_stay_shared():
    source = TokenSource(vocab_size=30_000, seed=3)
    first, second = (source.tokens((Run(1, 40), Run(name, 20))) for name in (2, 3))
    words = [as_words(ids).split(" ")[1:] for ids in (first, second)]
    assert [len(each) for each in words] == [60, 60]
    assert words[0][:40] == words[1][:40]
    assert words[0][40:] != words[1][40:]


def test_every_word_has_its_space_before_it():
    ids = np.arange(len(WORDS), dtype=np.int32)
    assert as_words(ids) == "".join(f" {word}" for word in WORDS)
    assert len(set(WORDS)) == len(WORDS)
