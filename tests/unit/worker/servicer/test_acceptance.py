"""How much is accepted and not computed, as routers that did not send it are told."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixfleet.types import AcceptedLoad
from worker.servicer.acceptance import Acceptance, AcceptedRequest
from worker.servicer.prompts import ComingPrompts


class Front:
    """Accepts prompts that are given by their blocks."""

    def __init__(self, *cached: int) -> None:
        self.coming = ComingPrompts({*cached})
        self.acceptance = Acceptance(self.coming)

    def accept(self, *blocks: int, prompt_tokens: int = 0, is_told: bool = True) -> AcceptedRequest:
        def hashes() -> np.ndarray:
            return np.array(blocks, dtype=np.uint64)

        return self.acceptance.accept(hashes, prompt_tokens or 64 * len(blocks), is_told=is_told)

    @property
    def load(self) -> tuple[int, int]:
        """Requests and tokens that are told of."""
        load = self.acceptance.load
        assert load is not None
        return load.requests, load.prompt_tokens


def test_what_is_cached_or_comes_with_others_is_not_to_be_computed() -> None:
    front = Front(1)
    front.accept(1, 2, 3, prompt_tokens=200)
    assert front.load == (1, 136)
    front.accept(1, 2, 3, 4)
    assert front.load == (2, 200)


def test_a_request_counts_as_far_as_it_is() -> None:
    front = Front()
    request = front.accept(1, 2, 3, 4)
    assert front.load == (1, 256)
    request.admitted(192)
    assert front.load == (1, 64)
    request.first_token()
    assert front.load == (1, 0)
    request.end()
    assert front.load == (0, 0)


def test_a_request_that_ends_before_it_is_computed_leaves_nothing() -> None:
    front = Front()
    front.accept(1, 2).end()
    assert front.load == (0, 0)


def test_where_nobody_is_told_nothing_is_hashed_and_nothing_said() -> None:
    front = Front()
    front.acceptance.accept(lambda: 1 / 0, 64, is_told=False)  # type: ignore[arg-type,return-value]  never asked for
    assert front.acceptance.load is None


def test_what_was_not_told_of_is_made_up_for_as_far_as_it_is() -> None:
    front = Front()
    waiting, admitted, computed, ended = (front.accept(block, block + 10, is_told=False) for block in range(4))
    admitted.admitted(64)
    computed.first_token()
    ended.end()
    assert front.acceptance.tell()
    assert front.load == (3, 128 + 64)
    assert not front.acceptance.tell()
    for request in (waiting, admitted, computed):
        request.end()
    assert front.load == (0, 0)
    assert len(front.coming) > 0, "until the engine has reported"
    front.coming.reported()
    front.coming.commit(None)
    assert len(front.coming) == 0


STEPS = st.lists(st.tuples(st.sampled_from(["told", "untold", "admitted", "first", "end", "tell"]), st.integers(0, 5)))


@given(STEPS)
def test_whatever_happens_nothing_is_negative_and_in_the_end_there_is_nothing(steps: list[tuple[str, int]]) -> None:
    front = Front(0)
    running: list[AcceptedRequest] = []
    for step, number in steps:
        if step in ("told", "untold"):
            running.append(front.accept(*range(number), prompt_tokens=64 * number + 1, is_told=step == "told"))
        elif step == "tell":
            front.acceptance.tell()
        elif running:
            request = running[number % len(running)]
            if step == "admitted" and not request.is_admitted:
                request.admitted(64 * number)
            elif step == "first":
                request.first_token()
            elif step == "end":
                running.remove(request)
                request.end()
        load = front.acceptance.load
        if load is not None:
            assert load.requests == len(running)
            assert load.prompt_tokens == sum(request.uncached for request in running)
            assert all(request.uncached >= 0 for request in running)
    front.acceptance.tell()
    for request in running:
        request.end()
    assert front.acceptance.load == AcceptedLoad(0, 0)
