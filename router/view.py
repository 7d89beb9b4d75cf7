"""What a policy sees: snapshots of the workers and of one request, and the ranking that it answers with.

A `WorkerView` is made anew when something about the worker changes (a report, a booking, the end of a request) and is
then read by every choice, so what a choice needs again and again is worked out once, when the view is made. What
belongs to one request (how much of its prompt each worker holds) is in the `RequestView`.

One function, `eligible`, decides who may get a request at all; every policy uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.types import HashArray, WorkerId, WorkerStatus

NEVER = -inf
"""The room of a worker that serves nobody."""
_FILL_STEPS = 2**32

Reason: TypeAlias = Literal["only", "prefix", "spill", "load", "turn", "chance", "hash", "none"]
"""Why a worker was chosen.

only    no other worker was eligible
prefix  no eligible worker holds more of the prompt
spill   another worker holds more of the prompt, but its load makes it dearer
load    nobody holds any of the prompt, or the policy does not ask: the least loaded
turn    its turn in a round
chance  drawn at random
hash    the home of the prompt's prefix on the hash ring
none    nobody is eligible
"""

IneligibleReason: TypeAlias = Literal["", "disconnected", "loading", "draining", "failed", "breaker"]
"""Why a worker gets no request; empty when it may."""


Figures: TypeAlias = tuple[int, int, int, float, float, float]
"""Of one worker: outstanding tokens; requests, and with those that must end first; cache fill; room; place.

room   KV tokens that are free or can be evicted; minus infinity when it serves nobody
place  tokens of the longest prompt that may be sent there now: any while nobody waits there, else what `room` holds;
       minus infinity when no place is free. One request may wait in the engine for memory, because the router hears
       of freed memory a moment late, and the one that waits there starts in the very step that frees it
"""


@dataclass(slots=True)
class WorkerView:
    """One worker at one moment: what it last reported, plus what the router has booked there since.

    Never written once it is made; freezing it would cost each choice 4 us.
    """

    slot: int
    """The worker's number in the sketch."""
    worker_id: WorkerId
    status: WorkerStatus = WorkerStatus.SERVING
    """As reported; DRAINING also when it is the router that drains it."""
    connected: bool = True
    breaker_open: bool = False
    running_requests: int = 0
    """Requests in the running batch, and booked ones of which the worker has not said that they wait."""
    waiting_requests: int = 0
    max_running_requests: int = 0
    """0: not known; such a worker is never taken for full."""
    outstanding_prompt_tokens: int = 0
    """Q: prompt tokens reported or booked there, neither cached nor computed yet."""
    kv_tokens: int = 0
    """Size of the KV pool; 0: not known, and then headroom is not asked for."""
    kv_protected_tokens: int = 0
    """KV tokens that cannot be evicted. Cache that can be evicted is no load."""
    sketch_blocks: int = 0
    """Routing blocks in the sketch of this worker."""
    last_booking: int = 0
    """Number of the newest booking on this worker, counted over the whole fleet; 0: none yet."""
    unavailable: IneligibleReason = field(init=False)
    """Why it can serve no request at all; empty when it can. Derived."""
    kv_free_tokens: int = field(init=False)
    """KV tokens that are free or can be evicted; huge when the pool's size is not known. Derived."""
    cache_fill: float = field(init=False)
    """Share of the KV pool that the sketch thinks is cached, in steps of 2**-32, so that sums of many are exact; 0 when
    the pool's size is not known. Derived."""
    requests_in_flight: int = field(init=False)
    """Requests there, running or not. Derived."""
    places_short: int = field(init=False)
    """How many requests must end before one more can run; 0 when it can run at once. Derived."""
    figures: Figures = field(init=False)
    """The figures that a score reads as columns over all workers. Derived."""

    def __post_init__(self) -> None:
        """Work out the derived fields."""
        self.unavailable = _unavailable(self)
        self.kv_free_tokens = _free(self.kv_tokens, self.kv_protected_tokens)
        self.figures = figures(
            requests=self.running_requests + self.waiting_requests,
            waiting_requests=self.waiting_requests,
            max_running_requests=self.max_running_requests,
            outstanding_prompt_tokens=self.outstanding_prompt_tokens,
            kv_tokens=self.kv_tokens,
            kv_protected_tokens=self.kv_protected_tokens,
            sketch_blocks=self.sketch_blocks,
            serves=not self.unavailable,
        )
        _, self.requests_in_flight, held, self.cache_fill, _, _ = self.figures
        self.places_short = held - self.requests_in_flight


class RequestView(NamedTuple):
    """One request at the moment of its choice. A named tuple, for that is made in a third of a dataclass's time."""

    prompt_tokens: int
    block_hashes: HashArray
    """Chained hashes of the prompt's whole routing blocks."""
    matched_blocks: Sequence[int] | npt.NDArray[np.intp]
    """By slot: how many leading blocks of the prompt the worker holds. What `Sketch.match` returned."""
    users: Mapping[int, int] = MappingProxyType({})
    """By slot: requests there that use all that is matched; without an entry none. What `Sketch.users` returned."""
    used_for_s: Mapping[int, float] = MappingProxyType({})
    """By slot: for how long there has always been one of them, in seconds. What `Sketch.used_for_s` returned."""

    def matched_tokens(self, slot: int) -> int:
        """Prompt tokens expected in the worker's cache: at most all but the last, which is always computed."""
        return min(int(self.matched_blocks[slot]) * BLOCK_TOKENS, self.prompt_tokens - 1)

    def uncached_tokens(self, slot: int) -> int:
        """U: prompt tokens that the worker would have to compute; at least 1."""
        return self.prompt_tokens - self.matched_tokens(slot)

    def matched_at(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """`matched_blocks` of these slots."""
        return np.asarray(self.matched_blocks, dtype=np.intp)[slots]


class Ranking(NamedTuple):
    """A policy's answer."""

    slot: int | None
    """Where the request goes; None when nobody is eligible."""
    reason: Reason
    costs: Mapping[int, float]
    """Cost by slot, of the eligible workers alone; the lowest wins. The unit is the policy's own."""
    most_matched_blocks: int | None = None
    """Blocks of the prompt on the eligible worker that holds most of it; None: the policy did not work it out."""

    @property
    def order(self) -> list[int]:
        """Eligible slots, the chosen one first, then by cost."""
        return sorted(self.costs, key=lambda slot: (slot != self.slot, self.costs[slot]))


NOBODY = Ranking(slot=None, reason="none", costs={})
"""The ranking when no worker is eligible."""


def figures(
    *,
    requests: int,
    waiting_requests: int,
    max_running_requests: int,
    outstanding_prompt_tokens: int,
    kv_tokens: int,
    kv_protected_tokens: int,
    sketch_blocks: int,
    serves: bool,
) -> Figures:
    """As `WorkerView` has them. By themselves they cost a third of a view, and most choices read nothing else."""
    short = max(0, requests + 1 - max_running_requests) if max_running_requests else 0
    fill = round(sketch_blocks * BLOCK_TOKENS / kv_tokens * _FILL_STEPS) / _FILL_STEPS if kv_tokens else 0.0
    room = float(_free(kv_tokens, kv_protected_tokens)) if serves else NEVER
    place = NEVER if short else room if waiting_requests or not serves else inf
    return outstanding_prompt_tokens, requests, requests + short, fill, room, place


def eligible(workers: Sequence[WorkerView]) -> list[WorkerView]:
    """The workers that may get a request: those that serve.

    One whose KV pool is full is one where a request waits, and what that costs is the policy's to say: were it left
    out, the last worker with room would get all that comes.
    """
    return [worker for worker in workers if not worker.unavailable]


def _free(kv_tokens: int, kv_protected_tokens: int) -> int:
    return kv_tokens - kv_protected_tokens if kv_tokens else 1 << 62


def _unavailable(worker: WorkerView) -> IneligibleReason:
    if not worker.connected:
        return "disconnected"
    if worker.status is WorkerStatus.LOADING:
        return "loading"
    if worker.status is WorkerStatus.DRAINING:
        return "draining"
    if worker.status is WorkerStatus.FAILED:
        return "failed"
    return "breaker" if worker.breaker_open else ""
