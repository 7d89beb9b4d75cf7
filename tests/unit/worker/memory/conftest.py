"""Fixtures of the radix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.prefix_pool import Pool
from worker.memory.radix_tree import Node


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.check()
    assert pool.cache.protected_pages == 0, "a test left a lock behind"
    pool.cache.flush()
    assert pool.allocator.free_pages == pool.allocator.total_pages, "pages leaked"
    assert list(pool.cache.nodes()) == [], "a namespace leaked"


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], set[int]]:
    """Runs a function and returns the ids of all nodes of which it read an attribute."""
    plain = object.__getattribute__

    def run(function: Callable[[], object]) -> set[int]:
        seen: set[int] = set()

        def getattribute(node: Node, name: str) -> object:
            seen.add(id(node))
            return plain(node, name)

        with monkeypatch.context() as patch:
            patch.setattr(Node, "__getattribute__", getattribute)
            function()
        return seen

    return run
