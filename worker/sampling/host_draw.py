"""Draws tokens on a CPU: those that `worker.sampling.sampler` draws elsewhere, for a fraction of the work.

    scores -> threshold of the filters (top_k, top_p, min_p) -> candidates -> their noise -> the largest score + noise

Noise is dear, two logarithms a token, and few tokens need it. Of a row with filters, those that it keeps. Of a row
without, those that could win: the bits of a token's hash give at once a bound that its noise stays below, and a token
whose bound is less than what another really has needs no logarithms. As a rule some ten of a vocabulary remain, and
the winner among them is the winner among all. No row depends on another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from worker.sampling.batch import SamplingBatch
from worker.sampling.noise import gumbel, hashes

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint32]

_TILE = 1 << 16
"""Scores looked at together."""
_NUM_CANDIDATES = 1024
"""Sorting this many is several times cheaper than sorting a vocabulary, and nearly always enough."""
_MAGNITUDE, _BUCKET_BITS = 0x7FFFFFFF, 16
"""Of a score's bits, those without the sign, and how many scores of one bucket differ in."""
_A_BIT = math.log(2) * 2.0**-23
"""What the bits of a positive float32 number, taken as an integer, grow by: its logarithm grows by that, or less."""
_HIGHEST = (127 + 31) * math.log(2)
_SLACK = 1e-3
"""More than what rounding does to a bound."""


class Drawing(NamedTuple):
    """Rows that draw a token."""

    logits: Floats
    """[n, vocab]"""
    rows: npt.NDArray[np.int64]
    """[m]: those of them that draw."""
    largest: Floats
    """[m]: of each, the largest of its logits, finite."""
    batch: SamplingBatch
    """What each asks for."""

    def scores(self, part: slice) -> Floats:
        """Of some of the rows that draw, made anew."""
        # Subtracting first keeps the likeliest token at 0, however small the temperature is.
        scores: Floats = self.logits[self.rows[part]] - self.largest[part, None]
        with np.errstate(over="ignore"):
            scores /= self.batch.temperature[part, None]
        return scores


Winners: TypeAlias = Callable[[Drawing, Floats], Tokens]
"""Of each row the token with the largest score and noise, of those whose score is at least the one given."""


def thresholds(drawing: Drawing) -> Floats:
    """The score of the last token that each row's filters keep; -inf: all of them.

    What the filters mean: see `worker.sampling.filters`.
    """
    batch = drawing.batch
    with np.errstate(divide="ignore"):
        least = np.log(batch.min_p).astype(np.float32)
    for row in np.flatnonzero((batch.top_k > 0) | (batch.top_p < 1)).tolist():
        kept, k, share = drawing.scores(slice(row, row + 1))[0], int(batch.top_k[row]), float(batch.top_p[row])
        if 0 < k < len(kept):
            last = np.partition(kept, -k)[-k]
            kept = kept[kept >= last]
            least[row] = max(least[row], last)
        if share < 1:
            least[row] = max(least[row], _nucleus(kept, share))
    return least


def _nucleus(scores: Floats, share: float) -> float:
    """The least score of the smallest set of the likeliest that have this share of the probability of all."""
    weights = np.exp(scores)
    mass = share * weights.sum(dtype=np.float64)
    if len(scores) <= _NUM_CANDIDATES:
        return _last_within(scores, mass)
    candidates = np.partition(scores, -_NUM_CANDIDATES)[-_NUM_CANDIDATES:]
    if np.exp(candidates).sum(dtype=np.float64) >= mass:
        return _last_within(candidates, mass)
    return _last_within(*_bucket_at(mass, scores, weights))


def _bucket_at(mass: float, scores: Floats, weights: Floats) -> tuple[Floats, float]:
    """The few scores at which the likeliest, added up, come to have a mass, and what of it is left to them.

    Buckets are told apart by the upper half of a score's bits, which are ordered as scores are.
    """
    buckets = ((scores.view(np.int32) & _MAGNITUDE) >> _BUCKET_BITS).astype(np.intp)  # which bincount need not convert
    masses = np.bincount(buckets, weights).cumsum()
    bucket = min(int(np.searchsorted(masses, mass)), len(masses) - 1)
    return scores[buckets == bucket], mass - (masses[bucket - 1] if bucket else 0.0)


def _last_within(scores: Floats, mass: float) -> float:
    ordered = np.sort(scores)[::-1]
    reached = int(np.searchsorted(np.exp(ordered).cumsum(dtype=np.float64), mass))
    return float(ordered[min(reached, len(ordered) - 1)])


def winners_by_bounds(drawing: Drawing, least: Floats) -> Tokens:
    """See `Winners`. In tiles that fit a core's cache: of a large vocabulary one row at a time."""
    tokens, streams = np.empty(len(least), np.int64), drawing.batch.streams
    at_once = max(1, _TILE // drawing.logits.shape[1])
    for begin in range(0, len(least), at_once):
        tile = slice(begin, begin + at_once)
        tokens[tile] = _winners(drawing.scores(tile), least[tile], streams[tile])
    return tokens


def _winners(scores: Floats, least: Floats, streams: _Words) -> Tokens:
    """Of each row of `scores` [n, vocab] the token with the largest score and noise, of those with `least` or more."""
    num_rows, vocab_size = scores.shape
    has_filter = least > -np.inf
    if has_filter.all():
        is_candidate = scores >= least[:, None]
    else:
        is_candidate = _may_win(scores, streams)
        is_candidate[has_filter] = scores[has_filter] >= least[has_filter, None]
    rows, tokens = np.divmod(np.flatnonzero(is_candidate), vocab_size)
    values = scores[rows, tokens] + gumbel(hashes(streams[rows], tokens.astype(np.uint32)[:, None])[:, 0])
    best = np.maximum.reduceat(values, np.searchsorted(rows, np.arange(num_rows)))
    winners = np.flatnonzero(values == best[rows])
    return tokens[winners[np.searchsorted(rows[winners], np.arange(num_rows))]]


def _may_win(scores: Floats, streams: _Words) -> npt.NDArray[np.bool_]:
    """Which tokens of each row may have the largest score and noise: all that do, and few others.

    Noise is -log(-log(1 - u)), and so at most -log(u), u = hash / 2^31. The logarithm of a float32 number lies above
    the straight lines from each power of two to the next, and its bits, taken as an integer, lie on these.
    """
    hashed = hashes(streams, np.arange(scores.shape[1], dtype=np.uint32))
    bounds = hashed.view(np.int32).astype(np.float32).view(np.int32).astype(np.float32)
    bounds *= np.float32(-_A_BIT)
    bounds += scores
    rows, promising = np.arange(len(scores)), bounds.argmax(axis=1)
    reached = scores[rows, promising] + gumbel(hashed[rows, promising])
    may_win: npt.NDArray[np.bool_] = bounds >= (reached - (_HIGHEST + _SLACK)).astype(np.float32)[:, None]
    return may_win
