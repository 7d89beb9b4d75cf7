"""Greedy tokens of the whole engine equal those of transformers on the same weights, however they are computed.

Cold and warm cache, prompts whole and in chunks, pages of 1 and 16, alone and in a batch, serial and overlapped, in one
process and in three. Ties of the reference's own logits (closer than 0.001) may go either way; they are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.demo_reference import LENGTHS, NUM_TOKENS, demo_prompts, demo_reference
from tests.support.engine_generation import (
    Generation,
    LoadedRunner,
    generate_alone,
    generate_together,
    inline_engine,
    started,
)
from tests.support.tiny_model import Architecture, tiny_model
from tests.support.transformers_reference import ReferenceTokens, greedy_tokens, load_llama_gguf
from worker.core.messages import Ready
from worker.engine.config import EngineConfig
from worker.engine.process import ProcessEngine
from worker.model.sources import resolve_model
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

FEWER_TOKENS = 16
"""Where one setting of the same model has had them all."""
MAX_TIES = 2
"""Of 22 prompts with 64 tokens each."""
WHOLE = 1024


@dataclass(frozen=True)
class Setting:
    """How tokens are computed."""

    chunk: int
    page_size: int
    overlap: bool
    together: bool = True
    num_tokens: int = NUM_TOKENS
    warm_tokens: int = FEWER_TOKENS
    """When not 0, everything is computed once more, this far: the prompts are cached then."""
    every: int = 1
    """Of the prompts, every so many."""

    def __str__(self) -> str:
        chunk = "whole" if self.chunk == WHOLE else f"chunk{self.chunk}"
        overlap, together = "overlapped" if self.overlap else "serial", "batch" if self.together else "alone"
        return f"{chunk}-page{self.page_size}-{overlap}-{together}"


class Runners:
    """Loads a runner for each page size once."""

    def __init__(self, config: TorchRunnerConfig) -> None:
        self._config = config
        self._loaded: dict[int, tuple[TorchRunner, Ready]] = {}

    def get(self, chunk: int, page_size: int) -> LoadedRunner:
        if page_size not in self._loaded:
            runner = TorchRunner(msgspec.structs.replace(self._config, page_size=page_size))
            self._loaded[page_size] = runner, runner.load()
        return LoadedRunner(*self._loaded[page_size], chunk)

    def close(self) -> None:
        for runner, _ in self._loaded.values():
            runner.close()


def runner_config(model_path: Path) -> TorchRunnerConfig:
    """float32; one thread, because CI machines are shared."""
    return TorchRunnerConfig(
        model_path=str(model_path),
        dtype="float32",
        device_memory_bytes=2 << 30,
        max_total_tokens=8192,
        chunked_prefill_size=WHOLE,
        max_running_requests=len(LENGTHS),
        max_context_tokens=1024,
        num_threads=1,
    )


def check_cached(cold: list[Generation], warm: list[Generation], prompts: list[list[int]], page_size: int) -> None:
    """The second time, all of a prompt is cached but for its last token and what fills no page."""
    assert sum(generation.cached_tokens for generation in cold) < sum(map(len, prompts)) / 2
    for generation, prompt in zip(warm, prompts, strict=True):
        assert generation.cached_tokens == (len(prompt) - 1) // page_size * page_size


async def check_setting(
    runners: Runners, setting: Setting, prompts: list[list[int]], reference: ReferenceTokens
) -> None:
    run = generate_together if setting.together else generate_alone
    some = slice(None, None, setting.every)
    prompts, reference = prompts[some], reference.of(some)
    async with inline_engine(runners.get(setting.chunk, setting.page_size), overlap=setting.overlap) as engine:
        cold = await run(engine, prompts, setting.num_tokens)
        warm = await run(engine, prompts, setting.warm_tokens) if setting.warm_tokens else []
    assert reference.differences([generation.token_ids for generation in cold]) <= MAX_TIES
    if warm:
        assert reference.differences([generation.token_ids for generation in warm]) <= MAX_TIES
        check_cached(cold, warm, prompts, setting.page_size)


# --- tiny random models ---


@dataclass(frozen=True)
class TinyCase:
    runners: Runners
    prompts: list[list[int]]
    reference: ReferenceTokens


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyCase]:
    """A tiny model that transformers has written itself, in the form of its newest version."""
    architecture: Architecture = request.param
    directory = tmp_path_factory.mktemp(architecture)
    AutoModelForCausalLM.from_pretrained(tiny_model(architecture), dtype=torch.float32).save_pretrained(directory)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    runners = Runners(runner_config(directory))
    yield TinyCase(runners, prompts, greedy_tokens(model, prompts, NUM_TOKENS))
    runners.close()


@pytest.mark.parametrize(
    "setting",
    [  # every two values of chunk, page size and overlap meet
        Setting(WHOLE, 16, overlap=True),
        Setting(WHOLE, 1, overlap=False, num_tokens=32),
        Setting(64, 1, overlap=True, num_tokens=32),
        Setting(64, 16, overlap=False, num_tokens=32),
        Setting(16, 16, overlap=True, num_tokens=32),
        Setting(16, 1, overlap=False, num_tokens=32),
        Setting(64, 16, overlap=True, together=False, num_tokens=FEWER_TOKENS, warm_tokens=4),
        Setting(16, 1, overlap=False, together=False, num_tokens=FEWER_TOKENS, warm_tokens=4),
    ],
    ids=str,
)
async def test_tiny_models(tiny: TinyCase, setting: Setting) -> None:
    await check_setting(tiny.runners, setting, tiny.prompts, tiny.reference)


# --- the demonstration model ---


@pytest.fixture(scope="module")
def demo_path() -> Path:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def prompts(demo_path: Path) -> list[list[int]]:
    return demo_prompts(demo_path)


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> ReferenceTokens:
    return demo_reference(prompts)


@pytest.fixture(scope="module")
def demo_runners(demo_path: Path) -> Iterator[Runners]:
    runners = Runners(runner_config(demo_path))
    yield runners
    runners.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_still_says_what_the_reference_holds(
    demo_path: Path, prompts: list[list[int]], reference: ReferenceTokens
) -> None:
    """A few prompts of it, and fewer tokens."""
    few = slice(None, None, 6)
    now = greedy_tokens(load_llama_gguf(demo_path), prompts[few], 6)
    assert len(now.token_ids) == 4
    assert reference.of(few).differences(now.token_ids) == 0
    for row, kept in zip(now.gaps, reference.of(few).gaps, strict=True):
        assert row == pytest.approx(kept[:6], abs=0.005)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "setting",
    [
        Setting(WHOLE, 16, overlap=True),
        Setting(16, 1, overlap=True, num_tokens=FEWER_TOKENS, warm_tokens=4, every=2),
        Setting(64, 1, overlap=False, num_tokens=FEWER_TOKENS, warm_tokens=4),
        Setting(64, 16, overlap=True, together=False, num_tokens=FEWER_TOKENS, warm_tokens=0, every=3),
    ],
    ids=str,
)
async def test_the_demonstration_model(
    demo_runners: Runners, prompts: list[list[int]], reference: ReferenceTokens, setting: Setting
) -> None:
    assert len(prompts) >= 20
    await check_setting(demo_runners, setting, prompts, reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_demonstration_model_in_processes_of_its_own(
    demo_path: Path, prompts: list[list[int]], reference: ReferenceTokens
) -> None:
    """Overlap with a runner that computes while the next step is planned."""
    config = EngineConfig(runner=runner_config(demo_path), overlap=True, log_level="warning")
    async with started(ProcessEngine(config)) as engine:
        generations = await generate_together(engine, prompts, FEWER_TOKENS)
    assert reference.differences([generation.token_ids for generation in generations]) <= MAX_TIES
