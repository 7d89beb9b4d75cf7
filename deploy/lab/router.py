"""A simulated router: the real sketch, policy, chooser, leases and books, without a network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from deploy.lab.presets import Preset
from radixfleet.blocks import BLOCK_SCHEME, BLOCK_TOKENS, namespace, seed_hash
from radixfleet.clock import Clock
from radixfleet.types import AcceptedLoad, HashArray, Incarnation, Load, ModelInfo, TokenArray, WorkerId, WorkerStatus
from radixfleet.v1 import inference_pb2
from router.dispatch.chooser import Chooser
from router.dispatch.lease import Lease
from router.dispatch.request import PreparedRequest
from router.index import Sketch
from router.index.sketch import NO_BLOCKS
from router.metrics import RouterMetrics
from router.policies import Policy
from router.workers.breaker import Breaker
from router.workers.group import ModelGroup, model_groups
from router.workers.state import WorkerFacts, WorkerState

MODEL = "lab"
NAMESPACE = namespace(MODEL)
SEED = seed_hash(NAMESPACE)

_NO_MESSAGE = inference_pb2.GenerateRequest()


@dataclass(frozen=True, slots=True)
class AcceptedPrompts:
    """What a worker has accepted and not computed: the change since the last one, and the load in all."""

    coming: HashArray
    """Blocks of prompts accepted since, which will soon be in the cache."""
    gone: HashArray
    """Blocks that were coming and are no more: they are computed, or their requests ended before."""
    load: AcceptedLoad


@dataclass(frozen=True, slots=True)
class StateReport:
    """One message of a worker's state stream."""

    incarnation: Incarnation
    sequence: int
    load: Load
    evicted: HashArray
    added: HashArray
    accepted: AcceptedPrompts | None = None
    """None with a single router, which has sent all prompts itself."""
    is_between_reports: bool = False
    """Only `accepted` is new; the rest repeats the last report."""


def prepared(name: str, tokens: TokenArray, block_hashes: HashArray) -> PreparedRequest:
    """A request as the router has it once it is tokenized and hashed."""
    return PreparedRequest(name, MODEL, tokens, SEED, block_hashes, fingerprint=None, message=_NO_MESSAGE)


class SimulatedRouter:
    """One router of the fleet. Callers name workers by number: their place among the setup's presets."""

    def __init__(self, policy: Policy, clock: Clock, random: Random, *, deltas: bool) -> None:
        """`deltas`: the workers tell what they cache; else the router has only its own record, and the receipts."""
        self.sketch = Sketch(clock)
        self._clock = clock
        self._deltas = deltas
        self._workers: dict[int, WorkerState] = {}
        self._groups: dict[str, ModelGroup] = {MODEL: ModelGroup()}
        self._number: dict[WorkerState, int] = {}
        self._chooser = Chooser(self, self.sketch, policy, RouterMetrics(), random)

    def group(self, model: str) -> ModelGroup:
        """Every worker: they all serve the one model."""
        return self._groups[model]

    def add(self, number: int, preset: Preset) -> None:
        """A worker registers. It gets no requests until `connect`."""
        state = WorkerState(
            address=f"worker-{number}",
            slot=self.sketch.attach(),
            sketch=self.sketch,
            breaker=Breaker(failures=5, open_s=10.0, clock=self._clock),
            clock=self._clock,
        )
        state.facts = WorkerFacts(
            worker_id=WorkerId(f"worker-{number}"),
            incarnation=Incarnation(0),
            status=WorkerStatus.SERVING,
            model=ModelInfo(
                model=MODEL,
                max_context_tokens=preset.ready.max_context_tokens,
                vocab_size=0,
                eos_token_ids=(),
                has_chat_template=False,
                tokenizer_fingerprint=0,
                dtype=preset.ready.dtype,
                num_parameters=preset.ready.num_parameters,
            ),
            capacity=preset.ready.capacity,
            memory=preset.ready.memory,
            version="",
            block_scheme=BLOCK_SCHEME,
            block_tokens=BLOCK_TOKENS,
        )
        state.capacity = preset.ready.capacity
        self.sketch.set_capacity(state.slot, preset.ready.capacity.kv_tokens // BLOCK_TOKENS)
        self._workers[number] = state
        self._number[state] = number
        self._groups = model_groups(tuple(self._workers.values()))

    def connect(self, number: int, incarnation: Incarnation) -> None:
        """The worker serves, with an empty cache."""
        state = self._workers[number]
        state.connected, state.status = True, WorkerStatus.SERVING
        if state.incarnation not in (None, incarnation):
            state.restarted()
        state.incarnation = incarnation
        self.sketch.set_incarnation(state.slot, incarnation)
        if self._deltas:
            self.sketch.apply_digest(state.slot, incarnation, 0, NO_BLOCKS)
        state.changed()

    def lose(self, number: int) -> None:
        """The worker's connection broke."""
        state = self._workers[number]
        state.connected = False
        state.books.forget_reports()
        self.sketch.lose_truth(state.slot)
        state.changed()

    def choose(self, request: PreparedRequest, excluded: Collection[int] = ()) -> tuple[int, Lease]:
        """Choose a worker and book the request there. Raises Unavailable when no worker can take it."""
        lease = self._chooser.choose(request, excluded=[self._workers[number] for number in excluded])
        return self._number[lease.worker], lease

    def take(self, number: int, report: StateReport) -> None:
        """A report of the worker has come; one of an earlier incarnation says nothing any more."""
        state = self._workers[number]
        if report.incarnation != state.incarnation or not state.connected:
            return
        accepted = report.accepted
        state.report(
            report.load,
            None if accepted is None else accepted.load,
            is_between_reports=report.is_between_reports,
        )
        if self._deltas:
            if not report.is_between_reports:
                in_order = self.sketch.apply_delta(
                    state.slot, report.incarnation, report.sequence, report.evicted, report.added
                )
                assert in_order, "the lab loses no report"
            if accepted is not None:
                self.sketch.apply_coming(state.slot, accepted.coming, accepted.gone)

    def check(self) -> None:
        """Raise AssertionError unless the books are at zero, as they are when no request is left."""
        assert self.sketch.open_leases == 0, "a lease is open"
        for state in self._workers.values():
            assert (state.books.own_requests, state.books.own_tokens) == (0, 0), f"{state.name} has bookings left"
        self.sketch.check()
