"""What a client hears from a router or a worker, as frozen values. `radixfleet.heard` reads them from the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from radixfleet.rates import Recent
from radixfleet.types import (
    Capacity,
    ExecutionId,
    FinishReason,
    Incarnation,
    Load,
    MemoryPools,
    ModelInfo,
    TokenArray,
    Usage,
    WorkerId,
    WorkerStatus,
)


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """How the router chose."""

    policy: str
    reason: str
    predicted_cached_tokens: int
    retries: int
    reachable_cached_tokens: int = 0
    """On the eligible worker that holds most of the prompt."""


@dataclass(frozen=True, slots=True)
class Started:
    """First event: the prompt is being computed."""

    request_id: str
    execution_id: ExecutionId
    worker_id: WorkerId
    prompt_tokens: int
    cached_tokens: int
    route: RouteDecision | None
    """None from a worker that was called directly."""
    counts_follow: bool = False
    """The engine tells its counts with the usage alone: `cached_tokens` is 0 until then, as `prompt_tokens` may be."""
    is_whole: bool = False
    """What the request went on from was the whole answer already: nothing is computed."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token: natural logarithms of the softmax of its own logits."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens in its place, the likeliest first: (token id, log probability)."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A run of prompt tokens, where `prompt_logprobs` asked for them; the runs join, from position 1 on."""

    start: int
    """Position of the first of `tokens`."""
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and the text that they made certain."""

    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    """Which of the n completions."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where `logprobs` asked for them."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a completion. `text` belongs after that of its last Delta."""

    reason: FinishReason
    text: str
    usage: Usage | None
    """Of all completions together, in the very last event; None in those of completions that finish before."""
    matched_stop: str | None
    matched_token_id: int | None
    index: int = 0


Event: TypeAlias = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n completions."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, where they were asked for."""
    finished: Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation. `text`, `token_ids` and `finished` are those of the first of its n choices."""

    started: Started
    choices: tuple[Choice, ...]
    """By index."""
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Log probabilities of the prompt's tokens from the second on, where they were asked for; else empty."""
    ttft_s: float
    """From the call to the first token, seen from here. The whole time when there was no token."""
    total_s: float

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finished(self) -> Finished:
        """How the first choice ended."""
        return self.choices[0].finished


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identity, model, capacity and memory of a worker. What it does not know while loading is zero or empty."""

    worker_id: WorkerId
    incarnation: Incarnation
    status: WorkerStatus
    model: ModelInfo
    capacity: Capacity
    memory: MemoryPools
    version: str
    block_scheme: int
    block_tokens: int
    advice: tuple[str, ...] = ()
    """What its operator should change: memory runs short there, or did so a moment ago."""
    metrics_port: int = 0
    """Port on which it serves Prometheus metrics; 0: none."""


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker as the router sees it."""

    worker_id: WorkerId
    address: str
    status: WorkerStatus
    connected: bool
    info: WorkerInfo
    load: Load
    booked_requests: int
    booked_prompt_tokens: int
    sketch_blocks: int
    approximate: bool
    ineligible_reason: str
    recent: tuple[Recent, ...] = ()
    """What was counted in about the last 10 and the last 60 seconds."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """The router, and all its workers together."""

    uptime_s: float
    policy: str
    requests_in_flight: int
    queued_requests: int
    sketch_blocks: int
    recent: tuple[Recent, ...]
    """Over about 10 and about 60 seconds."""
    version: str


@dataclass(frozen=True, slots=True)
class FleetReport:
    """A fleet as its router sees it."""

    fleet: FleetState
    workers: tuple[WorkerEntry, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one worker would cost for a prompt."""

    worker_id: WorkerId
    address: str
    eligible: bool
    ineligible_reason: str
    matched_blocks: int
    matched_tokens: int
    uncached_tokens: int
    outstanding_prompt_tokens: int
    running_requests: int
    cost: float
    approximate: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a prompt would go now, and why."""

    policy: str
    worker_id: WorkerId
    """Empty when no worker is eligible."""
    reason: str
    prompt_tokens: int
    prompt_blocks: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Where to send a request oneself, and the lease that accounts for it."""

    worker_id: WorkerId
    address: str
    lease_id: str
    token_ids: TokenArray
    decision: RouteDecision
    lease_s: float


@dataclass(frozen=True, slots=True)
class DrainOutcome:
    """How the requests of a drained worker ended."""

    finished_requests: int
    aborted_requests: int
    resumed: bool = False
    """The drain was called off by `resume`: the worker serves again, and need not be empty."""
