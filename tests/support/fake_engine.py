"""An engine that the test plays: it hears what the front asks, and says what the test tells it to."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixfleet.types import Capacity, FinishReason, Load, MemoryPools, WorkerStatus
from worker.core.messages import (
    Abort,
    Admitted,
    Ended,
    Flush,
    Flushed,
    FrontMessage,
    Output,
    Ready,
    Report,
    StepOutputs,
    Submit,
)
from worker.engine.conversation import Conversation

READY = Ready(
    capacity=Capacity(kv_tokens=4096, page_size=16, max_running_requests=8, chunked_prefill_size=256),
    memory=MemoryPools("fake device", 1000, 500, 300, 200, "the test"),
    num_parameters=1_000_000,
    dtype="float32",
    max_context_tokens=1024,
)


class FakeEngine(Conversation):
    """Loading until `become_ready`. Aborts are answered by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[FrontMessage] = []

    async def start(self) -> None:
        """Nothing starts by itself."""

    async def stop(self) -> None:
        """End, as the real ones do."""
        if not self._stopping:
            self._stopping = True
            self._lose_engine("stopped")

    @property
    def submits(self) -> list[Submit]:
        """The requests heard so far."""
        return [message for message in self.heard if isinstance(message, Submit)]

    @property
    def aborted_uids(self) -> list[int]:
        """The aborts heard so far."""
        return [message.uid for message in self.heard if isinstance(message, Abort)]

    def become_ready(self, ready: Ready = READY) -> None:
        """Loaded."""
        self._hear(ready)

    def admit(self, uid: int, cached_tokens: int = 0, at_s: float = 0.0) -> None:
        """The request leaves the queue."""
        self._hear(StepOutputs([Admitted(uid, cached_tokens, at_s)], [], []))

    def output(self, uid: int, *token_ids: int) -> None:
        """New tokens of the request."""
        self._hear(StepOutputs([], [Output(uid, token_id) for token_id in token_ids], []))

    def end(self, uid: int, reason: FinishReason | None, **fields: object) -> None:
        """The request's terminal outcome."""
        self._hear(StepOutputs([], [], [Ended(uid, reason, **fields)]))  # type: ignore[arg-type]

    def report(
        self,
        load: Load | None = None,
        *,
        evicted: Iterable[int] = (),
        added: Iterable[int] = (),
        counters: dict[str, float] | None = None,
        step_s: Iterable[float] = (),
        bubble_s: Iterable[float] = (),
        step_limits: tuple[int, int] = (0, 0),
        advice: dict[str, str] | None = None,
    ) -> None:
        """The engine's report."""
        self._hear(
            Report(
                load=load or Load(),
                evicted_blocks=np.array(list(evicted), dtype=np.uint64),
                added_blocks=np.array(list(added), dtype=np.uint64),
                counters=counters or {},
                step_age_s=0.0,
                step_s=list(step_s),
                bubble_s=list(bubble_s),
                step_limits=step_limits,
                advice=advice or {},
            )
        )

    def crash(self) -> None:
        """Engine or runner died."""
        self._lose_engine("killed")

    def restart(self) -> None:
        """After a crash: loading again."""
        self._enter(WorkerStatus.LOADING)

    def _send(self, message: FrontMessage) -> None:
        self.heard.append(message)
        if isinstance(message, Abort):
            self.end(message.uid, FinishReason.ABORT)
        if isinstance(message, Flush):
            self._hear(Flushed(message.ticket, 64, 16))
