"""Which prefixes save the most work: heavy hitters among the prompts that workers found in their caches.

Each started request saves the tokens that its worker had cached. They are credited to one prefix of the prompt: its
longest one of 1, 2, 4, 8, ... routing blocks that was cached. So prompts that share a system prompt of 2,048 tokens
meet at 32 blocks, whatever follows, and a chat that grows stays one entry until it has doubled.

Space-saving (Metwally, Agrawal, El Abbadi, 2005): a fixed number of counters; a prefix without one takes that of the
least, and its count, so counts are too high by at most that of the least and a prefix that saves more than total /
counters is never missed. Two tables, of which the older is dropped every `WINDOW_S`, let old fame fade.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.clock import Clock
from radixfleet.types import HashArray, TokenArray

COUNTERS = 256
WINDOW_S = 300.0
"""What `hottest` tells is about the last one to two of these."""
_SAMPLE_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Sample:
    """How a prefix begins, for people, and with which tokenizer to read it."""

    tokens: TokenArray
    model: str


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """One prefix, and what it saved lately."""

    block_hash: int
    """Hash of the prefix's last block, which names the whole prefix."""
    tokens: int
    """Length of the prefix."""
    saved_tokens: int
    """Prompt tokens that nobody had to compute. Too high by `error_tokens` at most."""
    error_tokens: int
    requests: int
    sample: Sample | None


@dataclass(slots=True)
class _Counter:
    blocks: int
    saved_tokens: int
    error_tokens: int
    requests: int
    sample: Sample | None


class HotPrefixes:
    """See the module. On the event loop only."""

    def __init__(self, clock: Clock, *, counters: int = COUNTERS, samples: bool = False) -> None:
        """`samples`: keep the beginning of each prompt. They are what users wrote."""
        self._clock = clock
        self._counters = counters
        self._samples = samples
        self._now: dict[int, _Counter] = {}
        self._before: dict[int, _Counter] = {}
        self._by_saved: list[tuple[int, int]] = []
        """A heap of (saved tokens, key) of all in `_now`, as they once were: they have only grown since."""
        self._turned_s = clock.now()

    def saved(self, block_hashes: HashArray, tokens: TokenArray, model: str, cached_tokens: int) -> None:
        """A worker found so many tokens of this prompt in its cache.

        `block_hashes`: uint64 [blocks], chained, of `tokens`.
        """
        blocks = min(cached_tokens // BLOCK_TOKENS, len(block_hashes))
        if not blocks:
            return
        self._turn()
        depth = 1 << (blocks.bit_length() - 1)
        key = int(block_hashes[depth - 1])
        counter = self._now.get(key)
        if counter is None:
            sample = Sample(tokens[:_SAMPLE_TOKENS].copy(), model) if self._samples else None
            taken_over = self._drop_least() if len(self._now) >= self._counters else 0
            counter = self._now[key] = _Counter(depth, taken_over, taken_over, 0, sample)
            heappush(self._by_saved, (taken_over, key))
        counter.saved_tokens += cached_tokens
        counter.requests += 1

    def hottest(self, count: int) -> list[HotPrefix]:
        """The prefixes that saved most lately, the best first."""
        self._turn()
        found = [self._joined(key) for key in self._now.keys() | self._before.keys()]
        return sorted(found, key=lambda prefix: (-prefix.saved_tokens, prefix.block_hash))[:count]

    def _drop_least(self) -> int:
        """Make room for another one, which takes over the count that is returned."""
        while True:
            saved_tokens, key = self._by_saved[0]
            now_tokens = self._now[key].saved_tokens
            if now_tokens == saved_tokens:
                heappop(self._by_saved)
                del self._now[key]
                return saved_tokens
            heapreplace(self._by_saved, (now_tokens, key))

    def _joined(self, key: int) -> HotPrefix:
        both = [table[key] for table in (self._now, self._before) if key in table]
        return HotPrefix(
            block_hash=key,
            tokens=both[0].blocks * BLOCK_TOKENS,
            saved_tokens=sum(counter.saved_tokens for counter in both),
            error_tokens=sum(counter.error_tokens for counter in both),
            requests=sum(counter.requests for counter in both),
            sample=both[0].sample,
        )

    def _turn(self) -> None:
        age_s = self._clock.now() - self._turned_s
        if age_s < WINDOW_S:
            return
        self._before = self._now if age_s < 2 * WINDOW_S else {}
        self._now, self._by_saved = {}, []
        self._turned_s = self._clock.now()
