"""What is seen of any engine beside our own worker in one fleet, both with the same two-layer Llama in float32."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from radixfleet.answers import Completion, WorkerEntry
from radixfleet.client import Client
from radixfleet.errors import RadixfleetError
from radixfleet.types import WorkerStatus
from tests.interop.engines import say, worker_command

MESSAGES = [{"role": "user", "content": "hello"}]
_START_S = 900.0
_OURS = ("--dtype", "float32", "--device-memory", "256MiB", "--threads", "1", "--context-length", "2048")
_TEXT = "the worker keeps a prefix of each prompt in its cache and the router sends the next request there"


def our_worker(model: Path, port: int) -> list[str]:
    """It is called "ours"."""
    return worker_command(str(model), port, "ours", *_OURS)


def prompt_of_words(number: int, words: int) -> str:
    """Another one for each number."""
    known = _TEXT.split()
    return " ".join(known[(number * 7 + position * (1 + number % 5)) % len(known)] for position in range(words))


async def serving(client: Client, engine: subprocess.Popen[bytes], *, workers: int = 2) -> list[WorkerEntry]:
    """All of so many workers, once each is connected and serves."""
    ends_at_s = asyncio.get_running_loop().time() + _START_S
    while True:
        entries: list[WorkerEntry] = []
        with suppress(RadixfleetError):
            entries = list(await client.list_workers())
        if len(entries) == workers and all(
            entry.status is WorkerStatus.SERVING and entry.connected for entry in entries
        ):
            return entries
        assert engine.poll() is None, "the engine ended: see its log"
        assert asyncio.get_running_loop().time() < ends_at_s, f"not all serve: {entries}"
        await asyncio.sleep(0.5)


async def greedy_answers(client: Client, **options: Any) -> list[tuple[str, Completion]]:
    """24 of 24 tokens, each with its prompt; asked for at once, so that all workers have to serve."""
    prompts = [prompt_of_words(number, 30) for number in range(24)]
    asked = (client.complete(prompt, temperature=0, max_new_tokens=24, **options) for prompt in prompts)
    return list(zip(prompts, await asyncio.gather(*asked), strict=True))


async def prompt_at(client: Client, worker_id: str, words: int, *, events_s: float = 0.0) -> str:
    """A new prompt, sent once, that went to this worker. `events_s`: what its KV events may take."""
    for number in range(100, 200):
        prompt = prompt_of_words(number * words, words)
        if (await client.complete(prompt, max_new_tokens=1)).started.worker_id == worker_id:
            await asyncio.sleep(events_s)
            return prompt
    raise AssertionError(f"no request went to {worker_id}")


async def follows_a_prefix(client: Client, worker_id: str, *, events_s: float = 0.0) -> str:
    """A prompt that is routed to where it was computed before, and found there."""
    prompt = await prompt_at(client, worker_id, 400, events_s=events_s)
    again = await client.complete(prompt, max_new_tokens=1)
    assert again.started.worker_id == worker_id
    assert again.started.route is not None
    assert again.usage.cached_tokens >= 128
    say(
        f"a prompt of {again.usage.prompt_tokens} tokens once more: routed for its prefix "
        f"({again.started.route.reason}), predicted {again.started.route.predicted_cached_tokens} cached tokens, "
        f"the engine counted {again.usage.cached_tokens}"
    )
    return prompt


async def serves_without_a_tokenizer(client: Client, worker_id: str) -> None:
    """Behind a router that has none of its model."""
    asked = ("the router", MESSAGES, [5, 6, 7])
    answers = [await client.complete(prompt, temperature=0, max_new_tokens=8, ignore_eos=True) for prompt in asked]
    assert {answer.started.worker_id for answer in answers} == {worker_id}
    assert [answer.usage.completion_tokens for answer in answers] == [8, 8, 8]
    system = {"role": "system", "content": prompt_of_words(77, 300)}
    cached = []
    for question in ("one", "two", "three"):
        answer: Completion = await client.complete([system, {"role": "user", "content": question}], max_new_tokens=4)
        cached.append(answer.usage.cached_tokens)
    assert all(cached[1:]), cached
    say(f"without a tokenizer: text, chat and ids are answered; three chats with one system prompt: {cached} cached")


async def killed(engine: subprocess.Popen[bytes], client: Client) -> None:
    """Our worker goes on alone."""
    engine.kill()
    for number in range(6):
        answer = await client.complete(prompt_of_words(900 + number, 10), max_new_tokens=4)
        assert answer.started.worker_id == "ours"
    say("engine killed: the next requests went to our worker, none failed")
