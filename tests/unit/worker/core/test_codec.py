"""Every message survives the wire between the worker's processes, and a wrong one is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from radixfleet.types import Capacity, FinishReason, Grammar, GrammarKind, Load, MemoryPools
from worker.core import codec
from worker.core.logits import LogitEdits, StepLogprobs, TokenLogprobs
from worker.core.messages import (
    Abort,
    Admitted,
    BlockRun,
    Child,
    Ended,
    EngineMessage,
    Flush,
    Flushed,
    FollowBlocks,
    FrontMessage,
    LoadFailed,
    Output,
    Prepare,
    Prepared,
    PromptLogprobs,
    Ready,
    Report,
    StepOutputs,
    Stop,
    Submit,
)
from worker.core.out_of_memory import OutOfMemory
from worker.core.step import Compile, Compiled, RowStart, StepPlan, StepResult


def submit(token_ids: np.ndarray) -> Submit:
    return Submit(
        uid=2**40,
        token_ids=token_ids,
        namespace=("model", "", "salt"),
        temperature=0.7,
        top_p=0.9,
        top_k=0,
        min_p=0.0,
        seed=2**63 + 1,
        max_new_tokens=5,
        min_new_tokens=0,
        stop_token_ids=(2, 7),
        priority=-1,
    )


def plan(*, num_rows: int, num_tokens: int, prefix: int) -> StepPlan:
    start = RowStart(
        row=3,
        prefix_slots=np.arange(prefix, dtype=np.int32),
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=1,
        prompt_tokens=9,
        min_new_tokens=0,
        stop_token_ids=(),
    )
    return StepPlan(
        step=4,
        row_starts=(start,),
        rows=np.arange(num_rows, dtype=np.int32),
        starts=np.arange(num_rows, dtype=np.int32),
        lengths=np.ones(num_rows, dtype=np.int32),
        samples=np.ones(num_rows, dtype=np.bool_),
        relayed=np.zeros(num_rows, dtype=np.bool_),
        input_ids=np.arange(num_tokens, dtype=np.int32),
        slots=np.arange(num_tokens, dtype=np.int32)[::-1],
    )


def as_plain(value: object) -> object:
    """The value with arrays as (dtype, list), so that == compares all of it."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, msgspec.Struct):
        return type(value), [as_plain(getattr(value, field)) for field in value.__struct_fields__]
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value


EDITS = LogitEdits(0.5, -0.5, 1.25, ((3, -100.0),), Grammar(GrammarKind.JSON_SCHEMA, "{}"))
FRONT_MESSAGES: list[FrontMessage] = [
    submit(np.arange(5, dtype=np.int32)),
    submit(np.empty(0, dtype=np.int32)),
    Abort(uid=7),
    Flush(ticket=1),
    FollowBlocks(on=True),
    Prepare(ticket=2, grammar=Grammar(GrammarKind.REGEX, "é+")),
    Stop(),
    msgspec.structs.replace(
        submit(np.arange(5, dtype=np.int32)), edits=EDITS, logprobs=0, prompt_logprobs=20, children=(Child(5, 2**63),)
    ),
]
ENGINE_MESSAGES: list[EngineMessage] = [
    Ready(
        capacity=Capacity(kv_tokens=100, page_size=16, max_running_requests=8, chunked_prefill_size=64),
        memory=MemoryPools("cpu", 100, 50, 40, 10, "mem_fraction_static"),
        num_parameters=135_000_000,
        dtype="bfloat16",
        max_context_tokens=100,
    ),
    LoadFailed(message="weights need 300 MB, the device has 200 MB: raise device_memory"),
    StepOutputs(
        admitted=[Admitted(uid=1, cached_tokens=64, at_s=1.5)],
        outputs=[Output(uid=1, token_id=5), Output(uid=2, token_id=6)],
        ended=[
            Ended(uid=1, reason=FinishReason.STOP, matched_token_id=5),
            Ended(uid=2, reason=None, code="INTERNAL", message="NaN in the logits"),
        ],
    ),
    StepOutputs(
        admitted=[],
        outputs=[Output(uid=1, token_id=5, logprobs=TokenLogprobs(-0.5, [5, 6], [-0.5, -2.5]))],
        ended=[],
        prompt_logprobs=[
            PromptLogprobs(
                uid=1,
                start=1,
                logprobs=np.array([-1.5, -np.inf], np.float32),
                top_ids=np.arange(4, dtype=np.int32),
                top_logprobs=np.zeros(4, np.float32),
            )
        ],
    ),
    Flushed(ticket=1, flushed_tokens=64, kept_tokens=0),
    Prepared(ticket=2, refusal="it is not JSON"),
    Report(
        load=Load(running_requests=1, outstanding_prompt_tokens=12),
        evicted_blocks=np.empty(0, dtype=np.uint64),
        added_blocks=np.array([2**64 - 1, 0], dtype=np.uint64),
        counters={"steps": 3.0},
        step_age_s=0.1,
        step_s=[0.01],
        bubble_s=[0.0],
        block_runs=[
            BlockRun(("model", "", "salt"), 3, 2**64 - 1, np.array([7], np.uint64), np.arange(64, dtype=np.int32))
        ],
    ),
]


@pytest.mark.parametrize("message", FRONT_MESSAGES, ids=lambda message: type(message).__name__)
def test_front_messages_come_back_equal(message: FrontMessage) -> None:
    assert as_plain(codec.decode_front_message(codec.encode(message))) == as_plain(message)


@pytest.mark.parametrize("message", ENGINE_MESSAGES, ids=lambda message: type(message).__name__)
def test_engine_messages_come_back_equal(message: EngineMessage) -> None:
    assert as_plain(codec.decode_engine_message(codec.encode(message))) == as_plain(message)


@pytest.mark.parametrize(("num_rows", "num_tokens", "prefix"), [(0, 0, 0), (1, 1, 0), (256, 256, 64), (3, 8192, 0)])
def test_plans_come_back_equal(num_rows: int, num_tokens: int, prefix: int) -> None:
    sent = plan(num_rows=num_rows, num_tokens=num_tokens, prefix=prefix)
    assert as_plain(codec.decode_order(codec.encode(sent))) == as_plain(sent)


@pytest.mark.parametrize("error", [None, "out of memory"])
def test_results_come_back_equal(error: str | None) -> None:
    sent = StepResult(
        step=1,
        token_ids=np.array([5, -1], dtype=np.int32),
        failed=np.array([False, True]),
        started_s=1.0,
        ended_s=1.25,
        error=error,
    )
    assert as_plain(codec.decode_answer(codec.encode(sent))) == as_plain(sent)


def test_row_starts_and_results_with_all_that_they_can_carry_come_back_equal() -> None:
    plain = plan(num_rows=1, num_tokens=1, prefix=2)
    history = np.arange(3, dtype=np.int32)
    start = msgspec.structs.replace(plain.row_starts[0], edits=EDITS, logprobs=5, prompt_logprobs=0, history=history)
    sent = msgspec.structs.replace(plain, row_starts=(start,), left_rows=(4, 1))
    assert as_plain(codec.decode_order(codec.encode(sent))) == as_plain(sent)
    one, two = np.ones(1, np.int32), np.ones(2, np.float32)
    result = StepResult(
        step=1,
        token_ids=one,
        failed=np.array([False]),
        started_s=1.0,
        ended_s=2.0,
        logprobs=StepLogprobs(one, one, two[:1], np.array([1, 2], np.int32), two, 2),
        ended=(0,),
        causes=((0, "its grammar became too complex"),),
        out_of_memory=OutOfMemory(needed_bytes=1 << 40, free_bytes=None, in_sampling=True),
    )
    assert as_plain(codec.decode_answer(codec.encode(result))) == as_plain(result)


def test_grammars_go_to_the_runner_and_back() -> None:
    order = Compile(3, Grammar(GrammarKind.LARK, "start: /a/"))
    assert codec.decode_order(codec.encode(order)) == order
    assert codec.decode_answer(codec.encode(Compiled(3, "no"))) == Compiled(3, "no")


def test_decoded_arrays_are_aligned_and_writable_so_that_torch_takes_them() -> None:
    decoded = codec.decode_order(codec.encode(plan(num_rows=3, num_tokens=3, prefix=5)))
    for array in (decoded.rows, decoded.samples, decoded.slots, decoded.row_starts[0].prefix_slots):
        assert array.flags.aligned
        assert array.flags.writeable


def test_an_array_of_another_dtype_than_the_field_is_refused() -> None:
    wrong = submit(np.arange(4, dtype=np.uint32))
    with pytest.raises(msgspec.ValidationError, match="expected an array of int32, got uint32"):
        codec.decode_front_message(codec.encode(wrong))


@pytest.mark.parametrize("array", [np.zeros(2, dtype=np.float64), np.zeros((2, 2), dtype=np.int32)])
def test_an_array_that_no_message_holds_is_refused_by_the_sender(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="between processes"):
        codec.encode(submit(array))


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        codec.decode_front_message(codec.encode(ENGINE_MESSAGES[0]))


def test_an_object_is_never_unpickled() -> None:
    with pytest.raises(TypeError, match="cannot send object"):
        codec.encode(submit(object()))  # type: ignore[arg-type]
