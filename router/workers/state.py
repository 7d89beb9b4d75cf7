"""All that the router knows of one worker.

Changed on the event loop only: by the worker's connection, by the leases of its requests, by an operator's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixfleet.blocks import BLOCK_SCHEME, BLOCK_TOKENS
from radixfleet.clock import Clock
from radixfleet.types import AcceptedLoad, Capacity, Incarnation, Load, MemoryPools, ModelInfo, WorkerId, WorkerStatus
from router.index import Sketch
from router.view import Figures, WorkerView, figures
from router.workers.activity import WorkerActivity
from router.workers.books import Booking, Books
from router.workers.breaker import Breaker

UNKNOWN_CONTEXT = 2**31
"""Taken for the context of an engine that does not tell its own: it will refuse what is too long."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker tells about itself when it is asked (`Worker.GetInfo`)."""

    worker_id: WorkerId
    incarnation: Incarnation
    status: WorkerStatus
    model: ModelInfo
    capacity: Capacity | None
    memory: MemoryPools | None
    version: str
    block_scheme: int
    block_tokens: int
    metrics_port: int = 0
    """Of its Prometheus endpoint; 0: none that it knows of."""
    dialect: str = "native"
    """What it speaks: see `Speaker.dialect`."""
    lacks: frozenset[str] = frozenset()
    """What it cannot do: see `Speaker.lacks`."""

    @property
    def comparable_blocks(self) -> bool:
        """Whether its block hashes mean the same as ours."""
        return self.block_scheme == BLOCK_SCHEME and self.block_tokens == BLOCK_TOKENS


class WorkerState:
    """One worker: facts, status, books, breaker; and the view that policies see, made anew when something changed."""

    def __init__(
        self,
        address: str,
        slot: int,
        sketch: Sketch,
        breaker: Breaker,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called whenever the view may be another one."""
        self.address = address
        self.slot = slot
        """The worker's number in the sketch."""
        self.books = Books(clock)
        self.breaker = breaker
        self.activity = WorkerActivity(clock)
        self.facts: WorkerFacts | None = None
        """None until it has answered once."""
        self.refusal = ""
        """Why what answers at the address is not taken for a worker; empty: nothing did, or it is one."""
        self.incarnation: Incarnation | None = None
        self.status = WorkerStatus.LOADING
        self.capacity: Capacity | None = None
        self.advice: tuple[str, ...] = ()
        """What its operator should change, by its last report."""
        self.connected = False
        """A live state stream."""
        self.drain_wanted = False
        """An operator drains it; over with the next incarnation."""
        self.duplicate_of = ""
        """Address of another worker with the same id that is connected; this one gets nothing."""
        self.removed = False
        self.updated_at_s: float | None = None
        """When the last state update came, by the router's clock."""
        self.on_silence: Callable[[], None] = lambda: None
        """Called when the worker hangs, so that requests stop waiting for it."""
        self.stale: set[WorkerState] = set()
        """Shared by the worker's group: those of its workers whose views have changed since the group last looked."""
        self._sketch = sketch
        self._on_change = on_change
        self._last_booking = 0
        self._view: WorkerView | None = None

    @property
    def worker_id(self) -> WorkerId:
        """The worker's id; empty until it has answered once."""
        return self.facts.worker_id if self.facts else WorkerId("")

    @property
    def name(self) -> str:
        """The id, or the address while there is none: the worker's name in logs and metrics."""
        return self.worker_id or self.address

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt + completion that it takes; 0 until it has answered. See UNKNOWN_CONTEXT."""
        if self.facts is None:
            return 0
        return self.facts.model.max_context_tokens or (UNKNOWN_CONTEXT if self.is_text_engine else 0)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt + completion that can ever run there: the context, or the KV pool where that is
        smaller; 0 until it has answered."""
        facts = self.facts
        pool = facts.capacity.kv_tokens if facts and facts.capacity and not self.is_text_engine else 0
        return min(self.max_context_tokens, pool) if pool else self.max_context_tokens

    @property
    def is_native(self) -> bool:
        """It speaks our own dialect, so clients can call it themselves."""
        return self.facts is not None and self.facts.dialect == "native"

    @property
    def lacks(self) -> frozenset[str]:
        """What it cannot do: see `Speaker.lacks`."""
        return frozenset() if self.facts is None else self.facts.lacks

    @property
    def is_text_engine(self) -> bool:
        """It is reached by OpenAI's HTTP: takes text and chats as they are, and ids of the model's own tokenizer."""
        return self.facts is not None and self.facts.dialect == "openai"

    def speaks(self, fingerprint: int | None) -> bool:
        """Whether it understands tokens made by the tokenizer with this fingerprint.

        None: the client's own ids. 0: they are none, and only the text behind them counts.
        """
        if fingerprint is None or self.is_text_engine:
            return True
        return self.facts is not None and self.facts.model.tokenizer_fingerprint == fingerprint

    @property
    def approximate(self) -> bool:
        """The router has no word from the worker on what is cached, only its own record."""
        return self._sketch.approximate(self.slot)

    @property
    def was_lost(self) -> bool:
        """It was connected, and is not any more."""
        return self.updated_at_s is not None and not self.connected

    @property
    def effective_status(self) -> WorkerStatus:
        """As reported, but DRAINING from the moment an operator wants it."""
        draining = self.drain_wanted and self.status is WorkerStatus.SERVING
        return WorkerStatus.DRAINING if draining else self.status

    @property
    def ineligible_reason(self) -> str:
        """In words; empty when it gets requests."""
        if self.duplicate_of:
            return f"the same worker as {self.duplicate_of}"
        if self.facts is None:
            return self.refusal or "never answered"
        return self.view.unavailable

    @property
    def view(self) -> WorkerView:
        """What policies see. A breaker that is not closed changes with time, so then the view is never kept."""
        view = self._view
        if view is None or not self.breaker.is_closed:
            view = self._view = self._make_view()
        return view

    @property
    def figures(self) -> Figures:
        """The view's figures, without making a view: they change with every booking."""
        books, capacity = self.books, self.capacity
        requests, outstanding = books.running_requests, books.outstanding_tokens
        return figures(
            requests=requests,
            waiting_requests=min(books.reported.waiting_requests, requests),
            max_running_requests=capacity.max_running_requests if capacity else 0,
            outstanding_prompt_tokens=outstanding,
            kv_tokens=capacity.kv_tokens if capacity else 0,
            kv_protected_tokens=books.reported.kv_protected_tokens + outstanding,
            sketch_blocks=self._sketch.blocks(self.slot),
            serves=self._serves,
        )

    def changed(self) -> None:
        """Something that the view shows is different now."""
        self._view = None
        self.stale.add(self)
        self._on_change()

    def restarted(self) -> None:
        """The worker's engine is a new one: reports and failures of the old one are forgotten."""
        self.books.forget_reports()
        self.activity.restarted()
        self.breaker.reset()
        self.drain_wanted = False
        self.changed()

    def book(self, tokens: int, number: int) -> Booking:
        """Account for a request of `tokens` uncached prompt tokens, the fleet's booking `number`."""
        self._last_booking = number
        self.changed()
        return self.books.book(tokens)

    def report(self, load: Load, accepted: AcceptedLoad | None = None, *, is_between_reports: bool = False) -> None:
        """The worker's own account of its load; see `Books.report`."""
        self.books.report(load, accepted, is_between_reports=is_between_reports)
        self.changed()

    @property
    def _serves(self) -> bool:
        """Whether its view is available."""
        is_fit = self.connected and self.status is WorkerStatus.SERVING and not self.drain_wanted
        return is_fit and not self.duplicate_of and (self.breaker.is_closed or self.breaker.admits)

    def _make_view(self) -> WorkerView:
        books, capacity = self.books, self.capacity
        total = books.running_requests
        waiting = min(books.reported.waiting_requests, total)
        return WorkerView(
            slot=self.slot,
            worker_id=self.worker_id,
            status=self.effective_status,
            connected=self.connected and not self.duplicate_of,
            breaker_open=not self.breaker.admits,
            running_requests=total - waiting,
            waiting_requests=waiting,
            max_running_requests=capacity.max_running_requests if capacity else 0,
            outstanding_prompt_tokens=books.outstanding_tokens,
            kv_tokens=capacity.kv_tokens if capacity else 0,
            # What is still to be computed will be protected as soon as it is.
            kv_protected_tokens=books.reported.kv_protected_tokens + books.outstanding_tokens,
            sketch_blocks=self._sketch.blocks(self.slot),
            last_booking=self._last_booking,
        )
