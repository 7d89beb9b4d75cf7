"""Routing scores that were tried for the default and lost, kept to compare with (`bench_candidates.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import xxhash

from radixfleet.blocks import BLOCK_TOKENS
from router.policies import Policy, make_policy
from router.policies.policy import cheapest, reason_for
from router.view import NOBODY, Ranking, RequestView, WorkerView, eligible

Cost = Callable[[RequestView, WorkerView, Sequence[WorkerView]], float]


@dataclass(frozen=True)
class Cheapest:
    """The lowest of a cost that is given as a function of request, worker and all candidates."""

    name: str
    cost: Cost

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: whatever the function says."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        costs = {worker.slot: self.cost(request, worker, candidates) for worker in candidates}
        chosen = cheapest(candidates, costs, random)
        return Ranking(chosen.slot, reason_for(chosen, candidates, request), costs)


def uncached(request: RequestView, worker: WorkerView) -> int:
    """U."""
    return request.prompt_tokens - BLOCK_TOKENS * request.matched_blocks[worker.slot]


def backlog(weight: float) -> Cheapest:
    """weight * Q + U."""

    def cost(request: RequestView, worker: WorkerView, _: Sequence[WorkerView]) -> float:
        return weight * worker.outstanding_prompt_tokens + uncached(request, worker)

    return Cheapest(f"{weight:g}Q+U", cost)


def falling(scale: float) -> Cheapest:
    """Q / (1 + mean Q / (scale * N)) + U: the weight falls from 1 as the fleet's backlog grows."""

    def cost(request: RequestView, worker: WorkerView, candidates: Sequence[WorkerView]) -> float:
        mean = sum(each.outstanding_prompt_tokens for each in candidates) / len(candidates)
        weight = 1 / (1 + mean / (scale * request.prompt_tokens))
        return weight * worker.outstanding_prompt_tokens + uncached(request, worker)

    return Cheapest(f"l(load/{scale:g})Q+U", cost)


def product() -> Cheapest:
    """(Q + U + a block) * (R + 1): LMetric."""

    def cost(request: RequestView, worker: WorkerView, _: Sequence[WorkerView]) -> float:
        work = worker.outstanding_prompt_tokens + uncached(request, worker) + BLOCK_TOKENS
        return work * (worker.requests_in_flight + 1)

    return Cheapest("product", cost)


def predicted_ttft(chunk: int = 8192, step_tokens: float = 220.0, decode_tokens: float = 4.0) -> Cheapest:
    """Steps to the first token, each with its fixed time and its decodes, in tokens of prefill."""

    def cost(request: RequestView, worker: WorkerView, _: Sequence[WorkerView]) -> float:
        work = worker.outstanding_prompt_tokens + uncached(request, worker)
        steps = -(-work // chunk) + worker.places_short
        return work + steps * (step_tokens + decode_tokens * worker.requests_in_flight)

    return Cheapest("ttft", cost)


@dataclass(frozen=True)
class AffinityGate:
    """llm-d's filter: of the workers that hold most of the prompt the least loaded, unless it is too far behind.

    Holders are those within `similar` of the best match, of at least `worth` of the prompt. Among them, and among all,
    the shortest backlog; the holder wins while it is at most `gate` prompts behind.
    """

    name: str = "affinity"
    worth: float = 0.1
    similar: float = 0.8
    gate: float = 4.0

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: backlog with this prompt."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        costs = {w.slot: float(w.outstanding_prompt_tokens + uncached(request, w)) for w in candidates}
        best = max(request.matched_tokens(worker.slot) for worker in candidates)
        holders = [worker for worker in candidates if request.matched_tokens(worker.slot) >= self.similar * best]
        chosen = cheapest(candidates, costs, random)
        if best > self.worth * request.prompt_tokens:
            holder = cheapest(holders, {worker.slot: costs[worker.slot] for worker in holders}, random)
            if costs[holder.slot] <= costs[chosen.slot] + self.gate * request.prompt_tokens:
                chosen = holder
        return Ranking(chosen.slot, reason_for(chosen, candidates, request), costs)


@dataclass(frozen=True)
class TwoHashes:
    """Two homes a prefix by hashing its beginning; the one with the shorter backlog gets it."""

    name: str = "two_hashes"
    prefix_blocks: int = 4

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: backlog with this prompt."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        costs = {
            w.slot: float(w.outstanding_prompt_tokens + w.requests_in_flight * request.prompt_tokens / 32)
            for w in candidates
        }
        count = min(self.prefix_blocks, len(request.block_hashes))
        if not count:
            return Ranking(cheapest(candidates, costs, random).slot, "load", costs)
        key = int(request.block_hashes[count - 1])
        homes = sorted(candidates, key=lambda w: xxhash.xxh3_64_intdigest(w.worker_id.encode(), seed=key))[:2]
        chosen = cheapest(homes, {worker.slot: costs[worker.slot] for worker in homes}, random)
        return Ranking(chosen.slot, "hash", costs)


def weighted(queue: float, requests: float, *, name: str = "") -> Cheapest:
    """U + queue * Q + N * requests * (R + W)."""

    def cost(request: RequestView, worker: WorkerView, _: Sequence[WorkerView]) -> float:
        load = worker.requests_in_flight + worker.places_short
        return (
            uncached(request, worker)
            + queue * worker.outstanding_prompt_tokens
            + requests * request.prompt_tokens * load
        )

    return Cheapest(name or f"U+{queue:g}Q+N{requests:g}R", cost)


def relative(queue: float, requests: float, slack: float) -> Cheapest:
    """U + queue * Q + N * requests * (R + W) / (mean R + slack)."""

    def cost(request: RequestView, worker: WorkerView, candidates: Sequence[WorkerView]) -> float:
        mean = sum(each.requests_in_flight for each in candidates) / len(candidates)
        load = (worker.requests_in_flight + worker.places_short) / (mean + slack)
        return (
            uncached(request, worker)
            + queue * worker.outstanding_prompt_tokens
            + requests * request.prompt_tokens * load
        )

    return Cheapest(f"rel{queue:g},{requests:g},{slack:g}", cost)


_DISCOUNTS: dict[str, Callable[[float], float]] = {
    "none": lambda crowd: 1.0,
    "linear": lambda crowd: max(0.0, 1 - crowd),
    "hyperbola": lambda crowd: 1 / (1 + crowd),
    "squares": lambda crowd: 1 / (1 + crowd**2),
}


def discounted(
    kind: str, users: float = 12, *, queue: float = 0.25, patience: float = 0.0, requests: float = 20.0
) -> Cheapest:
    """N - M * discount(u / users) + queue * Q / (1 + patience * mean Q / N) + requests * (R + W).

    What a match is worth falls with the requests that use it; R is in tokens.
    """
    discount = _DISCOUNTS[kind]

    def cost(request: RequestView, worker: WorkerView, candidates: Sequence[WorkerView]) -> float:
        matched = BLOCK_TOKENS * request.matched_blocks[worker.slot]
        mean = sum(each.outstanding_prompt_tokens for each in candidates) / len(candidates)
        return (
            request.prompt_tokens
            - matched * discount(request.users.get(worker.slot, 0) / users)
            + worker.outstanding_prompt_tokens * queue / (1 + patience * mean / request.prompt_tokens)
            + requests * (worker.requests_in_flight + worker.places_short)
        )

    return Cheapest(f"{kind}{users:g},{queue:g}/{patience:g},{requests:g}", cost)


def shape(
    *,
    power: int = 3,
    batch: float = 2.5,
    place: float = 0.1,
    crowd: float = 8,
    steep: int = 4,
    main: float = 0.8,
    moment_s: float = 0.005,
    by_holder: bool = False,
    mean_queue: bool = False,
    in_flight: float = 0,
    backlog_weight: float = 3,
    evenly: bool = True,
    always_half: bool = False,
    room: bool = True,
    beside: float = 0,
    beside_mean: float = 0,
    idle_below: int = 8,
    name: str = "",
) -> Cheapest:
    """`MinCost` as its docstring writes it, with other constants.

    The price of a copy falls by x^steep / (x^steep + 1) times the minimum, with x = u / crowd, or the larger of that
    and u / (main F) once the prefix has been in use for `moment_s`; `main` 0: u / crowd alone. `by_holder`: x = u / h /
    crowd, and without the minimum. `mean_queue`: Q' is the mean of the others, not what three of four have.
    `in_flight`, where it is not 0: Q counts i / (i + R') instead, with R' the mean of the requests in flight.
    `backlog_weight`: of Q'. `evenly` False: without the minimum. `always_half`: 2 in place of 1 + 8/i.
    `room` False: Q without the KV tokens that must come free. `beside`: U (1 + B/10 + beside (R - r)), for a prefill
    delays all that run there. `beside_mean`: U (1 + B/10 + beside_mean R/R'), R/R' 1.5 at most. `idle_below`: fewer in
    flight than so many are idle, not 8.
    """

    def paid_by_others(request: RequestView, candidates: Sequence[WorkerView], most: int, mean: float) -> float:
        holders = [each.slot for each in candidates if request.matched_blocks[each.slot] == most]
        users = sum(request.users.get(slot, 0) for slot in holders)
        if not users:
            return 0.0
        share = users / max(users, mean * len(candidates))
        counted = users / crowd / (len(holders) if by_holder else 1)
        used_for_s = max(request.used_for_s.get(slot, 0.0) for slot in holders)
        if main and not by_holder and used_for_s >= moment_s:
            counted = max(counted, share / main)
        load = 1.0 if by_holder or not evenly else share * len(candidates) / len(holders)
        return min(1, load) * counted**steep / (counted**steep + 1)

    def waiting(request: RequestView, worker: WorkerView) -> int:
        lacking = max(0, uncached(request, worker) - worker.kv_free_tokens) if room else 0
        return worker.outstanding_prompt_tokens + lacking

    def cost(request: RequestView, worker: WorkerView, candidates: Sequence[WorkerView]) -> float:
        tokens, matched, count = request.prompt_tokens, request.matched_blocks, len(candidates)
        fill = sum(each.cache_fill for each in candidates) / count
        most = max(matched[each.slot] for each in candidates)
        queue = waiting(request, worker)
        queues = sorted(waiting(request, each) for each in candidates)
        usual = (sum(queues) - queue) / max(1, count - 1) if mean_queue else queues[count // 4]
        delayed = 2 if always_half else 1 + 8 / max(8, sum(_is_idle(each, idle_below) for each in candidates))
        mean = sum(each.requests_in_flight for each in candidates) / count
        least = min(each.requests_in_flight for each in candidates)
        more = worker.requests_in_flight + worker.places_short - least
        price = 1 + (place * min(1.5, worker.cache_fill / fill) if fill else 0.0)
        price += beside * (worker.requests_in_flight - least)
        price += beside_mean * min(1.5, worker.requests_in_flight / mean) if mean else 0.0
        return (
            uncached(request, worker) * price
            - BLOCK_TOKENS * (most - matched[worker.slot]) * paid_by_others(request, candidates, most, mean)
            + queue * (in_flight / (in_flight + mean) if in_flight else 1 / (delayed + backlog_weight * usual / tokens))
            + batch * tokens * (more / (32 + mean)) ** power
        )

    users = f",{'x' if by_holder else 'u'}^{steep}/{crowd:g}"
    if main and not by_holder:
        users += f"|{main:g}F>{moment_s:g}s"
    falls = f",Q{in_flight:g}/({in_flight:g}+R)" if in_flight else ",mean" if mean_queue else ""
    return Cheapest(name or f"R^{power}*{batch:g},{place:g}{users}{falls}", cost)


def _is_idle(worker: WorkerView, below: int) -> bool:
    """Nothing waits there, a request could run at once, and fewer are in flight than `below`."""
    waits = worker.outstanding_prompt_tokens or worker.waiting_requests or worker.places_short
    return not waits and worker.requests_in_flight < below


@dataclass(frozen=True)
class WithRoom:
    """The default among the workers with room for the prompt in their KV pools, or among all where none has it."""

    name: str = "with_room"

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: the default's."""
        candidates = eligible(workers)
        roomy = [each for each in candidates if each.kv_free_tokens >= request.uncached_tokens(each.slot)]
        return make_policy("min_cost").rank(request, roomy or candidates, random)


class Dealt:
    """Clairvoyant on groups that share their first block: dealt in turn, and never torn. A bound, not a policy.

    For one experiment: it forgets no group.
    """

    name = "dealt"

    def __init__(self) -> None:
        self._groups: dict[int, int] = {}

    def rank(self, request: RequestView, workers: Sequence[WorkerView], random: Random) -> Ranking:
        """Cost: 0 at home, 1 elsewhere."""
        candidates = eligible(workers)
        if not candidates:
            return NOBODY
        group = self._groups.setdefault(int(request.block_hashes[0]), len(self._groups))
        home = candidates[group % len(candidates)].slot
        return Ranking(home, "hash", {worker.slot: float(worker.slot != home) for worker in candidates})


def _by_name(*policies: Policy) -> dict[str, Policy]:
    return {policy.name: policy for policy in policies}


ABLATIONS: Mapping[str, Policy] = _by_name(
    shape(place=0, name="no_fill"),
    shape(batch=0, name="no_crowding"),
    shape(crowd=1e9, main=0, name="no_copies"),
    shape(main=0, name="no_main"),
    shape(moment_s=0, name="no_moment"),
    shape(evenly=False, name="no_evenly"),
    shape(backlog_weight=0, name="no_backlog"),
    shape(mean_queue=True, name="mean_backlog"),
    shape(always_half=True, name="half_backlog"),
    shape(room=False, name="no_room"),
)
"""The default with one part of its cost left out, or put more simply."""

CANDIDATES: Mapping[str, Policy] = _by_name(
    *ABLATIONS.values(),
    *(backlog(0.1), backlog(0.3), backlog(1.0), falling(1.0), product(), predicted_ttft()),
    *(AffinityGate(), TwoHashes(), WithRoom()),
    *(relative(0.2, 1, 8), weighted(0.2, 1 / 32), weighted(0.2, 1 / 16), weighted(0.2, 1 / 8)),
    *(discounted("linear"), discounted("squares"), discounted("none")),
    *(discounted("hyperbola", 3, queue=1, patience=3, requests=tokens) for tokens in (5, 20)),
    *(shape(power=1, batch=0.5), shape(power=2, batch=2), shape(place=0), shape(place=0.5), shape(in_flight=16)),
    *(shape(main=0, mean_queue=True), shape(mean_queue=True), shape(main=0)),
    *(shape(moment_s=0), shape(moment_s=0.03), shape(crowd=1e9)),
    *(shape(crowd=1, steep=1, main=0), shape(crowd=3, main=0), shape(crowd=5, main=0)),
    *(shape(beside=1 / n, name=f"beside_{n}") for n in (4, 8, 16, 32, 64, 128)),
    *(shape(beside_mean=1 / n, name=f"beside_mean_{n}") for n in (10, 20)),
    *(shape(idle_below=n, name=f"idle_below_{n}") for n in (4, 16, 32)),
    *(shape(by_holder=True), shape(by_holder=True, crowd=3), shape(by_holder=True, place=0.5)),
)
"""By name: what lost to the default."""
