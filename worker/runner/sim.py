"""A runner without tensors: hashes in place of K and V, a cost model in place of a device. All else is real.

Each slot holds what a model's KV depends on: the token, its position, and a hash of all tokens up to it.

    hash(p) = hash(p - 1) + mix(token at p, p)          modulo 2^64, hash(-1) = 0

The next token is a function of the last hash (and, unless greedy, of the request's seed and the position). So the
tokens of a request depend on its prompt and parameters alone, never on batching, chunking, caching or retraction, and
any slot that is wrong, reused too early or not yet written changes them. The log probability of a token is a function
of it and the same hash. Penalties and bias change nothing here, and grammars are refused. With `verify` set, each step
is also checked against the promises that the scheduler makes (see `_verify`), and a broken one raises PlanError.

Time: each step lasts as long as `CostModel` says; without one it takes no time. The device is one with a queue, as a
CUDA stream is: a step that was handed over while another ran begins the moment that one ends, whatever the processes
around it are doing. Whoever waits for a result sleeps until the step has ended, or advances a ManualClock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from radixfleet.clock import Clock, ManualClock
from radixfleet.types import Capacity, Grammar, MemoryPools
from worker.core.logits import Float32Array, Logprobs, StepLogprobs
from worker.core.messages import Ready
from worker.core.out_of_memory import OutOfMemory
from worker.core.step import BoolArray, Int32Array, RowStart, StepPlan, StepResult, rows_for
from worker.memory.advisor import Bound
from worker.runner.row_logprobs import RowLogprobs

_U64Array = npt.NDArray[np.uint64]

_KV_BYTES_PER_TOKEN = 131_072
_WEIGHTS_BYTES = 16_060_522_496
_ACTIVATIONS_BYTES = 2 << 30
_ACTIVATION_BYTES_PER_TOKEN = 131_072
_NUM_PARAMETERS = 8_030_261_248


class PlanError(AssertionError):
    """A plan breaks a promise: it reads or writes a slot that it must not."""


class CostModel(msgspec.Struct, frozen=True):
    """Seconds that a step takes, linear in what it computes and reads. Defaults: about Llama-3.1-8B on one H100."""

    step_s: float = 6e-3
    """Each step: reading the weights, launching kernels."""
    prefill_token_s: float = 3e-5
    decode_token_s: float = 2e-5
    context_token_s: float = 4.5e-8
    """Each pair of a decode and a token of its context, whose KV it reads."""
    prefill_context_token_s: float = 0.0
    """Each pair of a prefilled token and a token up to it, to which it attends: what makes long prompts dear."""

    def duration_s(self, plan: StepPlan) -> float:
        """How long `plan` takes."""
        num_decodes = int(plan.relayed.sum())
        context = int((plan.starts[plan.relayed] + 1).sum())
        base_s = self.step_s + self.decode_token_s * num_decodes + self.context_token_s * context
        if num_decodes == plan.num_sequences:
            return base_s
        lengths, starts = plan.lengths[~plan.relayed].astype(np.int64), plan.starts[~plan.relayed]
        pairs = int((lengths * starts + lengths * (lengths + 1) // 2).sum())
        prefill_s = self.prefill_token_s * int(lengths.sum()) + self.prefill_context_token_s * pairs
        return base_s + prefill_s

    def decode_durations_s(self, num_decodes: int, context: int, num_steps: int) -> npt.NDArray[np.float64]:
        """The same for each of `num_steps` steps in a row that only decode; `context`: tokens read by the first."""
        contexts = (context + num_decodes * np.arange(num_steps)).astype(np.float64)
        durations: npt.NDArray[np.float64] = (
            self.step_s + self.decode_token_s * num_decodes + self.context_token_s * contexts
        )
        return durations


class SimRunnerConfig(msgspec.Struct, frozen=True, tag="sim"):
    """Settings of one `SimRunner`. Plain data, so that it travels to the runner's process."""

    vocab_size: int = 32_000
    kv_tokens: int = 131_072
    """Size of the KV pool; a multiple of `page_size`."""
    page_size: int = 16
    max_running_requests: int = 256
    chunked_prefill_size: int = 8_192
    max_context_tokens: int = 32_768
    cost: CostModel | None = CostModel()
    """None: steps take no time."""
    load_s: float = 0.0
    """How long loading takes."""
    verify: bool = False
    """Check every step; costs time proportional to the context of every sequence."""
    failing_steps: tuple[int, ...] = ()
    """Numbers of steps that fail as a whole."""
    nan_token: int | None = None
    """A sequence that computes this token gives NaN."""
    memory_tokens: int | None = None
    """A step of more tokens than this runs out of memory."""


@dataclass(slots=True)
class Faults:
    """What goes wrong, by number of the step: set by tests at any time."""

    step_errors: dict[int, str] = field(default_factory=dict)
    nan_sequences: dict[int, set[int]] = field(default_factory=dict)
    """Indices of sequences whose logits are NaN."""
    out_of_memory: Callable[[StepPlan], OutOfMemory | None] = lambda _: None
    """The shortage that a step runs into, or None. Asked once a step, in order."""


class SimRunner:
    """See the head of the module. Implements `Runner` and `StepQueue` of `worker.runner.protocol`."""

    def __init__(self, config: SimRunnerConfig, clock: Clock) -> None:
        self.faults = Faults({step: f"simulated failure of step {step}" for step in config.failing_steps})
        if config.memory_tokens is not None:
            self.faults.out_of_memory = _memory_for(config.memory_tokens)
        self._config = config
        self._clock = clock
        num_slots = config.kv_tokens + config.page_size
        num_rows = rows_for(config.max_running_requests)
        row_length = -(-config.max_context_tokens // config.page_size) * config.page_size
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
        self._last_step = 0
        self._results: deque[StepResult] = deque()
        """Of steps handed over, until they are collected."""
        self._device_free_s = 0.0
        """When the last step handed over ends."""

    def load(self) -> Ready:
        """There is nothing to load; takes `load_s`."""
        config = self._config
        if config.kv_tokens % config.page_size or config.kv_tokens <= 0:
            raise ValueError(f"kv_tokens {config.kv_tokens} is not a multiple of page_size {config.page_size}, or 0")
        self._spend(config.load_s)
        kv_bytes = config.kv_tokens * _KV_BYTES_PER_TOKEN
        return Ready(
            capacity=Capacity(
                kv_tokens=config.kv_tokens,
                page_size=config.page_size,
                max_running_requests=config.max_running_requests,
                chunked_prefill_size=config.chunked_prefill_size,
            ),
            memory=MemoryPools(
                device="simulated",
                total_bytes=_WEIGHTS_BYTES + kv_bytes + _ACTIVATIONS_BYTES,
                weights_bytes=_WEIGHTS_BYTES,
                kv_bytes=kv_bytes,
                activations_bytes=_ACTIVATIONS_BYTES,
                bounded_by=f"{Bound.CAP} = {config.kv_tokens} (simulated)",
            ),
            num_parameters=_NUM_PARAMETERS,
            dtype="simulated",
            max_context_tokens=min(config.max_context_tokens, config.kv_tokens),
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. Raises PlanError when `verify` is set and the plan breaks a promise."""
        self.enqueue(plan)
        return self.collect()

    def enqueue(self, plan: StepPlan) -> None:
        """Hand a step to the device. Its tokens are known at once, and told when it has ended."""
        # What hashing takes is no time of the device's, which would have computed meanwhile.
        started_s = max(self._clock.now(), self._device_free_s)
        if plan.step != self._last_step + 1:
            raise PlanError(f"step {plan.step} follows step {self._last_step}")
        self._last_step = plan.step
        for start in plan.starts_rows:
            self._start_row(start)
        if self._config.verify:
            self._verify(plan)
        shortage = self.faults.out_of_memory(plan)
        error = self.faults.step_errors.pop(plan.step, None) or (None if shortage is None else "out of memory")
        failed = self._failures(plan)
        if error is not None:
            failed[:] = True
        token_ids, told = self._compute(plan)
        self._break(plan, failed)
        cost = self._config.cost
        ends_s = started_s + (cost.duration_s(plan) if cost is not None else 0.0)
        self._device_free_s = max(ends_s, self._clock.now())
        self._results.append(
            StepResult(
                plan.step,
                token_ids,
                failed,
                started_s,
                self._device_free_s,
                error,
                logprobs=told,
                out_of_memory=shortage,
                ready_s=self._clock.now(),
            )
        )

    def time_left_s(self) -> float:
        """Until the oldest step that was not collected ends."""
        return max(0.0, self._results[0].ended_s - self._clock.now())

    def collect(self) -> StepResult:
        """The result of the oldest step, at its end."""
        self._spend(self.time_left_s())
        return self._results.popleft()

    def prepare(self, grammar: Grammar) -> str:
        """There is nothing here that a grammar could constrain."""
        return f"a simulated runner invents tokens and cannot keep to a {grammar.kind}"

    def close(self) -> None:
        """Nothing to free."""

    def _start_row(self, start: RowStart) -> None:
        row, length = start.row, len(start.prefix_slots)
        self._table[row, :length] = start.prefix_slots
        self._lengths[row] = length
        self._parameters[row] = start
        self._logprobs.start(start)
        self._broken[row] = False
        is_greedy = start.temperature == 0.0
        self._salts[row] = 0 if is_greedy else mix(np.array([start.seed], dtype=np.uint64), np.uint64(1))[0]

    def _compute(self, plan: StepPlan) -> tuple[Int32Array, StepLogprobs | None]:
        """Write the slots, and return the token that each sequence samples. All sequences at once, by arrays."""
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
        token_ids = (drawn % np.uint64(self._config.vocab_size)).astype(np.int32)
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
        top_ids = (tokens[:, None] + np.arange(wanted.width)) % self._config.vocab_size
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
            for candidate in range(token_id, token_id + self._config.vocab_size):
                if candidate % self._config.vocab_size not in parameters.stop_token_ids:
                    return candidate % self._config.vocab_size
        return token_id

    def _failures(self, plan: StepPlan) -> BoolArray:
        failed = np.zeros(plan.num_sequences, dtype=np.bool_)
        failed[list(self.faults.nan_sequences.pop(plan.step, ()))] = True
        if self._config.nan_token is not None:
            sequence = np.repeat(np.arange(plan.num_sequences), plan.lengths)
            relayed = np.where(plan.relayed, self._relay[plan.rows], -1)
            failed |= relayed == self._config.nan_token
            failed[sequence[(plan.input_ids == self._config.nan_token) & ~plan.relayed[sequence]]] = True
        return failed

    def _break(self, plan: StepPlan, failed: BoolArray) -> None:
        """What failed rows have written, in this step and until their next start, is not valid KV."""
        self._broken[plan.rows[failed]] = True
        rubbish = np.repeat(self._broken[plan.rows], plan.lengths)
        self._slot_positions[plan.slots[rubbish]] = -1

    def _spend(self, seconds: float) -> None:
        if isinstance(self._clock, ManualClock):
            self._clock.advance(seconds)
        elif seconds > 0:
            time.sleep(seconds)

    def _verify(self, plan: StepPlan) -> None:
        """The promises of a plan.

        Rows and written slots occur once, and slots lie in the pool. A row goes on where it stopped. The slots of its
        earlier positions hold one history of tokens, position by position, and nothing in this step writes them.
        """
        _expect(len(np.unique(plan.rows)) == plan.num_sequences, "a row occurs twice in a step")
        _expect(len(np.unique(plan.slots)) == plan.num_tokens, "a slot is written twice in a step")
        _expect(bool((plan.slots >= self._config.page_size).all()), "the padding sink is written")
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


def _memory_for(num_tokens: int) -> Callable[[StepPlan], OutOfMemory | None]:
    """A device that has activations for steps of so many tokens, each of a simulated size."""

    def shortage(plan: StepPlan) -> OutOfMemory | None:
        if plan.num_tokens <= num_tokens:
            return None
        needed, free = (count * _ACTIVATION_BYTES_PER_TOKEN for count in (plan.num_tokens, num_tokens))
        return OutOfMemory(needed, free, in_sampling=False)

    return shortage


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
