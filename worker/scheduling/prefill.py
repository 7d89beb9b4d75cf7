"""How prompts are cut into chunks, and which prompt waits for another that is computing the same prefix."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from worker.memory.radix_tree import common_length
from worker.scheduling.assembly import Piece
from worker.scheduling.limits import Limits
from worker.scheduling.request import Request

_LARGER = 3


def plan_chunks(begun: Iterable[Request], budget: int, page_size: int) -> list[Piece]:
    """The next chunks of the prompts that are begun, in the order given: at most `budget` tokens together."""
    chunks: list[Piece] = []
    for request in begun:
        if budget < 1:
            break
        piece = next_chunk(request, request.planned, budget, page_size, is_first=not chunks)
        if piece is None:
            break
        chunks.append(piece)
        budget -= piece.length
    return chunks


def next_chunk(request: Request, start: int, budget: int, page_size: int, *, is_first: bool) -> Piece | None:
    """A chunk that begins at position `start`; None when `budget` leaves no worthwhile one."""
    end = len(request.fill_ids)
    length = chunk_length(start, end, budget, page_size, is_first=is_first)
    return Piece(request, start, length, samples=start + length == end) if length else None


def chunk_length(start: int, end: int, budget: int, page_size: int, *, is_first: bool) -> int:
    """Tokens to compute now of [start, end), which is not empty, with at most `budget` (at least 1).

    All of it if it fits, else up to the last page boundary in reach: whole pages can be cached, and kernels like
    them. Where none is in reach, the step's first chunk takes what it can get, so that a budget below a page still
    moves on, and another takes nothing: a crumb is not worth a sequence in the step.
    """
    if end - start <= budget:
        return end - start
    whole_pages = (start + budget) // page_size * page_size - start
    if whole_pages > 0:
        return whole_pages
    return budget if is_first else 0


def enough_tokens(waiting_tokens: int, step_cost_tokens: int) -> float:
    """With so many prompt tokens, a step takes no further prompt from a queue in which `waiting_tokens` wait.

    All that is in a step gets its token when the step ends. So P tokens that wait get theirs sooner, on average, when
    they are computed in several steps, until what each of these costs by itself (c, in tokens' time) eats up what is
    won: with n steps the mean wait is about (n + 1) / 2 (P / n + c), and least at P / n = sqrt(P c). Steps of
    sqrt(3 P c) come close, and cost less: beside 16 prompts, 2 % of the throughput even where nobody decodes. Where
    much waits, steps are large.
    """
    return math.sqrt(_LARGER * waiting_tokens * step_cost_tokens) if step_cost_tokens else math.inf


def sibling(request: Request, cached: int, unfilled: Iterable[Request], limits: Limits) -> tuple[Request, int] | None:
    """Another request that is computing a prefix which `request` needs too, and how far they agree, in whole pages.

    `cached`: tokens of `request` that the cache has. `unfilled`: those whose prompts are being computed. To compute
    `limits.shared_prefix_tokens` tokens or more a second time costs more than to wait for them, which takes no longer
    than the other's prompt does. A further completion waits for a single page, because there may be many of them. A
    request waits once at most, and not at all where it may not take from the cache.
    """
    if request.has_waited or request.next_prompt_logprob:
        return None
    mine = request.fill_ids
    for other in unfilled:
        theirs = other.fill_ids
        least = 0 if other is request.parent else limits.shared_prefix_tokens
        needed = cached + max(least, limits.page_size)
        if (
            needed < min(len(mine), len(theirs) + 1)
            # Prompts that part have parted here, as a rule: one look instead of all.
            and mine.item(needed - 1) == theirs.item(needed - 1)
            and other.submit.namespace == request.submit.namespace
            and np.array_equal(mine[:needed], theirs[:needed])
        ):
            shared = min(common_length(mine, theirs), len(mine) - 1)
            return other, shared // limits.page_size * limits.page_size
    return None


def is_still_held(request: Request) -> bool:
    """Whether the prefix that `request` waits for is still being computed. If not, it is free to go and stays so."""
    if request.waits_for is None:
        return False
    other, shared = request.waits_for
    if other.is_seated and other.settled < shared:
        return True
    request.waits_for = None
    request.has_waited = True
    return False
