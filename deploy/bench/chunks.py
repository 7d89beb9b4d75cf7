"""What the chunk size trades: how long a running answer pauses for each chunk of a long prompt, against its TTFT.

One request decodes all the time. Prompts that nothing is cached of come in, one after another. With small chunks the
running answer goes on evenly and the prompts take longer, as each of their steps reads the weights again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import numpy as np

from deploy.bench.workload import Prompt, Workload, submit_of
from deploy.progress import Tell
from radixfleet.background import beside
from worker.engine.config import EngineConfig
from worker.engine.handle import RequestStream
from worker.engine.process import ProcessEngine

_WARM_UP_TOKENS = 8


class NothingBetween(Exception):
    """No two tokens of the running answer came while prompts were computed. `str(error)` says what to do."""


@dataclass(frozen=True, slots=True)
class ChunkFigures:
    """One chunk size. Milliseconds."""

    chunk_tokens: int
    inter_token_p50_ms: float
    """Of the running request, while a prompt is computed."""
    inter_token_p99_ms: float
    inter_token_max_ms: float
    ttft_ms: float
    """Of the prompts: median."""

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


async def sweep(
    configs: Sequence[tuple[int, EngineConfig]], prompt_tokens: int, num_prompts: int, tell: Tell
) -> list[ChunkFigures]:
    """Measure each chunk size on an engine of its own, one after another. Raises what `measure` does."""
    figures = []
    for chunk_tokens, config in configs:
        tell(f"chunks of {chunk_tokens}: loading")
        figures.append(await measure(chunk_tokens, config, prompt_tokens, num_prompts))
        tell(f"chunks of {chunk_tokens}: {figures[-1].ttft_ms:.0f} ms to the first token")
    return figures


async def measure(chunk_tokens: int, config: EngineConfig, prompt_tokens: int, num_prompts: int) -> ChunkFigures:
    """One chunk size. Raises EngineLoadError, NothingBetween, and InvalidRequest for a prompt that does not fit."""
    engine = ProcessEngine(config)
    await engine.start()
    try:
        ready = await engine.ready()
        running = Prompt(np.arange(100, 132, dtype=np.int32), ready.max_context_tokens - 32)
        times_s: list[float] = []
        ttfts_s, gaps_s = [], []
        answering = _note_times(engine.submit(submit_of(engine, running)), times_s)
        async with beside(answering, "a running answer") as reader:
            while len(times_s) < _WARM_UP_TOKENS and not reader.done():  # noqa: ASYNC110 - tokens come in milliseconds
                await asyncio.sleep(0.005)
            for prompt in Workload(num_prompts, 1, 0, prompt_tokens, (1, 1)).prompts(seed=1):
                began_s = time.monotonic()
                async for _ in engine.submit(submit_of(engine, prompt)):
                    pass
                ended_s = time.monotonic()
                ttfts_s.append(ended_s - began_s)
                inside = [at_s for at_s in times_s if began_s <= at_s <= ended_s]
                gaps_s += np.diff(inside).tolist()
    finally:
        await engine.stop()
    if not gaps_s:
        raise NothingBetween(
            f"while prompts of {prompt_tokens} tokens were computed, no two tokens of the running answer came: take "
            "longer prompts, or a model with a longer context"
        )
    p50, p99, most = (float(value) * 1e3 for value in np.quantile(gaps_s, [0.5, 0.99, 1.0]))
    return ChunkFigures(chunk_tokens, p50, p99, most, median(ttfts_s) * 1e3)


async def _note_times(stream: RequestStream, times_s: list[float]) -> None:
    """When each token of a request came."""
    async for progress in stream:
        times_s += [time.monotonic()] * len(progress.token_ids)
