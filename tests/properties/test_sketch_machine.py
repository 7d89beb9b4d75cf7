"""The sketch against a plain model: one exact set for each worker, every rule written out the slow way.

Prompts are chains over two letters, at most five blocks deep, so that they share prefixes all the time. Workers hold a
few blocks, restart, leave and come back; what they report is arbitrary, and sometimes missing, and so is what they say
is coming; requests end in either way, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from radixfleet.blocks import BLOCK_TOKENS
from radixfleet.clock import ManualClock
from router.index import BlockLease, Sketch
from router.index.expectations import GRACE_REPORTS
from tests.support.chains import NONE, blocks, chain

PROMPTS = ("a", "b", "ab", "abb", "aba", "abab", "ababa", "ba")
PROMPT = st.sampled_from(PROMPTS)
BLOCK_SETS = st.lists(PROMPT, max_size=5, unique=True)
PICKS = st.integers(0, 2)


@dataclass(eq=False)
class ModelWorker:
    """What one worker must be thought to hold. A block is named by the letters of its prefix."""

    capacity: int = 0
    modelled: int = 0
    incarnation: int | None = None
    sequence: int | None = None
    clock: int = 0
    reports: int = 0
    used: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Block -> (time of last use, minus its place in the chain used): the smallest leaves first."""
    leases: list[list[str]] = field(default_factory=list)
    since_s: dict[str, float] = field(default_factory=dict)
    """Leased block -> since when it has been leased without a break."""
    due: dict[str, float] = field(default_factory=dict)
    """Expected block -> number of the report by which it must come."""
    coming: dict[str, None] = field(default_factory=dict)
    reported: int = 0
    """Blocks held at the last report."""
    to_begin: list[tuple[BlockLease, int]] = field(default_factory=list)
    """Leases that have not begun, each with the blocks that it brought."""

    def held(self, block: str) -> bool:
        return self.leased(block) or block in self.coming

    def leased(self, block: str) -> bool:
        return any(block in lease for lease in self.leases)

    def use(self, names: list[str]) -> None:
        if names:
            self.clock += 1
            self.used |= {name: (self.clock, -place) for place, name in enumerate(names)}

    def drop(self, names: list[str]) -> None:
        for name in names:
            self.used.pop(name, None)
            self.due.pop(name, None)

    def by_use(self) -> list[str]:
        """What may be dropped, in this order."""
        return sorted((name for name in self.used if not self.held(name)), key=lambda name: self.used[name])

    def going(self, known: list[str]) -> set[str]:
        """Blocks that are gone when the worker begins a request of whose prompt `known` is there."""
        if self.sequence is None:
            return set()
        later = sum(brought for lease, brought in self.to_begin if lease.known_blocks < len(known))
        later += sum(not self.leased(name) for name in self.coming)
        excess = len(self.used) - max(self.capacity, self.reported) - later
        return set(self.by_use()[: max(0, excess)])

    def begun(self, lease: BlockLease) -> None:
        self.to_begin = [(each, brought) for each, brought in self.to_begin if each is not lease]

    def trim(self) -> None:
        bound = self.modelled if self.sequence is None else 2 * self.capacity
        for name in self.by_use():
            if len(self.used) > bound:
                self.drop([name])

    def book(self, names: list[str], now_s: float) -> int | None:
        """Returns when the deepest known block was last used; None when there is none, or it is only expected."""
        known = [name for name in names if name in self.used]
        settled = self.used[known[-1]][0] if known and known[-1] not in self.due else None
        self.clock += 1
        for name in names:
            if name not in self.used:
                self.used[name] = (self.clock, 0)
                self.due[name] = float("inf")
        self.since_s |= {name: now_s for name in names if not self.leased(name)}
        self.leases.append(names)
        self.trim()
        return settled

    def end(self, names: list[str], output: list[str]) -> None:
        self.unlease(names)
        new = [name for name in output if name not in self.used]
        # What others lease is used when they end, unless receipts ask for it.
        self.use([name for name in names if self.sequence is None or not self.leased(name)] + output)
        if self.sequence is None:
            for name in names + output:
                self.due.pop(name, None)
        else:
            self.due |= dict.fromkeys(new, float("inf"))
            for name in names + output:
                if name in self.due and not self.held(name):
                    self.due[name] = self.reports + GRACE_REPORTS
        self.trim()

    def abandon(self, names: list[str]) -> None:
        self.unlease(names)
        self.give_up([name for name in names if not self.leased(name)])
        self.trim()

    def unlease(self, names: list[str]) -> None:
        self.leases.remove(names)
        self.since_s = {name: since_s for name, since_s in self.since_s.items() if self.leased(name)}

    def give_up(self, names: list[str]) -> None:
        self.drop([name for name in names if name in self.due and not self.held(name)])
        self.use([name for name in names if name in self.used])

    def tell(self, coming: list[str], gone: list[str]) -> None:
        if self.sequence is None or not coming + gone:
            return
        left = [name for name in gone if name in self.coming]
        self.come_no_more(left)
        self.give_up(left)
        self.clock += 1
        for name in coming:
            if name not in self.used:
                self.used[name] = (self.clock, 0)
                self.due[name] = float("inf")
        self.coming |= dict.fromkeys(coming)
        self.trim()

    def come_no_more(self, names: list[str]) -> None:
        for name in names:
            self.coming.pop(name, None)

    def receipt(self, missing: int, settled: int) -> None:
        if missing <= 0:
            gap = self.capacity - self.modelled
            self.modelled += min(gap, 1 + gap // 256)
            return
        self.modelled = max(self.modelled - missing, self.capacity // 2)
        self.drop([name for name in self.used if self.used[name][0] <= settled and not self.leased(name)])
        self.trim()

    def digest(self, sequence: int, names: list[str]) -> None:
        self.sequence = sequence
        came, self.coming = self.coming, {}
        self.due = {name: float("inf") for lease in self.leases for name in lease if name not in names}
        self.used = {name: use for name, use in self.used.items() if name in names or name in self.due}
        self.use([name for name in names if name not in self.used or name in came])
        self.reported = len(names)
        self.trim()

    def delta(self, sequence: int, evicted: list[str], added: list[str]) -> None:
        self.sequence = sequence
        self.reports += 1
        for name in evicted:
            if self.held(name):
                self.due[name] = float("inf")
            else:
                self.drop([name])
        self.use(added)
        for name in added:
            self.due.pop(name, None)
        self.come_no_more(added)
        self.reported = len(self.used) - len(self.due)
        self.trim()
        self.drop([name for name, due in self.due.items() if due <= self.reports and not self.held(name)])

    def lose_truth(self) -> None:
        self.sequence = None
        self.use([name for name in self.coming if not self.leased(name)])
        self.coming = {}
        self.due = {name: due for name, due in self.due.items() if self.leased(name)}
        self.trim()

    def set_capacity(self, capacity: int) -> None:
        taught = self.modelled < self.capacity
        self.modelled = min(max(self.modelled, capacity // 2), capacity) if taught else capacity
        self.capacity = capacity
        self.trim()

    def restarted(self, incarnation: int | None) -> ModelWorker:
        return ModelWorker(self.capacity, self.capacity, incarnation)


Held: TypeAlias = tuple[BlockLease, ModelWorker, list[str]]
"""An open lease, the model of its worker, and the prompt's blocks."""


class SketchMachine(RuleBasedStateMachine):
    """Up to three workers; each rule does the same to the sketch and to the model."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.sketch = Sketch(self.clock)
        self.workers: dict[int, ModelWorker] = {}
        self.num_open = 0
        for capacity in (4, 8):
            self.attach(capacity)
        self.sketch.apply_digest(1, 1, 0, NONE)
        self._meet(1, 1).digest(0, [])

    @rule(capacity=st.integers(0, 8))
    @precondition(lambda self: len(self.workers) < 3)
    def attach(self, capacity: int) -> None:
        slot = self.sketch.attach()
        assert slot == min({0, 1, 2} - self.workers.keys())
        self.sketch.set_capacity(slot, capacity)
        self.workers[slot] = ModelWorker(capacity, capacity)

    @rule(
        pick=PICKS,
        kind=st.sampled_from(["detach", "wipe", "restart", "lose_truth", "gap", "gap and restart", "capacity"]),
        number=st.integers(0, 8),
        added=BLOCK_SETS,
    )
    @precondition(lambda self: len(self.workers) > 1)
    def upheaval(self, pick: int, kind: str, number: int, added: list[str]) -> None:
        slot, worker = self._pick(pick)
        incarnation = (worker.incarnation or 0) + (kind in ("restart", "gap and restart"))
        if kind == "detach":
            self.sketch.detach(slot)
            del self.workers[slot]
        elif kind == "wipe":
            self.sketch.wipe(slot)
            self.workers[slot] = worker.restarted(worker.incarnation)
        elif kind == "restart":
            self.sketch.set_incarnation(slot, incarnation)
            self._meet(slot, incarnation)
        elif kind == "lose_truth":
            self.sketch.lose_truth(slot)
            worker.lose_truth()
        elif kind == "capacity":
            self.sketch.set_capacity(slot, number)
            worker.set_capacity(number)
        else:
            sequence = (worker.sequence or 0) + bool(added) + (1 if number % 2 else -1)
            assert not self.sketch.apply_delta(slot, incarnation, sequence, NONE, blocks(*added))
            self._meet(slot, incarnation).lose_truth()

    @rule(target=leases, pick=PICKS, prompt=PROMPT, cached_blocks=st.none() | st.integers(0, 3))
    def book(self, pick: int, prompt: str, cached_blocks: int | None) -> Held:
        """Book a prompt; the worker may begin it at once and tell what it had cached."""
        self.clock.advance(1.0)
        slot, worker = self._pick(pick)
        names = prefixes(prompt)
        depth = self.sketch.match(chain(prompt))[slot]
        lease = self.sketch.book(slot, chain(prompt), len(prompt) * BLOCK_TOKENS + 1)
        self.num_open += 1
        absent = [name not in worker.used for name in names]
        has_hole = absent != sorted(absent)
        self.foresees_what_goes(lease, worker, names)
        settled = worker.book(names, self.clock.now())
        worker.to_begin.append((lease, sum(absent)))
        # With a hole any depth is right that the worker holds, and what a receipt means depends on the depth.
        assert has_hole or lease.known_blocks == depth
        if cached_blocks is not None and not has_hole:
            self.sketch.receipt(lease, cached_blocks * BLOCK_TOKENS)
            worker.begun(lease)
            if worker.sequence is None and settled is not None:
                worker.receipt(lease.known_blocks - cached_blocks, settled)
        return lease, worker, names

    @rule(pick=PICKS, prompt=PROMPT, output=st.sampled_from(["", "a", "ba"]))
    def serve(self, pick: int, prompt: str, output: str) -> None:
        """A whole request."""
        self.end(self.book(pick, prompt, None), output)

    @rule(held=consumes(leases), output=st.sampled_from(["", "a", "ba"]))
    def end(self, held: Held, output: str) -> None:
        lease, worker, names = held
        self.sketch.end(lease, chain(names[-1] + output)[len(names) :])
        self.num_open -= 1
        worker.begun(lease)
        worker.end(names, prefixes(names[-1] + output)[len(names) :])

    @rule(held=consumes(leases))
    def abandon(self, held: Held) -> None:
        self.sketch.abandon(held[0])
        self.num_open -= 1
        held[1].begun(held[0])
        held[1].abandon(held[2])

    @rule(pick=PICKS, restarts=st.sampled_from([0, 0, 0, 1]), sequence=st.integers(0, 2), names=BLOCK_SETS)
    def digest(self, pick: int, restarts: int, sequence: int, names: list[str]) -> None:
        slot, worker = self._pick(pick)
        incarnation = (worker.incarnation or 0) + restarts
        self.sketch.apply_digest(slot, incarnation, sequence, blocks(*names))
        self._meet(slot, incarnation).digest(sequence, names)

    @rule(pick=PICKS, evicted=BLOCK_SETS, added=BLOCK_SETS)
    def delta(self, pick: int, evicted: list[str], added: list[str]) -> None:
        slot, worker = self._pick(pick)
        if worker.sequence is None:
            return
        sequence = worker.sequence + bool(evicted or added)
        assert self.sketch.apply_delta(slot, worker.incarnation or 0, sequence, blocks(*evicted), blocks(*added))
        worker.delta(sequence, evicted, added)

    @rule(pick=PICKS, coming=BLOCK_SETS, gone=BLOCK_SETS)
    def coming(self, pick: int, coming: list[str], gone: list[str]) -> None:
        slot, worker = self._pick(pick)
        self.sketch.apply_coming(slot, blocks(*coming), blocks(*gone))
        worker.tell(coming, gone)

    @rule(pick=PICKS, count=st.integers(1, GRACE_REPORTS))
    def heartbeats(self, pick: int, count: int) -> None:
        slot, worker = self._pick(pick)
        for _ in range(count):
            if worker.sequence is not None:
                assert self.sketch.apply_delta(slot, worker.incarnation or 0, worker.sequence, NONE, NONE)
                worker.delta(worker.sequence, [], [])

    @invariant()
    def map_and_mirrors_agree(self) -> None:
        self.sketch.check()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        names = sorted({name for worker in self.workers.values() for name in worker.used})
        assert self.sketch.num_blocks == len(names)
        for name in names:
            depths = self.sketch.match(blocks(name))
            assert {slot for slot, depth in enumerate(depths) if depth} == {
                slot for slot, worker in self.workers.items() if name in worker.used
            }

    @invariant()
    def depths_are_those_of_a_plain_search(self) -> None:
        for prompt in PROMPTS:
            depths = self.sketch.match(chain(prompt))
            for slot, worker in self.workers.items():
                held = [name in worker.used for name in prefixes(prompt)]
                assert depths[slot] == 0 or held[depths[slot] - 1]
                if held == sorted(held, reverse=True):
                    assert depths[slot] == sum(held)
            self.users_are_the_leases_on_the_deepest_block(prompt, depths)

    def foresees_what_goes(self, lease: BlockLease, worker: ModelWorker, names: list[str]) -> None:
        known = names[: lease.known_blocks]
        going = worker.going(known)
        gone = [name in going for name in known]
        if gone == sorted(gone):
            assert lease.lasting_blocks == len(known) - sum(gone)
        else:  # Arbitrary reports: a parent goes before its child.
            assert lease.lasting_blocks == 0 or not gone[lease.lasting_blocks - 1]

    def users_are_the_leases_on_the_deepest_block(self, prompt: str, depths: list[int]) -> None:
        counts = {
            slot: sum(prompt[: depths[slot]] in lease for lease in worker.leases)
            for slot, worker in self.workers.items()
            if depths[slot]
        }
        assert self.sketch.users(chain(prompt), depths) == {slot: count for slot, count in counts.items() if count}
        assert self.sketch.used_for_s(chain(prompt), depths) == {
            slot: self.clock.now() - self.workers[slot].since_s[prompt[: depths[slot]]]
            for slot, count in counts.items()
            if count
        }

    @invariant()
    def capacity_is_kept_but_for_leases(self) -> None:
        for slot, worker in self.workers.items():
            assert self.sketch.capacity_blocks(slot) == worker.modelled
            assert self.sketch.approximate(slot) == (worker.sequence is None)
            if worker.sequence is None:
                leased = {name for lease in worker.leases for name in lease}
                assert self.sketch.blocks(slot) <= max(worker.modelled, len(leased))

    @invariant()
    def leases_are_counted(self) -> None:
        assert self.sketch.open_leases == self.num_open

    def teardown(self) -> None:
        for slot in list(self.workers):
            self.sketch.detach(slot)
        assert self.sketch.num_blocks == 0

    def _pick(self, pick: int) -> tuple[int, ModelWorker]:
        return sorted(self.workers.items())[pick % len(self.workers)]

    def _meet(self, slot: int, incarnation: int) -> ModelWorker:
        """The model's side of a new incarnation."""
        worker = self.workers[slot]
        if worker.incarnation not in (None, incarnation):
            worker = self.workers[slot] = worker.restarted(incarnation)
        worker.incarnation = incarnation
        return worker


def prefixes(letters: str) -> list[str]:
    return [letters[:depth] for depth in range(1, len(letters) + 1)]


TestSketchMachine = SketchMachine.TestCase
TestSketchMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_the_blocks_of_a_chain_are_those_of_its_prefixes() -> None:
    """What the machine's naming of blocks rests on."""
    assert np.array_equal(chain("abba"), blocks("a", "ab", "abb", "abba"))
