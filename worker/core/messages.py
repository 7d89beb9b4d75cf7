"""What the front says to the engine and hears back. One tagged union a direction, encoded by `worker.core.codec`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from radixfleet.types import Capacity, FinishReason, Grammar, HashArray, Load, MemoryPools
from worker.core.arrays import Float32Array, Int32Array
from worker.core.logits import LogitEdits, TokenLogprobs


class Child(msgspec.Struct, frozen=True, array_like=True):
    """One more completion of a request: the same request under another uid, with another seed."""

    uid: int
    seed: int


class PromptChunk(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step computed a part of a traced request's prompt."""

    uid: int
    start: int
    """Position of its first token."""
    num_tokens: int
    began_s: float
    """When the step began, by the monotonic clock that all processes of a machine share."""
    ended_s: float


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request. `uid` is unique within the engine's life; the client's own id never comes here."""

    uid: int
    token_ids: Int32Array
    namespace: tuple[str, ...]
    """Requests share cached prefixes only within a namespace. A tuple, so that no two can collide by concatenation."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: tuple[int, ...]
    """All that end the generation, the model's end-of-sequence tokens among them; empty with ignore_eos."""
    priority: int
    edits: LogitEdits | None = None
    logprobs: int | None = None
    """Tell the log probabilities of new tokens, and of so many of the likeliest in their places."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on. The prompt is then computed whole, whatever is cached."""
    children: tuple[Child, ...] = ()
    """They wait for this one's prompt, and then find it in the cache. They are not told of the prompt's tokens."""
    traced: bool = False
    """Tell of each chunk of the prompt."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends a request in whatever state it is. Answered by `Ended`, unless it has ended already."""

    uid: int


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Drop all evictable prefixes. Answered by `Flushed`."""

    ticket: int


class FollowBlocks(msgspec.Struct, frozen=True, tag=True):
    """Tell, or no longer tell, the tokens of cached routing blocks: see `Report.block_runs`."""

    on: bool


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Compile a grammar before a request needs it; the engine passes this on to the runner. Answered by `Prepared`."""

    ticket: int
    grammar: Grammar


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Prepare`."""

    ticket: int
    refusal: str = ""
    """Why the grammar cannot be used, for the client; empty when it can."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the engine process after settling what is in flight."""


FrontMessage: TypeAlias = Submit | Abort | Flush | FollowBlocks | Prepare | Stop


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The runner has loaded the model and planned its memory; requests are accepted from now on."""

    capacity: Capacity
    memory: MemoryPools
    num_parameters: int
    dtype: str
    max_context_tokens: int
    """Longest prompt + completion: the model's own limit or the KV pool's size, whichever is less."""
    step_cost_tokens: int = 0
    """Prompt tokens that take as long as a step does before its first token; 0: not known."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The runner cannot serve: no such model, or it does not fit. Nothing follows; the engine process ends."""

    message: str
    """For the operator: what is wrong, with the numbers, and what to change."""


class Admitted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request left the queue for the first time."""

    uid: int
    cached_tokens: int
    at_s: float


class Output(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """One new token of one request."""

    uid: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Where the request asked for them."""


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of a run of a request's prompt tokens. The runs come in order, each begins where the one before it ended."""

    uid: int
    start: int
    """Position of the first token; 1 in the first run."""
    logprobs: Float32Array
    top_ids: Int32Array
    """The likeliest tokens in each one's place, `len(top_ids) / len(logprobs)` of them, the likeliest first."""
    top_logprobs: Float32Array


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The one terminal outcome of a request: nothing about `uid` follows."""

    uid: int
    reason: FinishReason | None
    """None: it failed, and `code` and `message` say why."""
    matched_token_id: int | None = None
    code: str = ""
    """Name of a gRPC status: "INVALID_ARGUMENT", "INTERNAL", ..."""
    message: str = ""


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Flush`."""

    ticket: int
    flushed_tokens: int
    kept_tokens: int


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """Cached routing blocks that follow one another in a prefix, with their tokens."""

    namespace: tuple[str, ...]
    first: int
    """Place of the first of them in its prefix; 0 is the beginning."""
    parent: int
    """Hash of the block before it; at the beginning, the namespace's seed."""
    hashes: HashArray
    token_ids: Int32Array
    """64 for each."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """State of the engine: sent about every 50 ms while something changes, at least every 500 ms as a sign of life."""

    load: Load
    evicted_blocks: HashArray
    """Routing blocks that left and joined the radix cache since the last report; evictions apply first."""
    added_blocks: HashArray
    counters: dict[str, float]
    """Totals since the engine's start, by name: see `worker.engine.counters`."""
    step_age_s: float
    """Age of the oldest launched step without a result, 0 when none is in flight: grows when a runner is stuck."""
    step_s: list[float]
    """Duration of each step ended since the last report, and the device's idle time before it while work waited."""
    bubble_s: list[float]
    step_limits: tuple[int, int] = (0, 0)
    """Prompt tokens in chunks and sequences that a step may have now: below the capacity after a shortage of memory."""
    advice: dict[str, str] = {}
    """By stage, for the operator: what to change, while memory is short there or was so a moment ago."""
    block_runs: list[BlockRun] | None = None
    """None unless followed; else at least what is in `added_blocks`. Parents come before their children."""
    has_all_blocks: bool = False
    """`block_runs` has every cached block: so in the first report after `FollowBlocks`."""


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """All that one turn of the engine's loop has for the front, in order."""

    admitted: list[Admitted]
    outputs: list[Output]
    ended: list[Ended]
    prompt_logprobs: list[PromptLogprobs] = []
    """They come before the outputs."""
    chunks: list[PromptChunk] = []
    """So do these."""


EngineMessage: TypeAlias = Ready | LoadFailed | StepOutputs | Flushed | Prepared | Report
