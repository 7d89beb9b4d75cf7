"""The whole engine against transformers: log probabilities, penalties and grammars, however they are computed."""

from __future__ import annotations

import asyncio
import json

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.engine_fakes import submit
from tests.support.engine_generation import started
from tests.support.grammars import PERSON, schema, tiny_tokenizer
from tests.support.tiny_model import tiny_model
from worker.core.logits import LogitEdits
from worker.core.messages import Child, Submit
from worker.engine.config import EngineConfig
from worker.engine.handle import EngineHandle, RequestStream
from worker.engine.inline import InlineEngine
from worker.engine.process import ProcessEngine
from worker.runner.torch_config import TorchRunnerConfig

PROMPT = np.random.default_rng(1).integers(3, 490, 70).tolist()
EDITS = LogitEdits(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.4, bias=((9, 1.5),))


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()


def engine_of(kind: str, chunk: int = 32, kv_tokens: int = 2048) -> EngineHandle:
    runner = TorchRunnerConfig(
        model_path=str(tiny_model()),
        dtype="float32",
        device_memory_bytes=2**28,
        max_total_tokens=kv_tokens,
        chunked_prefill_size=chunk,
        max_running_requests=6,
    )
    config = EngineConfig(runner=runner, overlap=kind != "serial", log_level="critical")
    return ProcessEngine(config) if kind == "process" else InlineEngine.from_config(config)


class Answer:
    """All of one stream."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[tuple[float, list[int], list[float]]] = []
        self.prompt: list[float] = []

    async def read(self, stream: RequestStream) -> Answer:
        async for progress in stream:
            self.tokens += progress.token_ids
            self.logprobs += [(told.logprob, told.top_ids, told.top_logprobs) for told in progress.logprobs]
            for run in progress.prompt_logprobs:
                self.prompt += run.logprobs.tolist()
        return self


async def answers(engine: EngineHandle, *requests: Submit) -> list[Answer]:
    """Of all requests at once, and of their children."""
    streams: list[RequestStream] = []
    for request in requests:
        children = tuple(Child(engine.next_uid(), child.seed) for child in request.children)
        streams += engine.submit_group(msgspec.structs.replace(request, uid=engine.next_uid(), children=children))
    return await asyncio.gather(*(Answer().read(stream) for stream in streams))


@torch.inference_mode()
def log_softmax(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1).numpy()


@pytest.mark.parametrize(("kind", "chunk"), [("serial", 128), ("serial", 16), ("overlapped", 7), ("process", 32)])
async def test_log_probabilities_equal_those_of_transformers(kind: str, chunk: int, reference: PreTrainedModel) -> None:
    """Chunked, after a cached prefix, in a batch, overlapped: within 2e-4."""
    plain = submit(0, PROMPT, max_new_tokens=10)
    told = msgspec.structs.replace(plain, logprobs=5, prompt_logprobs=1)
    after = msgspec.structs.replace(submit(0, [*PROMPT, 17, 18], max_new_tokens=10), logprobs=2)
    async with started(engine_of(kind, chunk)) as engine:
        await answers(engine, plain)
        first, second = await answers(engine, told, after)
    for answer, prompt in ((first, PROMPT), (second, [*PROMPT, 17, 18])):
        tokens = [*prompt, *answer.tokens]
        expected = log_softmax(reference, tokens)
        assert len(answer.logprobs) == 10
        for position, (logprob, top_ids, top_logprobs) in enumerate(answer.logprobs, start=len(prompt)):
            row = expected[position - 1]
            assert logprob == pytest.approx(row[tokens[position]], abs=2e-4)
            np.testing.assert_allclose(top_logprobs, np.sort(row)[::-1][: len(top_logprobs)], atol=2e-4)
            np.testing.assert_allclose(row[top_ids], top_logprobs, atol=2e-4)
    expected = log_softmax(reference, PROMPT)
    np.testing.assert_allclose(first.prompt, [expected[p - 1][PROMPT[p]] for p in range(1, 70)], atol=2e-4)


async def test_edited_answers_do_not_depend_on_overlap_or_retraction() -> None:
    """Behaviours 23 and 32: serial and roomy, overlapped and retracted, in processes: the same tokens."""
    requests = [
        msgspec.structs.replace(submit(0, PROMPT[shift:], max_new_tokens=60), edits=EDITS, logprobs=0)
        for shift in range(4)
    ]
    requests.append(
        msgspec.structs.replace(submit(0, PROMPT, max_new_tokens=200), edits=LogitEdits(grammar=schema(PERSON)))
    )
    expected = []
    async with started(engine_of("serial")) as engine:
        for request in requests:
            expected += [answer.tokens for answer in await answers(engine, request)]
    for kind, kv_tokens in (("overlapped", 2048), ("overlapped", 400), ("process", 2048)):
        async with started(engine_of(kind, kv_tokens=kv_tokens)) as engine:
            got = [answer.tokens for answer in await answers(engine, *requests)]
            assert got == expected, (kind, kv_tokens)
    person = json.loads(tiny_tokenizer().decode(expected[-1]))
    assert set(person) == {"name", "age"}


async def test_children_share_the_prompt_and_differ() -> None:
    """Behaviours 31 and 43."""
    request = msgspec.structs.replace(
        submit(0, PROMPT, max_new_tokens=20), temperature=1.0, seed=5, children=(Child(0, 6), Child(0, 7))
    )
    async with started(engine_of("process")) as engine:
        together = await answers(engine, request)
        alone = [
            (await answers(engine, msgspec.structs.replace(request, seed=seed, children=())))[0] for seed in (5, 6, 7)
        ]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert len({tuple(answer.tokens) for answer in together}) == 3
