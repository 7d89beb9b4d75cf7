"""Answers that go on where another worker's ended: together they are what one worker would have given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from radixfleet.channel import open_channel
from radixfleet.convert import pack_tokens
from radixfleet.errors import InvalidRequest
from radixfleet.output_text.detokenizer import Detokenizer
from radixfleet.text import Tokenizer
from radixfleet.v1 import inference_pb2, inference_pb2_grpc
from tests.support.answers import generate, read_failure, request
from tests.support.byte_tokenizer import END_ID, byte_spec
from tests.support.fake_engine import READY, FakeEngine
from tests.support.gated_executor import GatedExecutor
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker
from worker.servicer.grammars import Grammars
from worker.servicer.intake import Intake

PROMPT = "continue me"


@pytest.fixture
async def stub() -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with sim_worker() as worker, open_channel(worker.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def ids(tokens: list[int]) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 24, "ignore_eos": True},
        {"max_new_tokens": 24, "temperature": 1.0, "seed": 11, "ignore_eos": True},
        {"max_new_tokens": 24, "temperature": 0.8, "seed": 3, "min_new_tokens": 20},
    ],
)
async def test_cut_anywhere_the_rest_is_what_was_left(
    stub: inference_pb2_grpc.InferenceStub, fields: dict[str, object]
) -> None:
    """Greedy and seeded: no token lost or repeated, and the usage is that of the whole."""
    whole = await generate(stub, PROMPT, **fields)
    for count in range(len(whole.token_ids) + 1):
        rest = await generate(stub, PROMPT, generated=ids(whole.token_ids[:count]), **fields)
        assert rest.token_ids == whole.token_ids[count:]
        assert rest.reason == whole.reason
        assert rest.finished is not None
        assert rest.finished.usage.completion_tokens == len(whole.token_ids)
        assert rest.finished.usage.prompt_tokens == rest.started.prompt_tokens == len(PROMPT)
        assert rest.finished.usage.cached_tokens <= len(PROMPT)


async def test_the_text_is_that_of_the_deltas_before_the_cut(stub: inference_pb2_grpc.InferenceStub) -> None:
    """What the first worker had said with its tokens and what the second says make the whole text, for every cut."""
    whole = await generate(stub, PROMPT, max_new_tokens=32, ignore_eos=True)
    tokenizer = Tokenizer(byte_spec())
    detokenizer = Detokenizer(tokenizer.decode, tokenizer.special_token_ids)
    said = ""
    for count, token_id in enumerate(whole.token_ids, start=1):
        said += detokenizer.push(token_id)
        rest = await generate(stub, PROMPT, max_new_tokens=32, ignore_eos=True, generated=ids(whole.token_ids[:count]))
        assert said + rest.text == whole.text


async def test_a_stop_string_that_begins_before_the_cut_ends_the_answer_behind_it(
    stub: inference_pb2_grpc.InferenceStub,
) -> None:
    plain = await generate(stub, "stops", max_new_tokens=40, ignore_eos=True)
    letters = [
        index
        for index in range(4, 36)
        if all(32 < token < 127 for token in plain.token_ids[index : index + 2])
        and bytes(plain.token_ids[index : index + 2]) not in bytes(plain.token_ids[: index + 1])
    ]
    start = letters[0]
    stop = bytes(plain.token_ids[start : start + 2]).decode()
    for count in (start, start + 1, start + 2):
        rest = await generate(
            stub, "stops", max_new_tokens=40, ignore_eos=True, stop=[stop], generated=ids(plain.token_ids[:count])
        )
        assert rest.token_ids == plain.token_ids[count : start + 2]
        assert (rest.reason, rest.finished and rest.finished.matched_stop) == ("STOP", stop)
        assert rest.finished is not None
        assert rest.finished.usage.completion_tokens == start + 2


async def test_an_answer_whose_last_token_was_there_only_lacks_its_end(stub: inference_pb2_grpc.InferenceStub) -> None:
    rest = await generate(stub, PROMPT, max_new_tokens=9, generated=ids([65, 66, END_ID]))
    assert rest.finished is not None
    assert (rest.reason, rest.finished.matched_token_id, rest.token_ids) == ("STOP", END_ID, [])
    assert rest.started.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("fields", "generated", "message"),
    [
        ({"n": 2}, [65], "n"),
        ({"presence_penalty": 1.0}, [65], "presence_penalty"),
        ({"frequency_penalty": -1.0}, [65], "frequency_penalty"),
        ({"prompt_logprobs": 1}, [65], "prompt_logprobs"),
        ({"grammar": inference_pb2.Grammar(regex="a*")}, [65], "grammar"),
        ({"max_new_tokens": 2}, [65, 66, 67], "at most 2"),
        ({}, [65, 100_000], "vocabulary|100000|100,000"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    stub: inference_pb2_grpc.InferenceStub, fields: dict[str, object], generated: list[int], message: str
) -> None:
    _, error = await read_failure(stub.Generate(request(PROMPT, generated=ids(generated), **fields)))
    assert isinstance(error, InvalidRequest)
    assert error.field.startswith("generated")
    with pytest.raises(InvalidRequest, match=message):
        raise error


async def test_a_packed_beginning_is_read_too(stub: inference_pb2_grpc.InferenceStub) -> None:
    whole = await generate(stub, PROMPT, max_new_tokens=8, ignore_eos=True)
    packed = pack_tokens(np.array(whole.token_ids[:3], dtype=np.uint32))
    rest = await generate(stub, PROMPT, max_new_tokens=8, ignore_eos=True, generated=packed)
    assert rest.token_ids == whole.token_ids[3:]


async def test_the_beginning_of_an_answer_is_read_by_a_thread() -> None:
    """Behaviour 59: its tokens become text again, one by one, and others are not to wait for that."""
    threads = GatedExecutor()
    grammars = Grammars(FakeEngine(), None)
    intake = Intake("sim-model", Tokenizer(byte_spec()), threads, grammars, default_max_new_tokens=16)
    preparing = asyncio.create_task(intake.prepare(request([1], generated=ids([65, 66, 67])), READY))
    await until(lambda: len(threads.waiting) == 1)
    threads.release()
    prepared = await preparing
    assert (prepared.generated.tolist(), prepared.ending) == ([65, 66, 67], None)
