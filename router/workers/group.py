"""The workers of one model, with what a choice must know of all of them at once. On the event loop only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from router.fleet_view import FleetView, IntArray
from router.workers.state import WorkerState

_LEAVING = ("draining", "failed")
_UNKNOWN = -1
"""In the place of a fingerprint that no worker has."""
_MOST_KEPT = 256
"""Lanes whose workers are remembered: clients choose what they need, and could need it in any mixture."""


class Speaking(NamedTuple):
    """What a request asks of workers but for room; None, False and empty where all can."""

    fingerprint: int | None
    native: bool
    needs: frozenset[str]


class Lane(NamedTuple):
    """Of a request, in one group: requests of the same lane are those that the same workers can take."""

    speaking: Speaking
    least_room: int
    """Tokens of the longest request of the smallest worker that has room; 0: none has."""


_ALL = Speaking(fingerprint=None, native=False, needs=frozenset())


class ModelGroup:
    """Made anew when facts change, read by every choice.

    Workers that changed since the last choice are noted, and `view` takes in those alone.
    """

    def __init__(self, workers: Sequence[WorkerState] = ()) -> None:
        """`workers`: in whatever state they are; each must have told its facts. They belong to this group now."""
        self.workers = tuple(workers)
        models = [worker.facts.model for worker in workers if worker.facts is not None]
        self.fingerprints = frozenset(model.tokenizer_fingerprint for model in models)
        """Fingerprints of the workers' tokenizers; more than one only while a fleet changes its model."""
        self._longest = np.array([worker.longest_request for worker in workers], dtype=np.intp)
        self._lacks = frozenset[str]().union(*(worker.lacks for worker in workers))
        self._speakers: dict[Speaking, tuple[IntArray, list[int]]] = {}
        """Places of the workers that can do it, and the lengths of their longest requests, each once, in order."""
        self._fitting: dict[Lane, IntArray] = {}
        self._lengths = sorted({worker.longest_request for worker in workers})
        self.longest_everywhere = self._lengths[0] if self._lengths else 0
        """Tokens of the longest request that can run on each of them."""
        contexts = [worker.max_context_tokens for worker in workers if worker.is_native]
        self.longest_native_context = max(contexts, default=0) if all(contexts) else 0
        """Longest context of the workers that clients may call directly; 0: there are none, or not all have told it."""
        self.all_native = all(worker.is_native for worker in workers)
        is_common = self.all_native and bool(models) and all(model == models[0] for model in models[1:])
        self.common_model = models[0] if is_common else None
        """What all of them tell of their model; None: they differ, or are not all of our own dialect."""
        self._places = {worker.slot: place for place, worker in enumerate(workers)}
        self._view = FleetView(worker.view for worker in workers)
        self._stale = {worker for worker in workers if not worker.breaker.is_closed}
        for worker in workers:
            worker.stale = self._stale

    def at(self, slot: int) -> WorkerState:
        """The worker with this slot, which must be in the group."""
        return self.workers[self._places[slot]]

    @property
    def view(self) -> FleetView:
        """All of them as policies see them now."""
        stale = self._stale
        if stale:
            for worker in tuple(stale):
                self._view.changed(self._places[worker.slot], worker, worker.figures)
                if worker.breaker.is_closed:  # else what it admits changes with time
                    stale.remove(worker)
        return self._view

    def suitable(
        self,
        prompt_tokens: int,
        fingerprint: int | None,
        *,
        answer_tokens: int = 1,
        look_aside: bool = False,
        excluded: Collection[WorkerState] = (),
        needs: frozenset[str] = frozenset(),
    ) -> FleetView:
        """Workers that understand the tokens; where some have room for prompt and answer, only those, else only those
        with room for the prompt, where there are any. Read it in this turn.

        `look_aside`: and that speak our own dialect, because the client calls them itself. `needs`: and that lack none
        of these (see `router.dialects.needs`).
        """
        is_special = needs or excluded or (look_aside and not self.all_native)
        if not is_special and prompt_tokens + answer_tokens <= self.longest_everywhere and self._all_speak(fingerprint):
            return self.view
        lane = self.lane(prompt_tokens, fingerprint, answer_tokens=answer_tokens, look_aside=look_aside, needs=needs)
        places = self._places_of(lane)
        if excluded:
            places = np.array(
                [place for place in places.tolist() if self.workers[place] not in excluded], dtype=np.intp
            )
        return self.view if len(places) == len(self.workers) else self.view.only(places)

    def lane(
        self,
        prompt_tokens: int,
        fingerprint: int | None,
        *,
        answer_tokens: int = 1,
        look_aside: bool = False,
        needs: frozenset[str] = frozenset(),
    ) -> Lane:
        """What tells the workers that are suitable for a request from others. It holds for this group alone."""
        speaking = _ALL
        native, lacked = look_aside and not self.all_native, needs & self._lacks
        if native or lacked or not self._all_speak(fingerprint):
            if self._all_speak(fingerprint):
                fingerprint = None
            elif fingerprint not in self.fingerprints:
                fingerprint = _UNKNOWN
            speaking = Speaking(fingerprint, native, lacked)
        _, lengths = self._speakers_of(speaking)
        for tokens in (prompt_tokens + answer_tokens, prompt_tokens + 1):
            place = bisect_left(lengths, tokens)
            if place < len(lengths):
                return Lane(speaking, lengths[place])
        return Lane(speaking, 0)

    def room(self, prompt_tokens: int, fingerprint: int | None) -> int:
        """Tokens that the answer may have on every suitable worker; less than 1 when nothing fits.

        Of those that leave or have failed it counts only where there are no others.
        """
        lane = self.lane(prompt_tokens, fingerprint)
        is_same = len(self._lengths) == 1 and lane.least_room
        longest = self.longest_everywhere if is_same else self._least_staying(lane)
        return longest - prompt_tokens

    def _all_speak(self, fingerprint: int | None) -> bool:
        return fingerprint is None or self.fingerprints == {fingerprint}

    def _least_staying(self, lane: Lane) -> int:
        """The shortest of the longest requests of the lane's workers, of those that stay if any does."""
        places = self._places_of(lane)
        in_order = places[np.argsort(self._longest[places], kind="stable")].tolist()
        staying = (place for place in in_order if self.workers[place].ineligible_reason not in _LEAVING)
        place = next(staying, in_order[0] if in_order else None)
        return 0 if place is None else self.workers[place].longest_request

    def _speakers_of(self, speaking: Speaking) -> tuple[IntArray, list[int]]:
        known = self._speakers.get(speaking)
        if known is None:
            able = [
                place
                for place, worker in enumerate(self.workers)
                if (worker.is_native or not speaking.native)
                and not (speaking.needs & worker.lacks)
                and worker.speaks(speaking.fingerprint)
            ]
            places = np.array(able, dtype=np.intp)
            if len(self._speakers) >= _MOST_KEPT:
                self._speakers.clear()
            known = self._speakers[speaking] = places, sorted(set(self._longest[places].tolist()))
        return known

    def _places_of(self, lane: Lane) -> IntArray:
        """Of the workers that can take its requests."""
        places = self._fitting.get(lane)
        if places is None:
            able, _ = self._speakers_of(lane.speaking)
            if len(self._fitting) >= _MOST_KEPT:
                self._fitting.clear()
            places = self._fitting[lane] = able[self._longest[able] >= lane.least_room]
        return places


def model_groups(workers: Sequence[WorkerState]) -> dict[str, ModelGroup]:
    """By the model's name. Workers that have not told their model are in none."""
    by_model: dict[str, list[WorkerState]] = {}
    for worker in workers:
        if worker.facts is not None and worker.facts.model.model:
            by_model.setdefault(worker.facts.model.model, []).append(worker)
    return {name: ModelGroup(members) for name, members in by_model.items()}
