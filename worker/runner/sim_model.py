"""What a simulated runner computes: hashes in place of keys and values, for all rows of a step at once by arrays.

Each slot holds what a model's KV depends on: the token, its position, and a hash of all tokens up to it.

    hash(p) = hash(p - 1) + mix(token at p, p)          modulo 2^64, hash(-1) = 0

The next token is a function of the last hash (and, unless greedy, of the request's seed and the position). So the
tokens of a request depend on its prompt and parameters alone, never on batching, chunking, caching or retraction, and
any slot that is wrong, reused too early or not yet written changes them. The log probability of a token is a function
of it and the same hash. Penalties and bias change nothing here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker.core.arrays import BoolArray, Float32Array, Int32Array
from worker.core.logits import Logprobs, StepLogprobs
from worker.core.step import RowStart, StepPlan
from worker.runner.row_logprobs import RowLogprobs

_U64Array = npt.NDArray[np.uint64]


class PlanError(AssertionError):
    """A plan breaks a promise: it reads or writes a slot that it must not."""


class HashModel:
    """Slots and rows of one runner."""

    def __init__(self, *, vocab_size: int, num_slots: int, page_size: int, num_rows: int, max_context: int) -> None:
        """`num_slots` includes the padding sink's, which are the first `page_size`."""
        self._vocab_size = vocab_size
        self._page_size = page_size
        row_length = -(-max_context // page_size) * page_size
        self._slot_hashes: _U64Array = np.zeros(num_slots, dtype=np.uint64)
        self._slot_tokens: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self._slot_positions: Int32Array = np.full(num_slots, -1, dtype=np.int32)
        """-1: nothing valid is there."""
        self._table: Int32Array = np.zeros((num_rows, row_length), dtype=np.int32)
        self._relay: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self._lengths: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self._salts: _U64Array = np.zeros(num_rows, dtype=np.uint64)
        """Of sampled rows: their seed, mixed; 0 where greedy."""
        self._parameters: dict[int, RowStart] = {}
        self._logprobs = RowLogprobs(num_rows)
        self._broken: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        """Rows that had a failure and compute rubbish until their next start."""

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        row, length = start.row, len(start.prefix_slots)
        self._table[row, :length] = start.prefix_slots
        self._lengths[row] = length
        self._parameters[row] = start
        self._logprobs.start(start)
        self._broken[row] = False
        self._salts[row] = 0 if start.is_greedy else mix(np.array([start.seed], dtype=np.uint64), np.uint64(1))[0]

    def compute(self, plan: StepPlan) -> tuple[Int32Array, StepLogprobs | None]:
        """Write the slots. Returns the token that each sequence samples, and what is to be told of tokens."""
        ends = np.cumsum(plan.lengths)
        offsets = ends - plan.lengths
        sequence = np.repeat(np.arange(plan.num_sequences), plan.lengths)
        positions = (plan.starts - offsets)[sequence] + np.arange(plan.num_tokens)
        input_ids = np.where(plan.relayed[sequence], self._relay[plan.rows][sequence], plan.input_ids)
        before = np.where(plan.starts > 0, self._slot_hashes[self._table[plan.rows, plan.starts - 1]], np.uint64(0))
        steps = mix(input_ids.astype(np.uint64), positions.astype(np.uint64))
        sums = np.cumsum(steps)
        hashes = sums - (sums[offsets] - steps[offsets])[sequence] + before[sequence]

        self._table[plan.rows[sequence], positions] = plan.slots
        self._slot_hashes[plan.slots] = hashes
        self._slot_tokens[plan.slots] = input_ids
        self._slot_positions[plan.slots] = positions
        next_positions = plan.starts + plan.lengths
        self._lengths[plan.rows] = next_positions

        drawn = mix(hashes[ends - 1] + self._salts[plan.rows], next_positions.astype(np.uint64))
        token_ids = (drawn % np.uint64(self._vocab_size)).astype(np.int32)
        for index in np.flatnonzero(plan.samples):
            token_ids[index] = self._unmasked(int(plan.rows[index]), int(next_positions[index]), int(token_ids[index]))
        self._relay[plan.rows[plan.samples]] = token_ids[plan.samples]
        return token_ids, self._tell(plan, token_ids, hashes)

    def _tell(self, plan: StepPlan, token_ids: Int32Array, hashes: _U64Array) -> StepLogprobs | None:
        """Log probabilities, where rows ask for them; `hashes`: of each token of the batch."""
        sampling = np.flatnonzero(plan.samples)
        wanted = self._logprobs.wanted(plan, sampling)
        if wanted is None:
            return None
        speaking = sampling[wanted.sampled]
        foretelling = np.concatenate([wanted.prompt_indices, np.cumsum(plan.lengths)[speaking] - 1])
        tokens = np.concatenate([wanted.prompt_tokens, token_ids[speaking]])
        top_ids = (tokens[:, None] + np.arange(wanted.width)) % self._vocab_size
        return wanted.put_together(
            [
                Logprobs(
                    tokens=logprob(hashes[foretelling], tokens),
                    top_ids=top_ids.astype(np.int32),
                    top=np.sort(logprob(hashes[foretelling][:, None], top_ids), axis=1)[:, ::-1],
                )
            ]
        )

    def _unmasked(self, row: int, position: int, token_id: int) -> int:
        """The token itself, or the next that is no stop token while min_new_tokens are not there yet."""
        parameters = self._parameters[row]
        if position - parameters.prompt_tokens < parameters.min_new_tokens:
            for candidate in range(token_id, token_id + self._vocab_size):
                if candidate % self._vocab_size not in parameters.stop_token_ids:
                    return candidate % self._vocab_size
        return token_id

    def computing(self, token: int, plan: StepPlan) -> BoolArray:
        """Which sequences of a step that is not computed yet have the token among their inputs."""
        sequence = np.repeat(np.arange(plan.num_sequences), plan.lengths)
        has_token: BoolArray = plan.relayed & (self._relay[plan.rows] == token)
        has_token[sequence[(plan.input_ids == token) & ~plan.relayed[sequence]]] = True
        return has_token

    def break_rows(self, plan: StepPlan, failed: BoolArray) -> None:
        """What failed rows have written, in this step and until their next start, is not valid KV."""
        self._broken[plan.rows[failed]] = True
        rubbish = np.repeat(self._broken[plan.rows], plan.lengths)
        self._slot_positions[plan.slots[rubbish]] = -1

    def verify(self, plan: StepPlan) -> None:
        """The promises of a plan that is not computed yet. Raises PlanError when one is broken.

        Rows and written slots occur once, and slots lie in the pool. A row goes on where it stopped. The slots of its
        earlier positions hold one history of tokens, position by position, and nothing in this step writes them.
        """
        _expect(len(np.unique(plan.rows)) == plan.num_sequences, "a row occurs twice in a step")
        _expect(len(np.unique(plan.slots)) == plan.num_tokens, "a slot is written twice in a step")
        _expect(bool((plan.slots >= self._page_size).all()), "the padding sink is written")
        _expect(bool((plan.lengths > 0).all()), "a sequence computes nothing")
        written = np.zeros(len(self._slot_positions), dtype=np.bool_)
        written[plan.slots] = True
        for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True):
            if self._broken[row]:
                continue
            _expect(start == self._lengths[row], f"row {row} goes on at {start}, but stopped at {self._lengths[row]}")
            slots, positions = self._table[row, :start], np.arange(start)
            _expect(not written[slots].any(), f"row {row} reads a slot that the same step writes")
            in_place = np.array_equal(self._slot_positions[slots], positions)
            _expect(in_place, f"row {row} reads a slot that does not hold its position")
            hashes = np.cumsum(mix(self._slot_tokens[slots].astype(np.uint64), positions.astype(np.uint64)))
            one_history = np.array_equal(hashes, self._slot_hashes[slots])
            _expect(one_history, f"row {row} reads slots of different histories")


def logprob(hashes: _U64Array, tokens: npt.NDArray[np.integer]) -> Float32Array:
    """What this model says of `tokens` after histories with `hashes`: from -10 to 0."""
    mixed = mix(hashes + tokens.astype(np.uint64), np.uint64(2))
    result: Float32Array = -((mixed % np.uint64(10_000)).astype(np.float32)) / np.float32(1000)
    return result


def mix(values: _U64Array, salts: _U64Array | np.uint64) -> _U64Array:
    """64 well-mixed bits for each of `values` [n] (splitmix64's finish over a linear combination of value and salt)."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15)
    mixed += (np.atleast_1d(salts) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _expect(condition: bool, message: str) -> None:  # noqa: FBT001 - an assertion that optimization does not remove
    if not condition:
        raise PlanError(message)
