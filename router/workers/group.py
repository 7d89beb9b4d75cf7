"""The workers of one model, with what a choice must know of all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.workers.state import WorkerState


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """Made when facts change, read by every choice."""

    workers: tuple[WorkerState, ...] = ()
    """In whatever state they are."""
    fingerprints: frozenset[int] = frozenset()
    """Of their tokenizers; more than one only while a fleet changes its model."""
    shortest_context: int = 0

    def suitable(
        self, prompt_tokens: int, fingerprint: int | None, *, look_aside: bool = False
    ) -> Sequence[WorkerState]:
        """Workers that understand the tokens; if some have a context long enough, only those.

        `look_aside`: and that speak our own dialect, because the client calls them itself.
        """
        able = [worker for worker in self.workers if worker.is_native] if look_aside else self.workers
        if prompt_tokens < self.shortest_context and (fingerprint is None or self.fingerprints == {fingerprint}):
            return able
        workers = [worker for worker in able if worker.speaks(fingerprint)]
        roomy = [worker for worker in workers if worker.max_context_tokens > prompt_tokens]
        return roomy or workers


def model_groups(workers: Sequence[WorkerState]) -> dict[str, ModelGroup]:
    """By the model's name. Workers that have not told their model are in none."""
    by_model: dict[str, list[WorkerState]] = {}
    fingerprints: dict[str, set[int]] = {}
    for worker in workers:
        if worker.facts is not None and worker.facts.model.model:
            model = worker.facts.model
            by_model.setdefault(model.model, []).append(worker)
            fingerprints.setdefault(model.model, set()).add(model.tokenizer_fingerprint)
    return {
        name: ModelGroup(
            workers=tuple(members),
            fingerprints=frozenset(fingerprints[name]),
            shortest_context=min(worker.max_context_tokens for worker in members),
        )
        for name, members in by_model.items()
    }
