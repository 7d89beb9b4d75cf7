"""Parts of a router without any network: workers that are simply said to serve."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from radixfleet import blocks, convert
from radixfleet.clock import ManualClock
from radixfleet.types import Capacity, Incarnation, ModelInfo, TokenArray, WorkerId, WorkerStatus
from radixfleet.v1 import inference_pb2
from router.dispatch.chooser import Chooser
from router.dispatch.request import PreparedRequest
from router.index import Sketch
from router.metrics import RouterMetrics
from router.policies import make_policy
from router.workers.breaker import Breaker
from router.workers.group import ModelGroup, model_groups
from router.workers.listener import LeasePhase
from router.workers.state import WorkerFacts, WorkerState

FINGERPRINT = 7
MODEL = ModelInfo(
    model="m",
    max_context_tokens=100_000,
    vocab_size=1000,
    eos_token_ids=(0,),
    has_chat_template=False,
    tokenizer_fingerprint=FINGERPRINT,
    dtype="float32",
    num_parameters=1,
)
CAPACITY = Capacity(kv_tokens=100_000, page_size=16, max_running_requests=1000, chunked_prefill_size=2048)


def facts(worker_id: str = "w0", **fields: Any) -> WorkerFacts:
    """What a worker says of itself."""
    default = WorkerFacts(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(1),
        status=WorkerStatus.SERVING,
        model=MODEL,
        capacity=CAPACITY,
        memory=None,
        version="0",
        block_scheme=blocks.BLOCK_SCHEME,
        block_tokens=blocks.BLOCK_TOKENS,
    )
    return replace(default, **fields)


def tokens(count: int, first: int = 1) -> TokenArray:
    """Token ids first, first + 1, ..., below 1000."""
    return (np.arange(first, first + count) % 1000).astype(np.uint32)


def prepared(prompt: TokenArray | int = 300, **fields: Any) -> PreparedRequest:
    """A request with this prompt, or one of this length."""
    ids = tokens(prompt) if isinstance(prompt, int) else prompt
    seed = blocks.seed_hash(blocks.namespace("m"))
    default = PreparedRequest(
        request_id="r",
        model="m",
        tokens=ids,
        seed=seed,
        block_hashes=blocks.chain_hashes(seed, ids),
        fingerprint=FINGERPRINT,
        message=inference_pb2.GenerateRequest(request_id="r"),
    )
    return replace(default, **fields)


def sendable(length: int = 20) -> PreparedRequest:
    """A request of this length that a fake worker can answer: its message has the prompt."""
    prompt = (np.arange(length) % 250).astype(np.uint32)
    ids = convert.pack_tokens(prompt)
    message = inference_pb2.GenerateRequest(request_id="r", prompt=inference_pb2.Prompt(token_ids=ids))
    return prepared(prompt, message=message)


@dataclass
class Parts:
    """Some workers of model "m", all serving, and what chooses among them. Stands in for the registry too."""

    num_workers: int = 2
    policy: str = "min_cost"
    clock: ManualClock = field(default_factory=ManualClock)
    sketch: Sketch = field(default_factory=Sketch)
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    workers: list[WorkerState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._groups: dict[str, ModelGroup] | None = None
        for index in range(self.num_workers):
            self.add(f"w{index}")
        self.chooser = Chooser(self, self.sketch, make_policy(self.policy), self.metrics, Random(1))

    def add(self, worker_id: str, **fields: Any) -> WorkerState:
        """One more worker. `fields`: of its facts."""
        breaker = Breaker(failures=3, open_s=10.0, clock=self.clock)
        state = WorkerState(f"{worker_id}:1", self.sketch.attach(), self.sketch, breaker, self.clock)
        state.facts = facts(worker_id, **fields)
        state.status, state.connected, state.capacity = WorkerStatus.SERVING, True, CAPACITY
        state.incarnation = state.facts.incarnation
        self.sketch.set_capacity(state.slot, CAPACITY.kv_tokens // blocks.BLOCK_TOKENS)
        self.workers.append(state)
        return state

    def group(self, model: str) -> ModelGroup:
        """As the registry does."""
        if self._groups is None or self._grouped != [worker.facts for worker in self.workers]:
            self._grouped = [worker.facts for worker in self.workers]
            self._groups = model_groups(self.workers)
        return self._groups[model]

    def check_settled(self) -> None:
        """No counter kept anything of a request."""
        for worker in self.workers:
            assert worker.books.own_requests == 0
            assert worker.books.own_tokens == 0
        assert self.sketch.open_leases == 0
        self.sketch.check()


@dataclass
class Heard:
    """A LeaseListener that writes down what it hears."""

    events: list[tuple[str, LeasePhase, int]] = field(default_factory=list)
    lost: list[WorkerState] = field(default_factory=list)
    gone: list[WorkerState] = field(default_factory=list)

    def lease_event(self, worker: WorkerState, lease_id: str, phase: LeasePhase, cached_tokens: int) -> None:
        self.events.append((lease_id, phase, cached_tokens))

    def events_lost(self, worker: WorkerState) -> None:
        self.lost.append(worker)

    def worker_gone(self, worker: WorkerState) -> None:
        self.gone.append(worker)
