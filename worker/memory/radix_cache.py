"""The prefix cache: which KV pages hold which tokens, so that a prompt's known beginning is not computed again.

Owned by the engine's thread; no clock, no I/O.

Each namespace has a tree. A node holds a run of tokens and their pages; the path from the root to a node spells a
prefix. All lengths are whole pages. Children are found by the tokens of their first page, then runs are compared as
arrays, so a match costs a dictionary lookup a node and a memory comparison a token.

    match   walk down while the tokens agree. Changes nothing; what it found is safe only once locked.
    lock    protect the matched prefix for one request, which gets a Handle. The match's end becomes a node's end (the
            node is split where it ends within one), and that node and all its ancestors count one lock more.
    insert  walk on from the handle along the tokens that the request has computed since, split where they leave a run,
            and hang what is new below as one node. The handle and its lock move to the end of it, so a chunk never
            walks its prefix again. Where the handle's own node is a leaf that nobody else holds, it grows instead: a
            prompt computed in a hundred chunks is one node, found as fast as if it had come whole.
    unlock  count one lock less from the handle up to the root. Nodes left without a lock join the eviction order.
    evict   take pages from the least recently used leaf (`Locks.order`), from its tail, until enough are free.

Who has a page:

    where the page is                      counted in                   goes on by
    free list                              allocator.free_pages         allocate: to a request
    with a request: its unfinished tail,   the request's own books      insert: to the tree, in a locked node
    or a duplicate of a page in the tree                                allocator.free, by the request: to the free list
    in the tree, node with locks > 0       protected_pages              last unlock: evictable
    in the tree, node with locks = 0       evictable_pages              lock: protected; evict: to the free list

    free + evictable + protected + what requests own = allocator.total_pages, at every moment.

Duplicates. Two requests may compute the same tokens at the same time. The tree keeps the pages that came first; those
of the second stay that request's own and are named, once, in `Inserted.duplicate_pages`. They are not freed here,
because a step in flight may still read them. The request may go on reading them and free them at its end, or switch to
`Inserted.pages` and free them as soon as no launched step reads them. Or, where nobody else has the tree's pages
locked, `exchange` gives the tree the request's in their place.

Flush drops all that no handle covers. What is locked stays and can be matched: its KV is as valid as before (new
weights mean a new engine with a new cache). It becomes evictable when it is unlocked.

Routing blocks. A node has the chained hashes of the 64-token blocks that end in it; `block_events` has the changes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.types import HashArray
from worker.core.arrays import Int32Array
from worker.core.messages import BlockRun
from worker.memory.block_events import BlockEvents
from worker.memory.cached_prefix import NO_PAGES, Handle, Inserted, Match, Namespace
from worker.memory.locks import Locks
from worker.memory.page_allocator import PageAllocator, PageError
from worker.memory.portions import Portions
from worker.memory.radix_invariants import checks
from worker.memory.radix_tree import (
    Node,
    Root,
    common_length,
    grow,
    hang,
    hashes_behind,
    make_root,
    run_behind,
    run_of,
    split,
    trim,
)


class RadixCache:
    """Prefix tree over the pages of one allocator. See the head of the module."""

    def __init__(self, allocator: PageAllocator) -> None:
        """The page size is the allocator's; it must divide a routing block of 64 tokens."""
        if BLOCK_TOKENS % allocator.page_size:
            raise ValueError(
                f"page size {allocator.page_size} does not divide a routing block of {BLOCK_TOKENS} tokens"
            )
        self.page_size = allocator.page_size
        self.block_events = BlockEvents()
        self._allocator = allocator
        self._roots: dict[Namespace, Root] = {}
        self._locks = Locks()

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could free now."""
        return self._locks.evictable_pages

    @property
    def protected_pages(self) -> int:
        """Pages under a lock."""
        return self._locks.protected_pages

    @property
    def total_pages(self) -> int:
        """Pages in the tree."""
        return self._locks.total_pages

    @property
    def available_pages(self) -> int:
        """Pages that `allocate` can give: free ones and evictable ones."""
        return self._allocator.free_pages + self._locks.evictable_pages

    def match(
        self, namespace: Namespace, tokens: Int32Array, limit: int | None = None, *, known: Match | None = None
    ) -> Match:
        """The longest cached prefix of `tokens` [n], of at most `limit` tokens. Changes nothing, nor the LRU order.

        A caller that needs logits passes a limit of n - 1, so that the last token is left to be computed. `known`: an
        earlier match of the same tokens with the same limit. As long as nothing of it was evicted the search goes on
        from its end, and costs what was cached since then, however long the prefix is.
        """
        if known is not None and known.is_current:
            return known
        _check_dtype(tokens)
        page_size = self.page_size
        end = len(tokens) if limit is None else min(limit, len(tokens))
        end -= end % page_size
        found, position = (None, 0) if known is None else known.still_there()
        if found is None:
            found = self._roots.get(namespace)
        if found is None:
            return Match(0, page_size, namespace, None)
        if position < found.end and position < end:
            # It left the node's run here, unless the node has grown since.
            position += self._common_pages(found.tokens[position - found.start :], tokens[position:end])
        sought = b""
        while position == found.end and position < end:
            sought = _page_at(tokens, position, page_size)
            node = found.children.get(sought)
            if node is None:
                break
            found, sought = node, b""
            position += self._common_pages(node.tokens, tokens[position:end])
        return Match(position, page_size, namespace, found, found.cuts, position == found.end, sought)

    def lock(self, match: Match) -> Handle:
        """Protect a matched prefix (an empty one too: the handle is what `insert` starts from) until `unlock`.

        Raises PageError when the tree has lost the prefix since it was matched.
        """
        node: Node
        if match.node is None or not match.length:
            node = self._roots.get(match.namespace) or self._roots.setdefault(
                match.namespace, make_root(match.namespace)
            )
        else:
            node = match.node
            # It was split since: the match ends in the part that is now above.
            while node.parent is not None and match.length <= node.start:
                node = node.parent
            if node.parent is None or match.length > node.end:
                raise PageError("the match is stale: something was evicted since; match again")
            if match.length < node.end:
                node = split(node, match.length - node.start, self.page_size)
        self._locks.acquire(node)
        return Handle(node)

    def insert(self, handle: Handle, tokens: Int32Array, pages: Int32Array) -> Inserted:
        """Give the tree the whole pages of a sequence behind the handle's end, and move the handle to the end of them.

        `tokens` [n]: the sequence from position 0, as far as its KV is computed or is being computed by a launched
        step. `pages` [n / page_size or more]: theirs; those before the handle's end are not looked at. The tree takes
        over the pages it had no tokens for; see `Inserted` for the others. The page of an unfinished tail stays the
        caller's. O(n - handle.length). Raises PageError, with nothing changed, when there are too few pages.
        """
        _check_dtype(tokens)
        node = before = handle.node
        start, end = before.end, len(tokens) - len(tokens) % self.page_size
        if end <= start:
            return Inserted(start, NO_PAGES, NO_PAGES)
        tree_pages = own_pages = pages[start // self.page_size : end // self.page_size]
        if len(own_pages) * self.page_size != end - start:
            raise PageError(f"{len(pages)} pages do not hold {end} tokens")
        position = start
        while position < end:
            child = node.children.get(_page_at(tokens, position, self.page_size))
            index = (position - start) // self.page_size
            if child is None:
                node = self._add(node, handle, tokens[:end], own_pages[index:])
                break
            length = self._common_pages(child.tokens, tokens[position:end])
            node = child if length == len(child.tokens) else split(child, length, self.page_size)
            if tree_pages is own_pages:
                tree_pages = own_pages.copy()
            tree_pages[index : index + len(node.pages)] = node.pages
            position += length
        self._locks.acquire(node, until=before)
        handle.move(node)
        duplicates = NO_PAGES if tree_pages is own_pages else own_pages[own_pages != tree_pages]
        return Inserted(start, tree_pages, duplicates)

    def exchange(self, handle: Handle, pages: Int32Array) -> Int32Array:
        """Where nobody but `handle` locks a page of its prefix, the tree has the caller's page in place of its own.

        `pages` [handle.length / page_size]: those that the caller reads its prefix from, the tree's and its duplicates.
        Returns the duplicates that the tree took over. What it had there is free: without another lock, nobody reads
        it. O(handle.length).
        """
        if len(pages) * self.page_size != handle.length:
            raise PageError(f"{len(pages)} pages do not hold {handle.length} tokens")
        taken, freed = [NO_PAGES], [NO_PAGES]
        node = handle.node
        # Locks grow in number towards the root.
        while node.parent is not None and node.locks == 1:
            own_pages = pages[node.start // self.page_size : node.end // self.page_size]
            differs = own_pages != node.pages
            if differs.any():
                taken.append(own_pages[differs])
                freed.append(node.pages[differs])
                node.pages = own_pages.copy()
            node = node.parent
        self._allocator.free(np.concatenate(freed))
        return np.concatenate(taken)

    def unlock(self, handle: Handle) -> None:
        """End a handle's lock. What nobody else has locked becomes evictable, as the most recently used."""
        self._drop_if_empty(self._locks.release(handle.end()))

    def forget(self, handle: Handle, found: int) -> None:
        """End a handle's lock, and evict what led to it, unless somebody has it locked.

        `found`: so many tokens of it were there before. Of them only that goes from which nothing goes on; of what came
        after them everything, with what others have hung below it.
        """
        node = handle.node
        self.unlock(handle)
        while node.parent is not None and not node.locks and (node.end > found or not node.children):
            above, num_pages = node.parent, 0
            for spoilt in _with_descendants([node]):
                self._locks.put_first(spoilt)
                num_pages += len(spoilt.pages)
            self.evict(num_pages)
            node = above

    def pages_released_by(self, handle: Handle) -> int:
        """Pages that become evictable when it is unlocked: those that nobody else has locked. O(nodes below them)."""
        node, num_pages = handle.node, 0
        while node.parent is not None and node.locks == 1:
            num_pages += len(node.pages)
            node = node.parent
        return num_pages

    def allocate(self, num_pages: int) -> Int32Array | None:
        """`num_pages` pages for a request, evicting what the free list lacks; None, nothing evicted, if too few."""
        if num_pages > self.available_pages:
            return None
        self.evict(num_pages - self._allocator.free_pages)
        return self._allocator.allocate(num_pages)

    def evict(self, num_pages: int) -> int:
        """Free `num_pages` pages, or all that are evictable; return how many. O(pages freed), not O(tree)."""
        num_pages = min(num_pages, self.evictable_pages)
        freed: list[Int32Array] = []
        gone: list[HashArray] = []
        wanted = num_pages
        while wanted > 0:
            leaf = self._locks.next_leaf
            parent = leaf.parent
            assert parent is not None, "a root has no pages"
            taken = min(wanted, len(leaf.pages))
            pages, hashes = trim(leaf, len(leaf.pages) - taken, self.page_size)
            self._locks.evicted(leaf, taken)
            if leaf.parent is None:
                self._drop_if_empty(parent)
            freed.append(pages)
            gone.append(hashes)
            wanted -= taken
        if freed:
            self.block_events.evict(np.concatenate(gone))
            self._allocator.free(np.concatenate(freed))
        return max(num_pages, 0)

    def flush(self) -> int:
        """Drop every prefix that is not locked; return the pages freed."""
        return self.evict(self.evictable_pages)

    def check(self) -> None:
        """Verify every invariant of tree and books; raises PageError. O(tree): for tests."""
        for _ in self.checks(Portions()):
            pass

    def checks(self, portions: Portions) -> Generator[None, None, npt.NDArray[np.bool_]]:
        """The same in portions, for an idle worker: nothing may change between them.

        Returns which pages are in the tree, bool [num_pages].
        """
        return checks(self.nodes(), self._locks, self._allocator, portions)

    def block_hashes(self) -> HashArray:
        """Hashes of all cached routing blocks, ascending: the digest that deltas build on. O(tree)."""
        hashes = [node.hashes for node in self.nodes() if not isinstance(node, Root)]
        return np.sort(np.concatenate(hashes)) if hashes else np.empty(0, dtype=np.uint64)

    def block_runs(self) -> list[BlockRun]:
        """All cached routing blocks with their tokens, parents before children. O(tree)."""
        return [run_of(node) for node in self.nodes() if not isinstance(node, Root) and len(node.hashes)]

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents first. O(tree): for checks, digests and tests."""
        return _with_descendants(self._roots.values())

    def _common_pages(self, run: Int32Array, tokens: Int32Array) -> int:
        """Tokens in which a node's run and `tokens` agree, in whole pages."""
        length = common_length(run, tokens)
        return length - length % self.page_size

    def _add(self, node: Node, handle: Handle, tokens: Int32Array, pages: Int32Array) -> Node:
        """Put the pages of what of `tokens` (from position 0) is behind `node` into the tree. Returns their node."""
        hashes = hashes_behind(node, tokens)
        self.block_events.add(hashes)
        if self.block_events.are_followed and len(hashes):
            self.block_events.note(run_behind(node, tokens, hashes))
        # A node that another handle is at must keep its end, and one with children its place above them.
        if node is handle.node and node.locks == 1 and not node.children and not isinstance(node, Root):
            grow(node, tokens, pages, hashes)
            self._locks.grown(len(pages))
            return node
        self._locks.hung(len(pages))
        return hang(node, tokens, pages, hashes, self.page_size)

    def _drop_if_empty(self, node: Node) -> None:
        if isinstance(node, Root) and not node.children and not node.locks:
            del self._roots[node.namespace]
            node.cuts += 1


def _with_descendants(tops: Iterable[Node]) -> Iterator[Node]:
    """Parents first."""
    stack = list(tops)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _page_at(tokens: Int32Array, position: int, page_size: int) -> bytes:
    """The page of tokens that begins at `position`, as the key of a child."""
    return tokens[position : position + page_size].tobytes()


def _check_dtype(tokens: Int32Array) -> None:
    # Keys are the bytes of tokens: with another item size nothing would ever match, and nobody would notice.
    if tokens.dtype != np.int32:
        raise TypeError(f"tokens are int32, not {tokens.dtype}")
