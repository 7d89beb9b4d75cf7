"""The radix cache against a dictionary, in every order of operations.

The model is page by page: a cached page is named by its namespace and all tokens up to its end, and has a page number
and the time it was last let go. Everything can be told from it by brute force: the longest cached prefix, what is
locked, what is evicted next (of the pages without a lock and with nothing behind them, the one let go longest ago),
every routing block's hash. Two tokens, few pages and few namespaces make collisions, splits and evictions the rule.

Hypothesis searches for short sequences of operations that break something and shrinks them; random walks go deep.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from radixfleet.blocks import BLOCK_TOKENS, chain_hashes, seed_hash
from tests.support.cached_sequence import CachedSequence, int32
from worker.core.arrays import Int32Array
from worker.memory.cached_prefix import Inserted, Match, Namespace
from worker.memory.page_allocator import PageAllocator
from worker.memory.radix_cache import RadixCache

MAX_TOKENS = 200
Key = tuple[Namespace, bytes]

namespaces = st.sampled_from([("m",), ("m", "a"), ("ma",)])
PATTERNS = (
    [0] * MAX_TOKENS,
    [1] * MAX_TOKENS,
    [0, 1] * (MAX_TOKENS // 2),
    [0] * 70 + [1] * 130,
    [0] * 16 + [1, 0] * 92,
)


def splice(first: int, second: int, cut: int, length: int) -> list[int]:
    """A prompt that shares `cut` tokens with one pattern and goes on like another."""
    return (PATTERNS[first][:cut] + PATTERNS[second][cut:])[:length]


patterns = st.integers(0, len(PATTERNS) - 1)
prompts = st.builds(splice, patterns, patterns, st.integers(0, MAX_TOKENS), st.integers(1, MAX_TOKENS))


@dataclass
class Page:
    number: int
    let_go: int


class Sequence(CachedSequence):
    """With what the model must know of it."""

    def __init__(self, cache: RadixCache, allocator: PageAllocator, tokens: list[int], namespace: Namespace) -> None:
        super().__init__(cache, allocator, tokens, namespace)
        self.namespace = namespace
        self.unfreed: list[Inserted] = []

    def keys(self, start: int, end: int) -> list[Key]:
        """Of the pages that end in (start, end]."""
        return page_keys(self.namespace, self.tokens.tolist(), self.cache.page_size, start, end)


def page_keys(namespace: Namespace, tokens: list[int], page_size: int, start: int, end: int) -> list[Key]:
    return [(namespace, bytes(tokens[:stop])) for stop in range(start + page_size, end + 1, page_size)]


class RadixCacheMachine(RuleBasedStateMachine):
    page_size = 1
    num_pages = 300
    sequences = Bundle("sequences")

    @initialize()
    def start(self) -> None:
        self.allocator = PageAllocator(self.num_pages, self.page_size)
        self.cache = RadixCache(self.allocator)
        self.model: dict[Key, Page] = {}
        self.running: list[Sequence] = []
        self.waiting: list[tuple[Namespace, Int32Array, Match]] = []
        self.now = 0
        self.router_blocks: set[int] = set()

    # What a request does.

    @rule(target=sequences, namespace=namespaces, tokens=prompts)
    def begin(self, namespace: Namespace, tokens: list[int]) -> Sequence:
        """Behaviour 28: the match leaves the last token to be computed."""
        expected = self.longest(namespace, tokens, len(tokens) - 1)
        sequence = Sequence(self.cache, self.allocator, tokens, namespace)
        assert sequence.match.pages.tolist() == expected
        assert sequence.handle.length == sequence.cached == len(expected) * self.page_size < len(tokens)
        self.running.append(sequence)
        return sequence

    @rule(sequence=sequences, num_tokens=st.integers(1, MAX_TOKENS), insert=st.booleans())
    def advance(self, sequence: Sequence, num_tokens: int, insert: bool) -> None:
        """Compute a chunk of the prompt, or generate where the prompt is done."""
        if sequence.computed == len(sequence.tokens) < MAX_TOKENS:
            sequence.tokens = np.append(sequence.tokens, np.int32(num_tokens % 2))
        self.compute(sequence, num_tokens)
        if insert:
            self.insert_and_compare(sequence)

    @rule(namespace=namespaces, tokens=prompts, adopt=st.booleans())
    def twins(self, namespace: Namespace, tokens: list[int], adopt: bool) -> None:
        """Two requests with one prompt, neither of which knows of the other's work."""
        twins = [self.begin(namespace, tokens) for _ in range(2)]
        for twin in twins:
            self.compute(twin, MAX_TOKENS)
        for twin in twins:
            self.insert_and_compare(twin)
            if adopt:
                self.adopt(twin)
        for twin in twins:
            self.exchange(twin)
            self.finish(twin, insert=True)

    @rule(sequence=sequences)
    def adopt(self, sequence: Sequence) -> None:
        """No step reads the duplicates any more: the request reads the tree's pages and frees its own."""
        for inserted in sequence.unfreed:
            sequence.adopt(inserted)
        sequence.unfreed.clear()

    @rule(sequence=sequences)
    def exchange(self, sequence: Sequence) -> None:
        """Short of pages, the request gives the tree its duplicates for what nobody else has locked."""
        others = {key for other in self.running if other is not sequence for key in other.keys(0, other.handle.length)}
        keys = sequence.keys(0, sequence.handle.length)
        pages = sequence.pages[: len(keys)]
        own = {key: page for key, page in zip(keys, pages.tolist(), strict=True) if key not in others}
        expected = {page for key, page in own.items() if page != self.model[key].number}
        free = self.allocator.free_pages
        taken = self.cache.exchange(sequence.handle, pages).tolist()
        assert set(taken) == expected
        assert self.allocator.free_pages == free + len(taken)
        for key, page in own.items():
            self.model[key].number = page
        sequence.own -= expected
        sequence.unfreed.clear()

    @rule(target=sequences, sequence=consumes(sequences), insert=st.booleans())
    def finish(self, sequence: Sequence, insert: bool) -> object:
        if insert:
            self.insert_and_compare(sequence)
        length = sequence.handle.length
        sequence.abort()
        self.now += 1
        for key in sequence.keys(0, length):
            self.model[key].let_go = self.now
        self.running.remove(sequence)
        return multiple()

    @rule(target=sequences, sequence=consumes(sequences))
    def forget(self, sequence: Sequence) -> object:
        keys = sequence.keys(0, sequence.handle.length)
        sequence.abort(forget=True)
        self.now += 1
        self.running.remove(sequence)
        for key in keys:
            self.model[key].let_go = self.now
        locked = self.locked()
        for key in reversed(keys):
            namespace, tokens = key
            gone = [other for other in self.model if other[0] == namespace and other[1].startswith(tokens)]
            if key in locked or (len(gone) > 1 and len(tokens) <= sequence.cached):
                break
            for other in gone:
                del self.model[other]
        return multiple()

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        end = min(sequence.computed + num_tokens, len(sequence.tokens))
        missing = -(-end // self.page_size) - -(-sequence.computed // self.page_size)
        free, evictable = self.allocator.free_pages, self.cache.evictable_pages
        fits = sequence.compute(num_tokens)
        assert fits == (missing <= free + evictable)
        if fits:
            self.evict_from_model(max(missing - free, 0))
            assert sequence.computed == end

    @rule(namespace=namespaces, tokens=prompts)
    def wait(self, namespace: Namespace, tokens: list[int]) -> None:
        """A request that is to be looked up again and again until it is admitted."""
        waiting = int32(tokens)
        self.waiting = [*self.waiting[-5:], (namespace, waiting, self.cache.match(namespace, waiting))]

    @rule(remembers=st.booleans())
    def look_again(self, remembers: bool) -> None:
        """What is found from an earlier match on, of whatever age, is what is found from the root on."""
        for index, (namespace, tokens, known) in enumerate(self.waiting):
            again, anew = self.cache.match(namespace, tokens, known=known), self.cache.match(namespace, tokens)
            assert (again.length, again.node) == (anew.length, anew.node)
            assert anew.is_current or anew.node is None
            assert again.length == known.length or not known.is_current
            assert again.pages.tolist() == anew.pages.tolist() == self.longest(namespace, tokens.tolist(), len(tokens))
            if remembers:
                self.waiting[index] = (namespace, tokens, again)

    # What the engine does.

    @rule(namespace=namespaces, tokens=prompts, limit=st.none() | st.integers(0, MAX_TOKENS))
    def match(self, namespace: Namespace, tokens: list[int], limit: int | None) -> None:
        expected = self.longest(namespace, tokens, len(tokens) if limit is None else limit)
        assert self.cache.match(namespace, int32(tokens), limit).pages.tolist() == expected

    @rule(num_pages=st.integers(0, 12))
    def evict(self, num_pages: int) -> None:
        free = self.allocator.free_pages
        evicted = self.cache.evict(num_pages)
        assert evicted == self.evict_from_model(num_pages)
        assert self.allocator.free_pages == free + evicted

    @rule()
    def flush(self) -> None:
        """Behaviour 29: what is locked stays, the rest goes."""
        self.cache.flush()
        self.evict_from_model(len(self.model))
        assert self.cache.evictable_pages == 0

    @rule()
    def report(self) -> None:
        """A router that applies every delta knows exactly the blocks that are cached."""
        evicted, added = (set(part.tolist()) for part in self.cache.block_events.drain())
        assert evicted <= self.router_blocks
        assert not added & self.router_blocks
        self.router_blocks = (self.router_blocks - evicted) | added
        assert self.router_blocks == self.blocks()

    # What holds at every moment.

    @invariant()
    def tree_is_the_model(self) -> None:
        found: dict[Key, int] = {}
        for root in list(self.cache._roots.values()):
            stack = [(root, [])]
            while stack:
                node, prefix = stack.pop()
                tokens = prefix + node.tokens.tolist()
                keys = page_keys(root.namespace, tokens, self.page_size, node.start, node.end)
                found.update(zip(keys, node.pages.tolist(), strict=True))
                stack += [(child, tokens) for child in node.children.values()]
        assert found == {key: page.number for key, page in self.model.items()}

    @invariant()
    def books_agree(self) -> None:
        """Behaviours 10, 24, 25: every page has one owner, and what a handle covers is protected."""
        self.cache.check()
        self.allocator.check()
        owned = [page for sequence in self.running for page in sequence.own]
        assert self.cache.protected_pages == len(self.locked())
        assert self.cache.evictable_pages == len(self.model) - len(self.locked())
        assert self.cache.total_pages == len(self.model)
        assert self.allocator.free_pages + len(self.model) + len(owned) == self.allocator.total_pages
        everyone = [*owned, *(page.number for page in self.model.values())]
        assert len(set(everyone)) == len(everyone)
        assert not self.allocator.is_free(int32(everyone)).any()

    @invariant()
    def namespaces_are_in_use(self) -> None:
        in_use = {namespace for namespace, _ in self.model} | {sequence.namespace for sequence in self.running}
        assert self.cache._roots.keys() == in_use

    @invariant()
    def digest_is_brute_force(self) -> None:
        assert set(self.cache.block_hashes().tolist()) == self.blocks()

    # The model.

    def longest(self, namespace: Namespace, tokens: list[int], limit: int) -> list[int]:
        pages = []
        for key in page_keys(namespace, tokens, self.page_size, 0, min(limit, len(tokens))):
            if key not in self.model:
                break
            pages.append(self.model[key].number)
        return pages

    def locked(self) -> set[Key]:
        return {key for sequence in self.running for key in sequence.keys(0, sequence.handle.length)}

    def insert_and_compare(self, sequence: Sequence) -> None:
        start, free = sequence.handle.length, self.allocator.free_pages
        whole = sequence.computed - sequence.computed % self.page_size
        keys = sequence.keys(start, whole)
        own_pages = sequence.pages[start // self.page_size : whole // self.page_size].tolist()
        duplicates = [page for key, page in zip(keys, own_pages, strict=True) if key in self.model]
        for key, page in zip(keys, own_pages, strict=True):
            self.model.setdefault(key, Page(page, self.now))
        inserted = sequence.insert()
        sequence.unfreed.append(inserted)
        assert (inserted.start, sequence.handle.length) == (start, whole)
        assert inserted.duplicate_pages.tolist() == duplicates
        assert inserted.pages.tolist() == [self.model[key].number for key in keys]
        assert self.allocator.free_pages == free, "duplicates are for the request to free"

    def evict_from_model(self, num_pages: int) -> int:
        locked = self.locked()
        for evicted in range(num_pages):
            inner = {(namespace, prefix[: -self.page_size]) for namespace, prefix in self.model}
            leaves = [key for key in self.model if key not in locked and key not in inner]
            if not leaves:
                return evicted
            oldest = min(self.model[key].let_go for key in leaves)
            (next_out,) = [key for key in leaves if self.model[key].let_go == oldest]
            del self.model[next_out]
        return num_pages

    def blocks(self) -> set[int]:
        hashes = set()
        for namespace, prefix in self.model:
            if len(prefix) % BLOCK_TOKENS == 0:
                tokens = np.frombuffer(prefix, dtype=np.uint8).astype(np.uint32)
                hashes.add(int(chain_hashes(seed_hash(namespace), tokens)[-1]))
        return hashes

    def teardown(self) -> None:
        for sequence in list(self.running):
            self.finish(sequence, insert=False)
        self.books_agree()
        assert self.cache.protected_pages == 0
        self.cache.flush()
        assert self.allocator.free_pages == self.allocator.total_pages, "pages leaked"
        assert not list(self.cache.nodes()), "a namespace leaked"


class PagesOfTwo(RadixCacheMachine):
    page_size, num_pages = 2, 150


class PagesOfSixteen(RadixCacheMachine):
    page_size, num_pages = 16, 24


SETTINGS = settings(max_examples=40, stateful_step_count=30, deadline=None)

TestPagesOfOne = RadixCacheMachine.TestCase
TestPagesOfOne.settings = SETTINGS
TestPagesOfTwo = PagesOfTwo.TestCase
TestPagesOfTwo.settings = SETTINGS
TestPagesOfSixteen = PagesOfSixteen.TestCase
TestPagesOfSixteen.settings = SETTINGS


@pytest.mark.parametrize("kind", [RadixCacheMachine, PagesOfTwo, PagesOfSixteen])
@pytest.mark.parametrize("seed", range(3))
def test_random_walk(kind: type[RadixCacheMachine], seed: int) -> None:
    """Behaviours 10, 24 and 25 over hundreds of steps, with the pool full most of the time."""
    random = Random(seed)
    machine = kind()
    machine.start()
    for _ in range(300):
        namespace = random.choice([("m",), ("m", "a"), ("ma",)])
        length = random.randint(1, MAX_TOKENS)
        tokens = splice(random.randrange(5), random.randrange(5), random.randint(0, length), length)
        if random.random() < 0.1:
            machine.wait(namespace, tokens)
        machine.look_again(remembers=random.random() < 0.3)
        step = random.random()
        if step < 0.35 and len(machine.running) < 6:
            machine.begin(namespace, tokens)
        elif step < 0.8 and machine.running:
            machine.advance(random.choice(machine.running), random.randint(1, 90), insert=random.random() < 0.6)
        elif step < 0.9 and machine.running:
            machine.finish(random.choice(machine.running), insert=random.random() < 0.8)
        elif step < 0.94:
            machine.twins(namespace, tokens, adopt=random.random() < 0.5)
        elif step < 0.96:
            machine.evict(random.randint(0, 12))
        elif step < 0.965:
            machine.flush()
        elif machine.running:
            random.choice([machine.adopt, machine.exchange])(random.choice(machine.running))
        if random.random() < 0.3:
            machine.report()
        for check in (machine.tree_is_the_model, machine.books_agree, machine.namespaces_are_in_use):
            check()
        machine.digest_is_brute_force()
    machine.teardown()
