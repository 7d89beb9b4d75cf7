"""Cost of the radix cache's operations, by prompt length, page size and size of the tree.

    python tests/bench/bench_radix_cache.py [--page-size 16] [--tree-pages 1000 100000] [--prompt-tokens 4096]

Prints medians in microseconds. `match` finds the whole prompt, `lock + unlock` protects and releases it, `insert` puts
in a new prompt (most of it is the block hashes), `evict` frees 1 or 64 pages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from worker.core.arrays import Int32Array
from worker.memory.page_allocator import PageAllocator, pages_for
from worker.memory.radix_cache import RadixCache

NAMESPACE = ("model",)
VOCABULARY = 50_000
GROUP_PAGES = 64
"""The tree is filled with sequences of this many pages, of which eight share the first half."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tree-pages", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[4_096, 32_768])
    parser.add_argument("--repeat", type=int, default=50)
    arguments = parser.parse_args()
    columns = ("tree pages", "nodes", "prompt", "match", "lock + unlock", "insert", "evict 1", "evict 64")
    print(" ".join(f"{column:>13}" for column in columns) + "   (us)")
    for tree_pages in arguments.tree_pages:
        for prompt_tokens in arguments.prompt_tokens:
            row = measure(arguments.page_size, tree_pages, prompt_tokens, arguments.repeat)
            print(" ".join(f"{value:>13,.1f}" if isinstance(value, float) else f"{value:>13,}" for value in row))


def measure(page_size: int, tree_pages: int, prompt_tokens: int, repeat: int) -> tuple[float | int, ...]:
    random = np.random.default_rng(0)
    room = tree_pages + 8 * GROUP_PAGES + (repeat + 1) * pages_for(prompt_tokens, page_size)
    cache = RadixCache(PageAllocator(room + 1, page_size))
    fill(cache, tree_pages, random)
    nodes = sum(1 for _ in cache.nodes())
    known = tokens_of(prompt_tokens, random)
    insert_us(cache, known)
    match = time_us(lambda: cache.match(NAMESPACE, known), repeat)
    locked = time_us(lambda: cache.unlock(cache.lock(cache.match(NAMESPACE, known))), repeat)
    inserted = median(insert_us(cache, tokens_of(prompt_tokens, random)) for _ in range(repeat))
    # From the least recently used leaves: first of what filled the tree.
    evict_one = time_us(lambda: cache.evict(1), min(repeat, tree_pages // 4))
    evict_many = time_us(lambda: cache.evict(64), min(repeat, tree_pages // 256))
    return tree_pages, nodes, prompt_tokens, match, locked - match, inserted, evict_one, evict_many


def fill(cache: RadixCache, tree_pages: int, random: np.random.Generator) -> None:
    half = GROUP_PAGES // 2 * cache.page_size
    while cache.total_pages < tree_pages:
        shared = tokens_of(half, random)
        for _ in range(8):
            insert_us(cache, np.concatenate([shared, tokens_of(half, random)]))


def insert_us(cache: RadixCache, tokens: Int32Array) -> float:
    """Insert a prompt whose KV was computed just now, and let go of it; returns the time of the insertion alone."""
    match = cache.match(NAMESPACE, tokens)
    handle = cache.lock(match)
    pages = cache.allocate(pages_for(len(tokens) - match.length, cache.page_size))
    if pages is None:
        raise RuntimeError("the pool was made too small")
    pages = np.concatenate([match.pages, pages])
    begin = time.perf_counter()
    cache.insert(handle, tokens, pages)
    elapsed = time.perf_counter() - begin
    cache.unlock(handle)
    return 1e6 * elapsed


def tokens_of(length: int, random: np.random.Generator) -> Int32Array:
    return random.integers(0, VOCABULARY, length, dtype=np.int32)


def time_us(operation: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        operation()
        times.append(time.perf_counter() - begin)
    return 1e6 * median(times)


if __name__ == "__main__":
    main()
