from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from radixfleet import blocks, convert
from radixfleet.errors import InvalidRequest, Unavailable, UnknownModel
from radixfleet.text import Tokenizer, TokenizerSpec
from radixfleet.types import TokenArray
from radixfleet.v1 import inference_pb2
from router.api.prompts import Prompts
from router.workers.group import ModelGroup, model_groups
from router.workers.state import WorkerState
from tests.support.byte_tokenizer import byte_spec
from tests.support.router_parts import MODEL, Parts

SPEC = byte_spec()
SERVED = replace(MODEL, vocab_size=SPEC.vocab_size, tokenizer_fingerprint=SPEC.fingerprint())


class Threads(ThreadPoolExecutor):
    """Counts what it was given."""

    jobs = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.jobs += 1
        return super().submit(fn, *args, **kwargs)


@dataclass
class Tokenizers:
    known: dict[int, Tokenizer] = field(default_factory=lambda: {SPEC.fingerprint(): Tokenizer(SPEC)})

    def get(self, fingerprint: int) -> Tokenizer | None:
        return self.known.get(fingerprint)

    by_name: dict[str, Tokenizer] = field(default_factory=dict)

    def named(self, model: str) -> Tokenizer | None:
        return self.by_name.get(model)


class Preparing:
    """Prompts over workers that are simply said to serve."""

    def __init__(self, threads: Threads, *models: str) -> None:
        self.parts = Parts(0)
        self.threads = threads
        self.tokenizers = Tokenizers()
        for number, model in enumerate(models):
            self.parts.add(f"w{number}", model=replace(SERVED, model=model))
        registry: Any = self
        tokenizers: Any = self.tokenizers
        self.prompts = Prompts(registry, tokenizers, threads, self.parts.metrics)

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        return tuple(self.parts.workers)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted(model_groups(self.parts.workers)))

    def group(self, model: str) -> ModelGroup:
        return model_groups(self.parts.workers)[model]


@pytest.fixture
def threads() -> Iterator[Threads]:
    with Threads(1) as pool:
        yield pool


def request(ids: TokenArray | None = None, text: str = "", **fields: Any) -> inference_pb2.GenerateRequest:
    prompt = inference_pb2.Prompt(text=text)
    if ids is not None:
        prompt = inference_pb2.Prompt(token_ids=convert.pack_tokens(ids))
    return inference_pb2.GenerateRequest(prompt=prompt, **fields)


async def test_a_prepared_request_holds_what_the_worker_gets_and_what_the_choice_needs(threads: Threads) -> None:
    prompts = Preparing(threads, "m").prompts
    sampling = inference_pb2.SamplingParams(temperature=0.5, stop=["END"])
    prepared = await prompts.prepare(
        request(text="x" * 200, request_id="mine", sampling=sampling, cache_salt="t", priority=2, lease_id="ignored")
    )
    assert (prepared.request_id, prepared.model, prepared.prompt_tokens) == ("mine", "m", 200)
    assert prepared.fingerprint == SPEC.fingerprint()
    seed = blocks.seed_hash(blocks.namespace("m", "t"))
    assert prepared.seed == seed
    assert np.array_equal(prepared.block_hashes, blocks.chain_hashes(seed, prepared.tokens))
    sent = prepared.message
    assert np.array_equal(convert.unpack_tokens(sent.prompt.token_ids), prepared.tokens)
    assert (sent.request_id, sent.model, sent.cache_salt, sent.priority) == ("mine", "m", "t", 2)
    assert sent.sampling == sampling
    assert sent.lease_id == ""


async def test_text_is_tokenized_off_the_event_loop_and_short_ids_need_no_thread(threads: Threads) -> None:
    """Behaviour 59: what takes long never runs on the loop."""
    preparing = Preparing(threads, "m")
    ran_on: list[int] = []
    tokenizer = preparing.tokenizers.known[SPEC.fingerprint()]

    class Watched(Tokenizer):
        def encode(self, text: str) -> TokenArray:
            ran_on.append(threading.get_ident())
            return tokenizer.encode(text)

    preparing.tokenizers.known[SPEC.fingerprint()] = Watched(SPEC)
    await preparing.prompts.prepare(request(text="hello"))
    assert ran_on
    assert threading.get_ident() not in ran_on
    assert threads.jobs == 1
    short = np.arange(100, dtype=np.uint32)
    await preparing.prompts.prepare(request(short))
    assert threads.jobs == 1
    await preparing.prompts.prepare(request(np.zeros(30_000, dtype=np.uint32)))
    assert threads.jobs == 1
    await preparing.prompts.prepare(request(np.zeros(50_000, dtype=np.uint32)))
    assert threads.jobs == 2
    plain = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[1] * 10_000))  # read one by one
    await preparing.prompts.prepare(inference_pb2.GenerateRequest(prompt=plain))
    assert threads.jobs == 3


async def test_only_text_is_measured_by_the_longest_token(threads: Threads) -> None:
    """Behaviour 59: finding that reads the whole vocabulary, so ids, which are read on the loop, go without."""
    preparing = Preparing(threads, "m")
    tokenizer = preparing.tokenizers.known[SPEC.fingerprint()]
    await preparing.prompts.prepare(request(np.arange(100, dtype=np.uint32)))
    assert "longest_token" not in vars(tokenizer)
    await preparing.prompts.prepare(request(text="hello"))
    assert "longest_token" in vars(tokenizer)


async def test_a_prompt_that_must_be_computed_whole_is_cheaper_nowhere(threads: Threads) -> None:
    prompts = Preparing(threads, "m").prompts
    sampling = inference_pb2.SamplingParams(prompt_logprobs=1)
    prepared = await prompts.prepare(request(text="x" * 200, sampling=sampling))
    assert len(prepared.block_hashes) == 0
    plain = await prompts.prepare(request(text="x" * 200))
    output = np.arange(100, dtype=np.uint32)
    whole = np.concatenate([plain.block_hashes, plain.output_hashes(output)])
    assert np.array_equal(prepared.output_hashes(output), whole)


async def test_ids_of_the_client_bind_no_tokenizer(threads: Threads) -> None:
    prepared = await Preparing(threads, "m").prompts.prepare(request(np.arange(100, dtype=np.uint32)))
    assert prepared.fingerprint is None


async def test_both_ways_of_preparing_ids_agree(threads: Threads) -> None:
    prompts = Preparing(threads, "m").prompts
    ids = (np.arange(5000) % 256).astype(np.uint32)
    long, short = await prompts.prepare(request(ids)), await prompts.prepare(request(ids[:640]))
    assert np.array_equal(long.block_hashes[:10], short.block_hashes)


def test_the_only_model_needs_no_name(threads: Threads) -> None:
    prompts = Preparing(threads, "m", "m").prompts
    assert prompts.model("").info.model == prompts.model("m").info.model == "m"
    with pytest.raises(UnknownModel, match="no model is called 'n'; served are m"):
        prompts.model("n")


def test_a_name_without_end_does_not_hide_the_models_that_are_served(threads: Threads) -> None:
    prompts = Preparing(threads, "m", "m").prompts
    with pytest.raises(UnknownModel, match=r"^no model is called 'x{100}\.\.\.'; served are m$"):
        prompts.model("x" * 100_000)


def test_one_of_several_models_must_be_named(threads: Threads) -> None:
    prompts = Preparing(threads, "b", "a").prompts
    assert prompts.model("a").info.model == "a"
    with pytest.raises(InvalidRequest, match="one of a, b"):
        prompts.model("")


def test_before_any_worker_has_told_its_model_the_answer_is_to_come_back(threads: Threads) -> None:
    """Behaviour 55: not "unknown model", which a client would not try again."""
    with pytest.raises(Unavailable, match="no worker has registered") as caught:
        Preparing(threads).prompts.model("m")
    assert caught.value.retry_after_s is not None
    preparing = Preparing(threads, "m")
    preparing.tokenizers.known.clear()
    with pytest.raises(Unavailable, match="tokenizer"):
        preparing.prompts.model("m")


def test_workers_in_use_decide_about_the_tokenizer_of_a_model(threads: Threads) -> None:
    preparing = Preparing(threads, "m")
    other = byte_spec(chat_template=None)
    preparing.tokenizers.known[other.fingerprint()] = Tokenizer(other)
    info = replace(SERVED, tokenizer_fingerprint=other.fingerprint(), max_context_tokens=10_000_000)
    newer = preparing.parts.add("newer", model=info)
    newer.connected = False
    newer.changed()
    assert preparing.prompts.model("m").tokenizer.spec == SPEC
    newer.connected = True
    newer.changed()
    assert preparing.prompts.model("m").tokenizer.spec == other


def test_chains_that_were_worked_out_last_while_facts_are_told_again(threads: Threads) -> None:
    """Asked again, a worker gives the same facts in a message of its own."""
    preparing = Preparing(threads, "m", "m")
    prompts, first = preparing.prompts, preparing.prompts.model("m")
    for worker in preparing.workers:
        assert worker.facts is not None
        worker.facts = replace(worker.facts, model=replace(worker.facts.model))
        assert prompts.model("m") is first
    for worker in preparing.workers:
        worker.facts = replace(worker.facts, model=replace(SERVED, model="m", max_context_tokens=77))  # type: ignore[type-var]
    assert prompts.model("m").info.max_context_tokens == 77


async def test_chains_last_where_the_router_was_given_the_tokenizer(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of engines that tell no tokenizer, with `--tokenizers`; nor is the vocabulary hashed for each prompt."""
    hashed: list[TokenizerSpec] = []
    to_json = TokenizerSpec.to_json

    def watched(spec: TokenizerSpec) -> bytes:
        hashed.append(spec)
        return to_json(spec)

    monkeypatch.setattr(TokenizerSpec, "to_json", watched)
    preparing = Preparing(threads)
    preparing.tokenizers.known.clear()
    preparing.tokenizers.by_name["m"] = Tokenizer(SPEC)
    unknown = replace(MODEL, model="m", vocab_size=0, tokenizer_fingerprint=0)
    preparing.parts.add("engine", dialect="openai", model=unknown)
    served = preparing.prompts.model("m")
    assert served.info.tokenizer_fingerprint == SPEC.fingerprint()
    hashed.clear()
    for _ in range(5):
        await preparing.prompts.prepare(request(text="x" * 64 * 40))
        assert preparing.prompts.model("m") is served
    assert len(served.chains) == 2, "pieces of 16 blocks"
    assert not hashed


@pytest.mark.parametrize("ids", [[SPEC.vocab_size], [2**32 - 1]])
async def test_unknown_ids_have_no_text(threads: Threads, ids: list[int]) -> None:
    prompts = Preparing(threads, "m").prompts
    with pytest.raises(InvalidRequest) as caught:
        await prompts.detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
    assert caught.value.field == "token_ids"
    assert await prompts.detokenize(inference_pb2.DetokenizeRequest(token_ids=[104, 105])) == "hi"


@pytest.mark.parametrize("look_aside", [False, True])
async def test_the_limit_of_an_answer_is_known_to_the_choice(threads: Threads, *, look_aside: bool) -> None:
    prompts = Preparing(threads, "m").prompts
    message = request(np.arange(100, dtype=np.uint32))
    assert prompts.begin(message, look_aside=look_aside).work().answer_tokens == 1, "any room is enough"
    message.sampling.max_new_tokens = 50
    assert prompts.begin(message, look_aside=look_aside).work().answer_tokens == 50


async def test_look_aside_refuses_what_no_worker_can_take(threads: Threads) -> None:
    """Its client would get a lease, and hear of it from the worker; a request that is sent on brings that answer."""
    preparing = Preparing(threads, "m", "m")
    for worker, context in zip(preparing.workers, (300, 500), strict=True):
        worker.facts = replace(worker.facts, model=replace(SERVED, model="m", max_context_tokens=context))  # type: ignore[type-var]
    preparing.parts.add("engine", dialect="vllm", model=replace(SERVED, model="m"))

    def prepared_tokens(prompt: inference_pb2.GenerateRequest, *, look_aside: bool = True) -> int:
        return preparing.prompts.begin(prompt, look_aside=look_aside).work().prompt_tokens

    ids = (np.arange(500) % 256).astype(np.uint32)
    assert prepared_tokens(request(ids[:499])) == 499
    for too_long in (request(ids), request(text="x" * 500), request(text="x" * 5000)):
        with pytest.raises(InvalidRequest) as caught:
            prepared_tokens(too_long)
        assert (caught.value.field, caught.value.metadata) == ("prompt", {"max_tokens": "499"})
        assert prepared_tokens(too_long, look_aside=False) >= 500
    preparing.parts.add("loading", model=replace(SERVED, model="m", max_context_tokens=0))
    assert prepared_tokens(request(ids)) == 500, "it may have a longer one"
