"""The engine's surroundings as fakes: a front that only listens, and a runner that ends steps when it is told to."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import numpy as np

from radixfleet.clock import ManualClock
from radixfleet.types import Capacity, MemoryPools
from worker.core.messages import EngineMessage, FrontMessage, Prepare, Prepared, Ready, Submit
from worker.core.out_of_memory import OutOfMemory
from worker.core.step import StepPlan, StepResult

Message = TypeVar("Message")


def ready(*, kv_tokens: int = 256, page_size: int = 4, rows: int = 4, chunk: int = 32) -> Ready:
    """A small worker."""
    return Ready(
        capacity=Capacity(kv_tokens, page_size, rows, chunk),
        memory=MemoryPools("fake", 100, 50, 40, 10, "nothing"),
        num_parameters=1,
        dtype="none",
        max_context_tokens=kv_tokens,
    )


def submit(
    uid: int, prompt: int | list[int] = 6, *, max_new_tokens: int = 4, stop_token_ids: tuple[int, ...] = ()
) -> Submit:
    """A greedy request: a prompt of so many tokens, different from that of any other uid, or of just these."""
    token_ids = [uid * 1000 + position for position in range(prompt)] if isinstance(prompt, int) else prompt
    return Submit(
        uid=uid,
        token_ids=np.array(token_ids, dtype=np.int32),
        namespace=("model",),
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=uid,
        max_new_tokens=max_new_tokens,
        min_new_tokens=0,
        stop_token_ids=stop_token_ids,
        priority=0,
    )


class ListeningFront:
    """A mailbox whose other end is the test."""

    def __init__(self) -> None:
        self.inbox: list[FrontMessage] = []
        self.heard: list[EngineMessage] = []

    def receive(self) -> list[FrontMessage]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: EngineMessage) -> None:
        self.heard.append(message)

    def take(self, kind: type[Message]) -> list[Message]:
        """The messages of a kind heard since they were last taken."""
        taken = [message for message in self.heard if isinstance(message, kind)]
        self.heard = [message for message in self.heard if not isinstance(message, kind)]
        return taken


class ObedientExecutor:
    """Holds launched steps until `end_step`: each takes a second of the clock, and samples its own step number."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.launched: deque[StepPlan] = deque()
        self._results: list[StepResult] = []
        self._prepared: list[Prepared] = []
        self.layers_computed = False
        """The runner has said so of the oldest step."""

    def launch(self, plan: StepPlan) -> None:
        self.launched.append(plan)

    def take_layers_computed(self) -> bool:
        layers_computed, self.layers_computed = self.layers_computed, False
        return layers_computed

    def end_step(self, error: str | None = None, out_of_memory: OutOfMemory | None = None) -> StepPlan:
        """The oldest step ends now."""
        plan = self.launched.popleft()
        started_s = self._clock.now()
        self._clock.advance(1.0)
        token_ids = np.full(plan.num_sequences, plan.step, dtype=np.int32)
        failed = np.zeros(plan.num_sequences, dtype=np.bool_)
        times = (started_s, self._clock.now())
        self._results.append(StepResult(plan.step, token_ids, failed, *times, error, out_of_memory=out_of_memory))
        return plan

    def prepare(self, order: Prepare) -> None:
        """Refuse grammars called "bad"."""
        self._prepared.append(Prepared(order.ticket, "it is bad" if order.grammar.source == "bad" else ""))

    def prepared(self) -> list[Prepared]:
        prepared, self._prepared = self._prepared, []
        return prepared

    def results(self) -> list[StepResult]:
        results, self._results = self._results, []
        return results
