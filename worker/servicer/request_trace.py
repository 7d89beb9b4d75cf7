"""The spans of one request on a worker: its time in the queue, each chunk of its prompt, and its decoding.

Generate   arrival ......................................................... end
  queue    arrival ... admission
  prefill              admission ............ first token
    prefill chunk        step   step   step                as the engine told of them
  decode                                      first token ................. end
"""

from __future__ import annotations

from collections.abc import Sequence

from radixfleet.tracing import UNTRACED, Attribute, Trace
from worker.core.messages import PromptChunk
from worker.metrics import Outcome

_FAILURES = frozenset({Outcome.UNAVAILABLE, Outcome.FAILED, Outcome.DEADLINE})


class RequestTrace:
    """Begun at the arrival, below the current context; ended once. All times are the worker's clock's."""

    def __init__(self, arrived_s: float, now_s: float) -> None:
        self._arrived_s = arrived_s
        self._root = Trace.begin("Generate", arrived_s, now_s)
        self._phase = UNTRACED
        """The span of the phase that runs now: prefill or decode."""
        self.is_recorded = self._root.is_recorded

    def admitted(self, at_s: float) -> None:
        """The request left the queue."""
        self._root.span("queue", self._arrived_s, at_s)
        self._phase = self._root.child("prefill", at_s)

    def computed(self, chunks: Sequence[PromptChunk]) -> None:
        """Chunks of the prompt were computed."""
        for chunk in chunks:
            self._phase.span("prefill chunk", chunk.began_s, chunk.ended_s, start=chunk.start, tokens=chunk.num_tokens)

    def first_token(self, at_s: float) -> None:
        """The prompt is computed, and the first token sampled."""
        self._root.event("first token", at_s)
        self._phase.end(at_s)
        self._phase = self._root.child("decode", at_s)

    def ended(self, outcome: Outcome, at_s: float, **attributes: Attribute) -> None:
        """It is over."""
        self._phase.end(at_s)
        self._root.note(radixfleet__outcome=outcome.value, **attributes)
        self._root.end(at_s, outcome.value if outcome in _FAILURES else "")
