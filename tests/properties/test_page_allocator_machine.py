"""The page allocator against a set, in every order of operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.cached_sequence import int32
from worker.memory.page_allocator import PageAllocator, PageError

NUM_PAGES = 13


class PageAllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES, page_size=4)
        self.owned: set[int] = set()

    @property
    def free(self) -> set[int]:
        return set(range(1, NUM_PAGES)) - self.owned

    @rule(wanted=st.integers(0, NUM_PAGES + 1))
    def allocate(self, wanted: int) -> None:
        pages = self.allocator.allocate(wanted)
        if wanted > len(self.free):
            assert pages is None
            return
        assert pages is not None
        taken = set(pages.tolist())
        assert len(taken) == wanted
        assert taken <= self.free
        self.owned |= taken

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True) if self.owned else st.just([]))
        self.allocator.free(int32(pages))
        self.owned -= set(pages)

    @rule(data=st.data(), wrong=st.integers(-3, NUM_PAGES + 3))
    def give_back_wrongly(self, data: st.DataObject, wrong: int) -> None:
        """Good pages together with one that is foreign, free, out of bounds or repeated: all stay as they were."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True)) if self.owned else []
        if wrong in self.owned and wrong not in pages:
            pages.append(wrong)
        with pytest.raises(PageError):
            self.allocator.free(int32([*pages, wrong]))

    @invariant()
    def books_agree(self) -> None:
        """Behaviours 10 and 13: free + owned = total, whatever was refused."""
        self.allocator.check()
        assert self.allocator.free_pages == len(self.free)
        everything = np.arange(NUM_PAGES)
        assert set(everything[self.allocator.is_free(everything)].tolist()) == self.free


TestPageAllocator = PageAllocatorMachine.TestCase
TestPageAllocator.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
