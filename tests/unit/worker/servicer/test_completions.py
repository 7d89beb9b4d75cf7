"""Several completions, log probabilities and grammars over real gRPC."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pytest

from radixfleet.channel import open_channel
from radixfleet.client import Client
from radixfleet.errors import InternalError, InvalidRequest, RadixfleetError, Unavailable
from radixfleet.types import FinishReason
from radixfleet.v1 import inference_pb2_grpc
from tests.support.answers import read_failure, request
from tests.support.fake_engine import FakeEngine
from tests.support.grammars import PERSON
from tests.support.tiny_model import tiny_model
from tests.support.waiting import until
from tests.support.worker_fixture import sim_worker, torch_worker
from worker.core.logits import LogitEdits
from worker.core.messages import Output, PromptLogprobs, StepOutputs

PROMPT = [5, 6, 7] * 30


async def test_four_completions_have_four_indices_and_one_usage() -> None:
    """Behaviour 43: and their tokens differ, because each has a seed of its own; the first is what n = 1 gives."""
    async with sim_worker() as worker, Client(worker.address) as client:
        alone = await client.complete([1] * 100, temperature=1.0, seed=9, max_new_tokens=8, ignore_eos=True)
        await client.flush_cache()
        completion = await client.complete([1] * 100, n=4, temperature=1.0, seed=9, max_new_tokens=8, ignore_eos=True)
        again = await client.complete([1] * 100, n=4, temperature=1.0, seed=9, max_new_tokens=8, ignore_eos=True)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in completion.choices}) == 4
    assert completion.token_ids == alone.token_ids
    assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in completion.choices]
    assert [choice.finished.usage is not None for choice in completion.choices].count(True) == 1
    usage = completion.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (100, 0, 32)


async def test_n_beyond_reason_is_refused() -> None:
    """Behaviour 43: n = 2^63 - 1, with the field's name; others are unaffected."""
    async with sim_worker() as worker, Client(worker.address) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.complete([1, 2], n=2**63 - 1)
        assert caught.value.field == "sampling.n"
        assert len((await client.complete([1, 2], n=64, max_new_tokens=2)).choices) == 64


async def test_completions_end_one_by_one_and_the_last_has_the_usage() -> None:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, Client(worker.address) as client:
        engine.become_ready()
        asked = asyncio.create_task(client.complete([1, 2, 3], n=3, stop=["ab"], max_new_tokens=50))
        await until(lambda: bool(engine.submits))
        submit = engine.submits[0]
        first, second, third = submit.uid, *(child.uid for child in submit.children)
        assert len({submit.seed, *(child.seed for child in submit.children)}) == 3
        engine.admit(first, cached_tokens=2)
        engine.admit(second, cached_tokens=3)
        engine.output(second, *b"xab")
        await until(lambda: second in engine.aborted_uids)
        engine.output(first, *b"hello")
        engine.end(first, FinishReason.LENGTH)
        engine.output(third, *b"bye")
        engine.end(third, FinishReason.STOP, matched_token_id=7)
        completion = await asked
    assert [choice.text for choice in completion.choices] == ["hello", "x", "bye"]
    assert [choice.finished.reason for choice in completion.choices] == ["length", "stop", "stop"]
    assert completion.choices[1].finished.matched_stop == "ab"
    assert completion.choices[2].finished.usage == completion.usage
    assert (completion.usage.cached_tokens, completion.usage.completion_tokens) == (2, 11)
    assert engine.num_open == 0


async def test_an_error_of_one_completion_ends_all() -> None:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request([1, 2], n=3))
        reading = asyncio.create_task(read_failure(call))
        await until(lambda: bool(engine.submits))
        submit = engine.submits[0]
        engine.admit(submit.uid)
        engine.end(submit.children[0].uid, None, code="INTERNAL", message="NaN")
        kinds, error = await reading
        assert isinstance(error, InternalError)
        assert kinds in ([], ["started"])
        await until(lambda: not engine.num_open)
        assert set(engine.aborted_uids) == {submit.uid, submit.children[1].uid}


@pytest.mark.parametrize("how", ["crash", "stop"])
async def test_a_lost_engine_ends_several_completions_and_the_requests_behind_them(how: str) -> None:
    """Behaviour 43: the first of the completions that hears of it ends its siblings, and nobody is left waiting."""
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        stub = inference_pb2_grpc.InferenceStub(channel)
        reading: list[asyncio.Task[tuple[list[str], RadixfleetError]]] = []
        for n in (3, 1):
            reading.append(asyncio.create_task(read_failure(stub.Generate(request([1, 2], n=n)))))
            await until(lambda: len(engine.submits) == len(reading))
        engine.admit(engine.submits[0].uid)
        if how == "crash":
            engine.crash()
        else:
            await engine.stop()
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*reading)
        assert [type(error) for _, error in outcomes] == [Unavailable, Unavailable]
        await until(lambda: not len(worker.requests))
        assert engine.aborted_uids == []


async def test_a_client_that_goes_away_ends_all_completions() -> None:
    """Behaviour 6."""
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request([1, 2], n=5))
        await until(lambda: bool(engine.submits))
        call.cancel()
        await until(lambda: len(engine.aborted_uids) == 5)
        assert engine.num_open == 0


async def test_abort_by_execution_id_ends_all_completions() -> None:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, Client(worker.address) as client:
        engine.become_ready()
        asked = asyncio.create_task(client.complete([1, 2, 3], n=3))
        await until(lambda: bool(engine.submits))
        (execution_id,) = worker.requests._running
        assert await client.abort(execution_id)
        completion = await asked
    assert [choice.finished.reason for choice in completion.choices] == [FinishReason.ABORT] * 3


async def test_log_probabilities_come_with_their_tokens() -> None:
    async with sim_worker() as worker, Client(worker.address) as client:
        options = {"max_new_tokens": 6, "ignore_eos": True, "n": 2, "temperature": 1.0, "seed": 1}
        completion = await client.complete([3] * 40, logprobs=3, prompt_logprobs=2, **options)
        none = await client.complete([3] * 40, **options)
        bare = await client.complete([3] * 40, logprobs=0, **options)
    assert len(completion.prompt_logprobs) == 39
    assert all(len(told.top) == 2 for told in completion.prompt_logprobs)
    for choice, plain, zero in zip(completion.choices, none.choices, bare.choices, strict=True):
        assert choice.token_ids == plain.token_ids == zero.token_ids
        assert len(choice.logprobs) == len(choice.token_ids) == 6
        assert all(len(told.top) == 3 for told in choice.logprobs)
        assert plain.logprobs == ()
        assert [told.logprob for told in zero.logprobs] == [told.logprob for told in choice.logprobs]
    assert completion.usage.cached_tokens == 0


async def test_log_probabilities_of_a_long_prompt_come_in_messages_of_bounded_size() -> None:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, open_channel(worker.address) as channel:
        engine.become_ready()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request([1] * 900, prompt_logprobs=2))
        await until(lambda: bool(engine.submits))
        uid = engine.submits[0].uid
        engine.admit(uid)
        told = PromptLogprobs(
            uid,
            1,
            np.arange(2500, dtype=np.float32),
            np.arange(5000, dtype=np.int32),
            np.arange(5000, dtype=np.float32),
        )
        engine._hear(StepOutputs([], [Output(uid, 65)], [], [told]))
        engine.end(uid, FinishReason.LENGTH)
        messages = [message async for message in call]
    runs = [message.prompt_logprobs for message in messages if message.WhichOneof("event") == "prompt_logprobs"]
    assert [message.WhichOneof("event") for message in messages] == [
        "started",
        *["prompt_logprobs"] * 3,
        "delta",
        "finished",
    ]
    assert [(run.start, len(run.tokens)) for run in runs] == [(1, 1024), (1025, 1024), (2049, 452)]
    assert [token.logprob for run in runs for token in run.tokens] == list(range(2500))
    assert list(runs[1].tokens[0].top_token_ids) == [2048, 2049]


async def test_edits_reach_the_engine_and_plain_requests_have_none() -> None:
    engine = FakeEngine()
    async with sim_worker(engine=engine, serving=False) as worker, Client(worker.address) as client:
        engine.become_ready()
        tasks = [
            asyncio.create_task(client.complete([1], **options))
            for options in ({"frequency_penalty": 0.5, "logit_bias": {7: -1.5}}, {"temperature": 0.0}, {"n": 2})
        ]
        await until(lambda: len(engine.submits) == 3)
        edits = {submit.edits for submit in engine.submits if submit.edits is not None}
        assert edits == {LogitEdits(frequency_penalty=0.5, bias=((7, -1.5),))}
        assert [len(submit.children) for submit in engine.submits].count(1) == 1
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until(lambda: not engine.num_open)


async def test_a_simulated_worker_refuses_grammars() -> None:
    async with sim_worker() as worker, Client(worker.address) as client:
        with pytest.raises(InvalidRequest, match="simulated runner") as caught:
            await client.complete([1], regex="a+")
        assert caught.value.field == "sampling.grammar.regex"


async def test_answers_keep_to_their_grammars() -> None:
    """Several at once, of all kinds, beside one without; n > 1 has a matcher each."""
    async with torch_worker(tiny_model()) as worker, Client(worker.address) as client:
        free, people, codes, objects = await asyncio.gather(
            client.complete(PROMPT, temperature=0, max_new_tokens=12, ignore_eos=True),
            client.complete(PROMPT, n=3, seed=4, json_schema=PERSON, max_new_tokens=250),
            client.complete(PROMPT, seed=5, regex="[0-9]{4}(-[a-f]{2}){3}", max_new_tokens=100),
            client.complete(PROMPT, seed=6, lark='start: "{" /[a-z]{1,5}/ "}"', max_new_tokens=100),
        )
        assert [choice.finished.reason for choice in people.choices] == [FinishReason.STOP] * 3
        for choice in people.choices:
            person = json.loads(choice.text)
            assert set(person) == {"name", "age"}
            assert isinstance(person["age"], int)
        assert len({choice.text for choice in people.choices}) == 3
        assert re.fullmatch("[0-9]{4}(-[a-f]{2}){3}", codes.text)
        assert re.fullmatch("{[a-z]{1,5}}", objects.text)
        assert codes.finished.matched_token_id is None
        alone = await client.complete(PROMPT, temperature=0, max_new_tokens=12, ignore_eos=True)
        assert free.token_ids == alone.token_ids


DEEP = "start: r0\n" + "\n".join(f'r{i}: "x{i}" r{i + 1} | r{i + 1} r{i + 1}' for i in range(5000)) + '\nr5000: "z"'


async def test_bad_grammars_fail_their_requests_alone_with_the_field() -> None:
    """One that crashes llguidance and one that it cannot finish among them; good ones go on meanwhile."""
    async with torch_worker(tiny_model()) as worker, Client(worker.address) as client:
        for name, source, why in (
            ("regex", "a(", "unclosed group"),
            ("json_schema", '{"type": "objct"}', "Invalid type"),
            ("json_schema", '{"type":', "not JSON"),
            ("lark", "start: nobody", "unknown name"),
            ("lark", DEEP, "too large or nested too deeply"),
        ):
            for _ in range(2):  # what was refused is remembered
                with pytest.raises(InvalidRequest, match=why) as caught:
                    await client.complete(PROMPT, **{name: source})
                assert caught.value.field == f"sampling.grammar.{name}"
        good = await client.complete(PROMPT, regex="[ab]{3}", max_new_tokens=20)
        assert re.fullmatch("[ab]{3}", good.text)
