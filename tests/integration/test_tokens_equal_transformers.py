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

from radixfleet.text import Tokenizer
from radixfleet.types import ChatMessage, ChatPrompt
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
from worker.model.tokenizer_files import load_tokenizer_spec
from worker.runner.torch_config import TorchRunnerConfig
from worker.runner.torch_runner import TorchRunner

NUM_TOKENS = 64
FEWER_TOKENS = 24
"""Where one setting of the same model has had them all."""
MAX_TIES = 2
"""Of 22 prompts with 64 tokens each."""
WHOLE = 1024
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 90, 127, 128, 129, 200, 301)

TEXT = """The history of the lighthouse begins with fires lit on hilltops to guide mariners into port. Raising the fire
would improve its visibility, so placing it on a platform became a practice that led to the development of the
lighthouse. In antiquity, the lighthouse functioned more as an entrance marker to ports than as a warning signal for
reefs and promontories, unlike many modern lighthouses. The most famous lighthouse structure from antiquity was the
Pharos of Alexandria, which collapsed following a series of earthquakes between 956 and 1323. The intact Tower of
Hercules at A Coruña gives insight into ancient lighthouse construction; other evidence about lighthouses exists in
depictions on coins and mosaics, of which many represent the lighthouse at Ostia. Coins from Alexandria and Laodicea
also exist. Modern construction began in the early eighteenth century, as transatlantic trade encouraged the building of
1,234 new towers. Advances in structural engineering and lighting equipment allowed for larger and more powerful ones,
including ones exposed to the sea. The function of lighthouses was gradually changed from indicating ports to the
providing of a visible warning against shipping hazards, such as rocks or reefs."""


@dataclass(frozen=True)
class Setting:
    """How tokens are computed."""

    chunk: int
    page_size: int
    overlap: bool
    together: bool = True
    num_tokens: int = NUM_TOKENS
    warm: bool = True
    """Compute everything twice: the second time the prompts are cached."""

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
    async with inline_engine(runners.get(setting.chunk, setting.page_size), overlap=setting.overlap) as engine:
        rounds = [await run(engine, prompts, setting.num_tokens) for _ in range(2 if setting.warm else 1)]
    for generations in rounds:
        assert reference.differences([generation.token_ids for generation in generations]) <= MAX_TIES
    if setting.warm:
        check_cached(*rounds, prompts, setting.page_size)


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
        Setting(WHOLE, 1, overlap=False),
        Setting(64, 1, overlap=True),
        Setting(64, 16, overlap=False),
        Setting(16, 16, overlap=True),
        Setting(16, 1, overlap=False),
        Setting(64, 16, overlap=True, together=False, num_tokens=16),
        Setting(16, 1, overlap=False, together=False, num_tokens=16),
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
def demo_prompts(demo_path: Path) -> list[list[int]]:
    """Text from different places, and chats: no two begin alike, but for the chat template's system prompt."""
    tokenizer = Tokenizer(load_tokenizer_spec(demo_path))
    text = tokenizer.encode(TEXT).tolist()
    chats = [
        tokenizer.encode_chat(ChatPrompt((ChatMessage("user", question),))).tolist()
        for question in ("Why is the sky blue?", "Add 1234 and 4321.", "Write a haiku about the sea.")
    ]
    slices = [text[start : start + length] for start, length in zip(range(0, 220, 10), LENGTHS, strict=True)]
    return [*slices[: len(LENGTHS) - len(chats)], *chats]


@pytest.fixture(scope="module")
def demo_reference(demo_path: Path, demo_prompts: list[list[int]]) -> ReferenceTokens:
    return greedy_tokens(load_llama_gguf(demo_path), demo_prompts, NUM_TOKENS)


@pytest.fixture(scope="module")
def demo_runners(demo_path: Path) -> Iterator[Runners]:
    runners = Runners(runner_config(demo_path))
    yield runners
    runners.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "setting",
    [
        Setting(WHOLE, 16, overlap=True),
        Setting(16, 1, overlap=True, num_tokens=FEWER_TOKENS),
        Setting(64, 1, overlap=False, num_tokens=FEWER_TOKENS),
        Setting(64, 16, overlap=True, together=False, num_tokens=FEWER_TOKENS, warm=False),
    ],
    ids=str,
)
async def test_the_demonstration_model(
    demo_runners: Runners, demo_prompts: list[list[int]], demo_reference: ReferenceTokens, setting: Setting
) -> None:
    assert len(demo_prompts) >= 20
    await check_setting(demo_runners, setting, demo_prompts, demo_reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_demonstration_model_in_processes_of_its_own(
    demo_path: Path, demo_prompts: list[list[int]], demo_reference: ReferenceTokens
) -> None:
    """Overlap with a runner that computes while the next step is planned."""
    config = EngineConfig(runner=runner_config(demo_path), overlap=True, log_level="warning")
    async with started(ProcessEngine(config)) as engine:
        generations = await generate_together(engine, demo_prompts, FEWER_TOKENS)
    assert demo_reference.differences([generation.token_ids for generation in generations]) <= MAX_TIES
