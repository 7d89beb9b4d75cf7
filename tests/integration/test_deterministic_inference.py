"""Deterministic inference: a request's tokens and log probabilities are the same to the bit, however it is computed."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arrangements import ArrangedRequest, TellingRunner, Told
from tests.support.engine_fakes import submit
from tests.support.engine_generation import started
from tests.support.runner_driver import RunnerDriver
from tests.support.tiny_model import Architecture, tiny_model
from tests.support.waiting import until
from worker.core.messages import Ready
from worker.engine.handle import EngineHandle
from worker.engine.inline import InlineEngine
from worker.model.sources import resolve_model
from worker.runner.kernels.compiler import find_compiler
from worker.runner.torch_config import AttentionName, Dtype, TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
ATTENTION: tuple[AttentionName, ...] = ("cpu", "sdpa")
"""The kernels, which also compute the layers in bfloat16, and torch."""
WHOLE = 256
ROWS = 40
NUM_TOKENS = 12
GREEDY: dict[str, float] = {}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01}


def config(dtype: Dtype, *, attention: AttentionName = "sdpa", deterministic: bool = True) -> TorchRunnerConfig:
    """Two threads: one of the things that change how torch computes a batch is how it is cut among them."""
    return TorchRunnerConfig(
        model_path=str(tiny_model(hidden_size=192, num_heads=6, num_kv_heads=2, max_context=512)),
        dtype=dtype,
        device_memory_bytes=256 << 20,
        max_total_tokens=16_384,
        max_running_requests=ROWS,
        chunked_prefill_size=WHOLE,
        num_threads=2,
        attention=attention,
        deterministic=deterministic,
    )


def tokens_of(request: int, length: int) -> list[int]:
    return [(request * 6151 + position * (7919 + request)) % 500 + 3 for position in range(length)]


# --- through a runner, by hand: all log probabilities, the prompt's too ---


@functools.cache
def loaded(dtype: Dtype, attention: AttentionName) -> tuple[TorchRunner, Ready]:
    if attention == "cpu" and find_compiler() is None:
        pytest.skip("no C compiler")
    runner = TorchRunner(config(dtype, attention=attention))
    return runner, runner.load()


class _Loaded(RunnerDriver):
    """A driver of a runner that is loaded already."""

    def __init__(self, runner: TorchRunner, ready: Ready) -> None:
        super().__init__(_Reused(runner, ready))


class _Reused:
    def __init__(self, runner: TorchRunner, ready: Ready) -> None:
        self._ready = ready
        self.run, self.prepare, self.close = runner.run, runner.prepare, runner.close

    def load(self) -> Ready:
        return self._ready


@dataclass(frozen=True)
class Arrangement:
    """How a prompt is computed."""

    chunks: tuple[int, ...] = (WHOLE,)
    """Over and over, until there is nothing left."""
    companions: tuple[int, ...] = ()
    """Prompt lengths of requests that decode in the same steps."""
    prefilling: int = 0
    """Tokens of yet another prompt in each step."""


def computed(
    driver: RunnerDriver, prompt: list[int], arrangement: Arrangement, values: dict[str, float]
) -> tuple[list[int], Told]:
    """Tokens, and what was told of every position."""
    others = {}
    for row, length in enumerate(arrangement.companions, start=2):
        driver.begin(row, tokens_of(row, length), temperature=0.7, seed=row)
        driver.prefill(row)
        others[row] = 0
    if arrangement.prefilling:
        driver.begin(1, tokens_of(1, 400))
        others[1] = arrangement.prefilling
    request = ArrangedRequest(driver, 0, prompt, seed=99, **values)
    left, step = len(prompt), 0
    while left or len(request.tokens) < NUM_TOKENS:
        chunk = min(arrangement.chunks[step % len(arrangement.chunks)], left)
        request.step(chunk, others)
        left, step = left - chunk, step + 1
        if step * arrangement.prefilling + arrangement.prefilling > 400:
            others.pop(1, None)
    return request.tokens, request.told


ARRANGEMENTS = {
    "beside one other": Arrangement(companions=(33,)),
    "beside many others": Arrangement(companions=tuple(range(20, 55))),
    "token by token": Arrangement(chunks=(1,)),
    "in odd chunks": Arrangement(chunks=(7,), companions=(5, 60)),
    "in chunks of pages": Arrangement(chunks=(16,), companions=(16, 17)),
    "in chunks that end with it": Arrangement(chunks=(50,), companions=(12,) * 20),
    "in mixed chunks beside another prompt": Arrangement(chunks=(33, 1, 64), companions=(90,), prefilling=37),
}


@pytest.mark.parametrize("values", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_arrangement(
    dtype: Dtype, attention: AttentionName, values: dict[str, float]
) -> None:
    """Behaviour 30: alone and whole, and in every other arrangement, tokens and log probabilities are the same."""
    runner, ready = loaded(dtype, attention)
    prompt = tokens_of(0, 150)
    tokens, told = computed(_Loaded(runner, ready), prompt, Arrangement(), values)
    assert sorted(told) == list(range(1, len(prompt) + NUM_TOKENS))
    for name, arrangement in ARRANGEMENTS.items():
        again, told_again = computed(_Loaded(runner, ready), prompt, arrangement, values)
        assert again == tokens, name
        assert told_again == told, name


@settings(max_examples=10)
@given(
    length=st.integers(1, 140),
    arrangement=st.builds(
        Arrangement,
        chunks=st.lists(st.integers(1, 70), min_size=1, max_size=4).map(tuple),
        companions=st.lists(st.integers(1, 80), max_size=12).map(tuple),
        prefilling=st.sampled_from([0, 3, 32, 50]),
    ),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from([GREEDY, SEEDED]),
)
def test_bits_do_not_depend_on_random_arrangements(
    length: int, arrangement: Arrangement, dtype: Dtype, values: dict[str, float]
) -> None:
    """Behaviour 30."""
    for attention in ATTENTION:
        runner, ready = loaded(dtype, attention)
        prompt = tokens_of(0, length)
        alone = computed(_Loaded(runner, ready), prompt, Arrangement(), values)
        assert computed(_Loaded(runner, ready), prompt, arrangement, values) == alone


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_setting_bits_do_depend_on_it(dtype: Dtype) -> None:
    """Else there would be nothing to set. Which arrangements differ is the libraries' affair; token by token does."""
    driver = RunnerDriver(TorchRunner(config(dtype, deterministic=False)))
    prompt = tokens_of(0, 150)
    alone = computed(driver, prompt, Arrangement(), GREEDY)
    differing = [name for name, other in ARRANGEMENTS.items() if computed(driver, prompt, other, GREEDY) != alone]
    assert "token by token" in differing


# --- through the engine: its own chunks and batches, the radix cache, retractions ---

PROMPTS = [tokens_of(0, 64) + tokens_of(7, 64)[:length] for length in (1, 5, 16, 31, 64)]
PROMPTS += [tokens_of(3, 16), tokens_of(4, 48), tokens_of(5, 47), tokens_of(6, 1)]
"""A shared prefix of a page and chunk boundary; prompts as long as some pages, and almost."""


async def generate(engine: EngineHandle, index: int, values: dict[str, float], priority: int = 0) -> list[int]:
    plain = submit(engine.next_uid(), PROMPTS[index], max_new_tokens=NUM_TOKENS)
    request = msgspec.structs.replace(plain, seed=index, priority=priority, **values)
    tokens: list[int] = []
    with engine.submit(request) as stream:
        async for progress in stream:
            tokens += progress.token_ids
    return tokens


async def all_at_once(engine: EngineHandle, values: dict[str, float]) -> list[list[int]]:
    return await asyncio.gather(*(generate(engine, index, values) for index in range(len(PROMPTS))))


@dataclass(frozen=True)
class Reference:
    """Each prompt by itself, whole, with nothing cached."""

    tokens: list[list[int]]
    told: dict[int, Told]


async def reference(runner: TorchRunner, ready: Ready, values: dict[str, float]) -> Reference:
    tokens, told = [], {}
    for index in range(len(PROMPTS)):
        telling = TellingRunner(runner, ready, chunk=WHOLE, rows=ROWS)
        async with started(InlineEngine(telling, overlap=False)) as engine:
            tokens.append(await generate(engine, index, values))
        told |= telling.told
    return Reference(tokens, told)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("dtype", "values"), [("float32", GREEDY), ("bfloat16", SEEDED)])
async def test_bits_do_not_depend_on_engine_and_cache(
    dtype: Dtype, attention: AttentionName, values: dict[str, float]
) -> None:
    """Behaviour 30: chunked or not, cache cold or warm, overlap on or off, a prefix that ends with a page or chunk."""
    runner, ready = loaded(dtype, attention)
    expected = await reference(runner, ready, values)
    assert all(len(told) == NUM_TOKENS for told in expected.told.values())
    for chunk, overlap in ((WHOLE, True), (64, False), (48, True), (5, True)):
        telling = TellingRunner(runner, ready, chunk=chunk, rows=ROWS)
        async with started(InlineEngine(telling, overlap=overlap)) as engine:
            for _cold_then_warm in range(2):
                assert await all_at_once(engine, values) == expected.tokens
                assert telling.told == expected.told
                telling.told.clear()


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", DTYPES)
async def test_bits_do_not_change_with_a_retraction(dtype: Dtype, attention: AttentionName) -> None:
    """Behaviour 30: what a retracted request had generated comes back as a prompt, and goes on alike."""
    runner, ready = loaded(dtype, attention)
    expected = await reference(runner, ready, SEEDED)
    telling = TellingRunner(runner, ready, chunk=WHOLE, rows=2)
    async with started(InlineEngine(telling, schedule_order="priority", preempt=True)) as engine:
        first = [asyncio.create_task(generate(engine, index, SEEDED)) for index in (0, 1)]
        # Every turn: the engine's steps are turns of this loop, and few are left.
        await until(lambda: all(len(telling.told.get(index, {})) >= 2 for index in (0, 1)), every_s=0)
        urgent = [generate(engine, index, SEEDED, priority=1) for index in (2, 3)]
        tokens = await asyncio.gather(*first, *urgent)
    assert telling.num_starts[0] == telling.num_starts[1] == 2
    assert tokens == expected.tokens[:4]
    assert telling.told == {index: expected.told[index] for index in range(4)}


# --- models ---


def check_model(path: Path, dtype: Dtype, attention: AttentionName, length: int) -> None:
    values = msgspec.structs.replace(
        config(dtype, attention=attention), model_path=str(path), device_memory_bytes=2 << 30, max_context_tokens=512
    )
    driver = RunnerDriver(TorchRunner(values))
    prompt = tokens_of(0, length)
    alone = computed(driver, prompt, Arrangement(), SEEDED)
    mixed = Arrangement(chunks=(33, 1, 64), companions=(5, 40), prefilling=20)
    assert computed(driver, prompt, mixed, SEEDED) == alone


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_biases_and_norms_of_heads(architecture: Architecture) -> None:
    """Behaviour 30, on models with parts that Llama has not."""
    check_model(tiny_model(architecture, hidden_size=128, max_context=512), "float32", "sdpa", 70)
    check_model(tiny_model(architecture, hidden_size=128, max_context=512), "bfloat16", "auto", 70)


@pytest.mark.slow
def test_the_demonstration_model() -> None:
    """Behaviour 30, on a real model, computed as it is when nothing is set."""
    check_model(resolve_model("demo"), "bfloat16", "auto", 60)
