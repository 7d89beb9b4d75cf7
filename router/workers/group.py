"""The workers of one model, with what a choice must know of all of them at once. On the event loop only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

from router.fleet_view import FleetView
from router.workers.state import WorkerState

_LEAVING = ("draining", "failed")


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
        if not is_special and self._all_fit(prompt_tokens + answer_tokens, fingerprint):
            return self.view
        workers = [
            worker
            for worker in self.workers
            if (worker.is_native or not look_aside) and not (needs and needs & worker.lacks)
        ]
        fitting = self._fitting(workers, prompt_tokens, answer_tokens, fingerprint)
        return self.view.only(self._places[worker.slot] for worker in fitting if worker not in excluded)

    def least_room(self, prompt_tokens: int, answer_tokens: int = 1) -> int:
        """Tokens of the longest request of the smallest worker on which prompt and answer fit, or else the prompt; 0
        when it fits nowhere.
        """
        for tokens in (prompt_tokens + answer_tokens, prompt_tokens + 1):
            place = bisect_left(self._lengths, tokens)
            if place < len(self._lengths):
                return self._lengths[place]
        return 0

    def room(self, prompt_tokens: int, fingerprint: int | None) -> int:
        """Tokens that the answer may have on every suitable worker; less than 1 when nothing fits.

        Of those that leave or have failed it counts only where there are no others.
        """
        longest = self.longest_everywhere
        if len(self._lengths) > 1 or not self._all_fit(prompt_tokens + 1, fingerprint):
            fitting = self._fitting(self.workers, prompt_tokens, 1, fingerprint)
            staying = [worker for worker in fitting if worker.ineligible_reason not in _LEAVING] or fitting
            longest = min((worker.longest_request for worker in staying), default=0)
        return longest - prompt_tokens

    def _all_fit(self, tokens: int, fingerprint: int | None) -> bool:
        return tokens <= self.longest_everywhere and (fingerprint is None or self.fingerprints == {fingerprint})

    def _fitting(
        self, workers: Sequence[WorkerState], prompt_tokens: int, answer_tokens: int, fingerprint: int | None
    ) -> Sequence[WorkerState]:
        if self._all_fit(prompt_tokens + answer_tokens, fingerprint):
            return workers
        speaking = [worker for worker in workers if worker.speaks(fingerprint)]
        for tokens in (prompt_tokens + answer_tokens, prompt_tokens + 1):
            fitting = [worker for worker in speaking if worker.longest_request >= tokens]
            if fitting:
                return fitting
        return speaking


def model_groups(workers: Sequence[WorkerState]) -> dict[str, ModelGroup]:
    """By the model's name. Workers that have not told their model are in none."""
    by_model: dict[str, list[WorkerState]] = {}
    for worker in workers:
        if worker.facts is not None and worker.facts.model.model:
            by_model.setdefault(worker.facts.model.model, []).append(worker)
    return {name: ModelGroup(members) for name, members in by_model.items()}
