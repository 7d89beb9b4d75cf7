"""Prompts as runs of pseudo-random tokens, made when they are asked for.

A run is a name and a length; its tokens depend on the name, the seed and the position within the run alone. So equal
names give equal tokens, what two prompts share is exact and known without looking at tokens, and a workload of ten
thousand long prompts takes no memory for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixfleet.types import TokenArray


class Run(NamedTuple):
    """`length` tokens that a name stands for. A shorter run of the same name is the beginning of a longer one."""

    name: int
    """0 <= name < 2 ** 32; no two names give the same tokens, but for chance and a small vocabulary."""
    length: int


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Makes the tokens of runs: ids drawn evenly from [0, vocab_size)."""

    vocab_size: int
    seed: int

    def tokens(self, runs: Sequence[Run]) -> TokenArray:
        """The tokens of `runs`, one after the other: uint32 [sum of lengths]."""
        lengths = np.array([run.length for run in runs], dtype=np.int64)
        names = np.array([run.name for run in runs], dtype=np.uint32)
        starts = np.cumsum(lengths) - lengths
        positions = (np.arange(lengths.sum()) - np.repeat(starts, lengths)).astype(np.uint32)
        salt = _mixed(np.array([self.seed & 0xFFFFFFFF], dtype=np.uint32))
        places: TokenArray = np.repeat(_mixed(names ^ salt), lengths) + positions * np.uint32(0x9E3779B1)
        mixed = _mixed(places)
        return (mixed.astype(np.uint64) * np.uint64(self.vocab_size) >> np.uint64(32)).astype(np.uint32)


def _mixed(values: TokenArray) -> TokenArray:
    """32 well-mixed bits for each value: the finalizer of MurmurHash3 (A. Appleby, public domain), a bijection."""
    mixed: TokenArray = values ^ (values >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed
