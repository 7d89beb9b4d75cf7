"""A whole worker in this process, on a port that the system picks: real gRPC, real scheduler and cache, inline engine.

    async with sim_worker() as worker, open_channel(worker.address) as channel: ...

The simulated runner takes no time and invents tokens that depend on prompt, parameters and seed alone. Leaving the
block checks that nothing is left over: no running request, no KV in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from radixfleet.clock import MonotonicClock
from radixfleet.text import TokenizerSpec
from tests.support.token_texts import byte_characters
from worker.app import Worker, make_engine, running_worker
from worker.config import WorkerSettings
from worker.engine.handle import EngineHandle
from worker.engine.inline import InlineEngine
from worker.model.tokenizer_files import load_tokenizer_spec
from worker.runner.protocol import Runner
from worker.runner.sim import SimRunner, SimRunnerConfig

END = "<|end|>"
END_ID = 256
VOCAB_SIZE = 257
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_spec() -> TokenizerSpec:
    """A vocabulary in which each byte is a token (id = byte), and 256 is the end of sequence."""
    tokenizer = Tokenizer(models.BPE({character: byte for byte, character in enumerate(byte_characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return TokenizerSpec(
        tokenizer_json=tokenizer.to_str(),
        chat_template=CHAT_TEMPLATE,
        bos_token=None,
        eos_token=END,
        bos_token_id=None,
        eos_token_ids=(END_ID,),
        add_bos=False,
        vocab_size=VOCAB_SIZE,
    )


def sim_runner(*, kv_tokens: int = 65_536, **config: Any) -> SimRunner:
    """A simulated runner that checks every plan. `config`: fields of SimRunnerConfig."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "kv_tokens": kv_tokens,
        "page_size": 16,
        "max_running_requests": 32,
        "chunked_prefill_size": 512,
        "max_context_tokens": kv_tokens,
        "cost": None,
        "verify": True,
    }
    return SimRunner(SimRunnerConfig(**(defaults | config)), MonotonicClock())


@asynccontextmanager
async def sim_worker(
    runner: Runner | None = None, *, engine: EngineHandle | None = None, serving: bool = True, **settings: Any
) -> AsyncIterator[Worker]:
    """A worker with the byte vocabulary; `settings` are fields of WorkerSettings.

    `serving`: wait until it serves before the block is entered, and check at its end that nothing is left over.
    """
    values = {"model": "sim-model", "runner": "sim", "port": 0, "metrics_port": 0, "worker_id": "worker-0"} | settings
    engine = engine or InlineEngine(runner or sim_runner())
    async with running_worker(WorkerSettings(**values), byte_spec(), engine) as worker:
        if serving:
            await engine.ready()
        yield worker
        if serving:
            await at_rest(worker)


@asynccontextmanager
async def torch_worker(model: Path, **settings: Any) -> AsyncIterator[Worker]:
    """A worker that computes the model of a directory, inline, in float32."""
    values = {"model": str(model), "port": 0, "metrics_port": 0, "inline": True, "device": "cpu", "dtype": "float32"}
    worker_settings = WorkerSettings(**(values | {"device_memory": "64MiB", "threads": 1} | settings))
    spec = load_tokenizer_spec(model)
    engine = make_engine(worker_settings, model, spec)
    async with running_worker(worker_settings, spec, engine) as worker:
        await engine.ready()
        yield worker
        await at_rest(worker)


async def at_rest(worker: Worker) -> None:
    """Wait until nothing runs and no KV is in use; fails when that does not come to be. Empties the cache."""
    await until(lambda: not len(worker.requests) and not worker.engine.num_open)
    async with asyncio.timeout(10):
        while (await worker.engine.flush()).kept_tokens:  # noqa: ASYNC110  only asking tells
            await asyncio.sleep(0.002)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until `condition` holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  any condition, not only those that somebody announces
            await asyncio.sleep(0.002)
