"""One request as the scheduler sees it: its state, what it holds, and how far it is planned and settled.

States go one way, but for a retraction:

    WAITING -> PREFILL -> DECODE -> FINISHED          PREFILL, DECODE -> RETRACTED -> WAITING
       `------------------------------^

A step is launched when it is planned and settled when its result is committed; several may be launched and not
settled. So a request has two frontiers over its positions (`fill_ids`, then the outputs that follow them):

    0 ........ cached ........ settled ........ planned ........ holding.allocated
    [0, settled)          the KV is there
    [settled, planned)    the KV is being computed by launched steps (`in_flight` of them)
    [planned, allocated)  slots that nothing has written yet

While it has a row, its numbers are entries of that row (`rows`), so that a step reads and changes those of all decoding
requests at once. Without one they are zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from worker.core.arrays import Int32Array
from worker.core.messages import Submit
from worker.memory.cached_prefix import Match
from worker.scheduling.holdings import Holding
from worker.scheduling.rows import COLUMNS


class State(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """In the queue; holds nothing."""
    PREFILL = "prefill"
    """Has a row; the last of `fill_ids` is not planned yet."""
    DECODE = "decode"
    """All of `fill_ids` is planned; one token a step from here on."""
    RETRACTED = "retracted"
    """Not planned any more; goes back to the queue when its launched steps have settled."""
    FINISHED = "finished"
    """The client was told the end; what the request holds is released when its launched steps have settled."""


class Entry:
    """A number of a request: the entry of its row in the column of the same name; 0 while it has no row."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._index = COLUMNS.index(name)

    def __get__(self, request: Request, owner: type | None = None) -> int:
        held = request.holding
        return 0 if held is None else held.entries[self._index]

    def __set__(self, request: Request, value: int) -> None:
        request.held.entries[self._index] = value


@dataclass(slots=True, eq=False)
class Request:
    """One request in the scheduler, which alone changes it."""

    submit: Submit
    arrival: int
    """1, 2, 3, ... in the order of submission."""
    fill_ids: Int32Array
    """What must be computed before a token is sampled: the prompt, and after a retraction all tokens so far."""
    outputs: list[int] = field(default_factory=list)
    """Generated tokens that have settled."""
    expected_cached: int = 0
    """While waiting: tokens of `fill_ids` that the cache held when it was last asked."""
    known_match: Match | None = None
    """While waiting: what the cache found when it was last asked."""
    counted_tokens: int = 0
    """This request's part of the queue's `prompt_tokens`."""
    overtaken: int = 0
    """Requests that arrived later and were admitted earlier."""
    waits_for: tuple[Request, int] | None = None
    """Held in the queue until that request has settled that many positions, which this one shares."""
    has_waited: bool = False
    """The request was held once; it is not held again."""
    was_admitted: bool = False
    parent: Request | None = None
    """The request of which this is a further completion (n > 1); it waits until the parent's prompt is computed."""
    next_prompt_logprob: int = 0
    """Position of the next token of the prompt whose log probability is to be told; 0: none is."""
    holding: Holding | None = None
    is_poisoned: bool = False
    """A step of the request failed, so that its KV must not be cached."""
    gave_nan: bool = False
    """The logits of the request held a NaN, so that the KV that is cached of it must not be kept either."""
    _state: State = State.WAITING

    planned = Entry()
    settled = Entry()
    in_flight = Entry()
    """Launched steps with this request that are not settled."""
    samples_in_flight = Entry()
    """The part of `in_flight` that samples a token for this request."""
    to_sample = Entry()
    """Tokens that it may still generate, beyond those that are settled or in flight."""
    stale_steps = Entry()
    """The part of `in_flight` that was built upon a step that was taken back, and whose results are dropped."""
    restarts = Entry()
    """1 when a step of it was taken back: its row is to be started anew with its next step."""
    tries_alone = Entry()
    """Steps of one token, its own, for which there was no memory, since the last with it that was computed."""
    last_step = Entry()
    """The last step planned with it."""

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        if self.holding is not None:
            self.holding.rows.is_decoding[self.holding.row] = state is State.DECODE

    @property
    def final_tokens(self) -> int:
        """Positions that it takes at most: its last token is not computed."""
        return len(self.submit.token_ids) + self.submit.max_new_tokens - 1

    def seat(self, holding: Holding) -> None:
        """It was admitted, and has what `holding` holds; its prompt is computed from there on."""
        self.holding = holding
        rows, row = holding.rows, holding.row
        rows.uid[row] = self.uid
        rows.filled[row] = len(self.fill_ids)
        rows.final[row] = self.final_tokens
        rows.to_sample[row] = self.submit.max_new_tokens - len(self.outputs)
        rows.planned[row] = rows.settled[row] = holding.matched
        self.state = State.PREFILL

    def refill(self) -> None:
        """All tokens so far are to be computed before the next is sampled."""
        self.fill_ids = self.history()
        if self.holding is not None:
            self.holding.rows.filled[self.holding.row] = len(self.fill_ids)

    @property
    def uid(self) -> int:
        """The front's name for it."""
        return self.submit.uid

    @property
    def expected_shared(self) -> int:
        """While waiting: tokens of `fill_ids` that are cached, or will be when what it waits for is computed."""
        return self.expected_cached if self.waits_for is None else max(self.expected_cached, self.waits_for[1])

    @property
    def held(self) -> Holding:
        """What it holds. It must hold something."""
        assert self.holding is not None, f"request {self.uid} holds no memory"
        return self.holding

    @property
    def is_growing(self) -> bool:
        """Whether it is to be planned again. No longer once its last token by length is in flight."""
        return self.to_sample > 0

    @property
    def is_seated(self) -> bool:
        """Whether it is planned step by step: it is in PREFILL or DECODE."""
        return self.state is State.PREFILL or self.state is State.DECODE

    @property
    def resumes_decoding(self) -> bool:
        """Whether a decode of it was taken back and can be tried again: one token, which is known."""
        is_ready = self.restarts > 0 and not self.stale_steps and self.state is State.PREFILL
        return is_ready and self.planned == len(self.fill_ids) - 1

    @property
    def matchable_tokens(self) -> int:
        """So much of `fill_ids` may come from the cache: not the last token, whose logits are wanted, nor one whose
        logits tell the log probability of a token of the prompt.
        """
        return self.next_prompt_logprob - 1 if self.next_prompt_logprob else len(self.fill_ids) - 1

    @property
    def needs_history(self) -> bool:
        """Whether the runner must know the tokens that there are so far."""
        edits = self.submit.edits
        return self.next_prompt_logprob > 0 or (edits is not None and edits.needs_history)

    def history(self, length: int | None = None) -> Int32Array:
        """The prompt and the settled outputs, int32; of both together only the first `length`, if given."""
        prompt = self.submit.token_ids
        if length is not None and length <= len(prompt):
            return prompt[:length]
        outputs = self.outputs if length is None else self.outputs[: length - len(prompt)]
        return np.concatenate([prompt, np.array(outputs, dtype=np.int32)])
