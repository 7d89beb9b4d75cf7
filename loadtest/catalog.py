"""Workloads by name, sized for a fleet: what `radixfleet lab` offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loadtest.workloads import Chats, SharedPrefix, SiblingBursts, Workload

WORKING_SETS = (0.5, 0.75, 1.5)
"""In parts of the fleet's KV."""
WORKING_SET_PREFIX = 8_192
LEAST_PROMPTS_PER_GROUP = 4
"""Fewer say nothing of a working set: most of the run would be the first time that a prefix is seen."""


@dataclass(frozen=True, slots=True)
class Size:
    """The fleet and the amount of requests that a workload is made for."""

    num_workers: int
    kv_tokens: int
    """Tokens that the KV pools of all workers hold together."""
    num_requests: int
    """About so many; a working set may take more."""
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A named workload."""

    text: str
    make: Callable[[Size], Workload]
    has_rate: bool = True
    """False: everything is there at once."""


def _shared_prefix(size: Size) -> Workload:
    return _grouped(size, num_groups=8 * size.num_workers, prefix_tokens=2048, unique_tokens=128, max_new_tokens=256)


def _zipf(size: Size) -> Workload:
    return _grouped(
        size, num_groups=32 * size.num_workers, prefix_tokens=2048, unique_tokens=128, max_new_tokens=256, zipf=1.1
    )


def _hot_prefix(size: Size) -> Workload:
    return _grouped(size, num_groups=1, prefix_tokens=4096, unique_tokens=128, max_new_tokens=128)


def _nothing_shared(size: Size) -> Workload:
    return _grouped(size, num_groups=1, prefix_tokens=0, unique_tokens=2048, max_new_tokens=256)


def _working_set(factor: float) -> Callable[[Size], Workload]:
    def make(size: Size) -> Workload:
        groups = max(1, round(factor * size.kv_tokens / WORKING_SET_PREFIX))
        return _grouped(size, num_groups=groups, prefix_tokens=WORKING_SET_PREFIX, unique_tokens=128, max_new_tokens=64)

    return make


def _grouped(
    size: Size, *, num_groups: int, prefix_tokens: int, unique_tokens: int, max_new_tokens: int, zipf: float = 0.0
) -> SharedPrefix:
    least = 1 if zipf else LEAST_PROMPTS_PER_GROUP
    return SharedPrefix(
        num_groups=num_groups,
        prompts_per_group=max(least, round(size.num_requests / num_groups)),
        prefix_tokens=prefix_tokens,
        unique_tokens=unique_tokens,
        max_new_tokens=max_new_tokens,
        zipf=zipf,
        requests_per_s=size.requests_per_s,
    )


def _chats(size: Size) -> Workload:
    turns = 8
    return Chats(
        num_chats=max(1, size.num_requests // turns),
        turns=turns,
        num_systems=2 * size.num_workers,
        system_tokens=512,
        user_tokens=192,
        answer_tokens=256,
        think_s=15.0,
        chats_per_s=size.requests_per_s / turns,
    )


def _bursts(size: Size) -> Workload:
    siblings = 8
    return SiblingBursts(
        num_bursts=max(1, size.num_requests // siblings),
        siblings=siblings,
        prefix_tokens=6016,
        unique_tokens=256,
        max_new_tokens=128,
        bursts_per_s=size.requests_per_s / siblings,
    )


def _published(_: Size) -> Workload:
    return SharedPrefix(num_groups=64, prompts_per_group=16, prefix_tokens=2048, unique_tokens=128, max_new_tokens=256)


CATALOG: Mapping[str, Entry] = {
    "shared-prefix": Entry("8 prefixes a worker, equally popular: 2,048 + 128 tokens, 256 new", _shared_prefix),
    "zipf": Entry("32 prefixes a worker, popularity by Zipf (1.1): 2,048 + 128 tokens, 256 new", _zipf),
    "hot-prefix": Entry("one prefix for all: 4,096 + 128 tokens, 128 new", _hot_prefix),
    **{
        f"working-set-{factor:g}": Entry(
            f"prefixes of 8,192 tokens that take {factor:g} times the fleet's KV: + 128 tokens, 64 new",
            _working_set(factor),
        )
        for factor in WORKING_SETS
    },
    "chat": Entry("chats of 8 turns, 15 s apart: 512 of system prompt, turns of 192 and 256 on average", _chats),
    "bursts": Entry("8 prompts at a moment with a new prefix: 6,016 + 256 tokens, 128 new", _bursts),
    "zero-reuse": Entry("nothing in common: 2,048 tokens, 256 new", _nothing_shared),
    "published": Entry(
        "SGLang v0.4's experiment, all at once: 64 groups of 16, 2,048 + 128 tokens, 256 new",
        _published,
        has_rate=False,
    ),
}


def number_told(made: int, asked: int) -> str:
    """How many requests were made of those asked for, for people."""
    return str(made) if made == asked else f"{made} (asked for: {asked}; groups are whole)"
